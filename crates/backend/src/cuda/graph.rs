//! Graphs: what one step enqueues, recorded once and launched as one.

use std::sync::Arc;

use cudarc::driver::sys;

use super::{check::check, device::Device, gemm::row_bucket, stream::CudaStream};
use crate::{BackendError, StepCapacity, StepShape};

/// Most rows of a step that is replayed: above, the device is busy longer than launching takes.
const MAX_GRAPH_ROWS: usize = 256;

/// The padded shape whose graph can stand for `step`: a batch of rows that each bring one token and
/// sample one, as all do that only decode. Blocks and biases are padded to all there may be, since
/// kernels find the true counts in device memory.
pub(super) fn padded_shape(step: StepShape, capacity: StepCapacity) -> Option<StepShape> {
    let rows = step.num_rows;
    let decodes = rows > 0 && step.num_tokens == rows && step.num_sampled == rows;
    let padded = row_bucket(rows).min(capacity.max_rows).min(capacity.max_tokens);
    if !decodes || rows > MAX_GRAPH_ROWS || padded < rows {
        return None;
    }
    Some(StepShape {
        num_tokens: padded,
        num_rows: padded,
        num_sampled: padded,
        num_blocks: capacity.max_blocks,
        num_bias: capacity.max_bias,
        num_more_groups: capacity.num_more_groups,
        ..prefixes(step, capacity)
    })
}

/// Either no prefixes or all there may be: kernels find how many, but other ones look for them.
fn prefixes(step: StepShape, capacity: StepCapacity) -> StepShape {
    if step.num_prefixes == 0 {
        return StepShape::default();
    }
    let StepShape { num_prefixes, num_prefix_rows, .. } = capacity.shape();
    StepShape { num_prefixes, num_prefix_rows, ..StepShape::default() }
}

/// Operations recorded from a stream, ready to be launched any number of times.
pub(super) struct CapturedGraph {
    device: Arc<Device>,
    graph: sys::CUgraph,
    executable: sys::CUgraphExec,
}

// SAFETY: the driver does not lock graphs, but only one thread has this one: it is not `Sync`.
unsafe impl Send for CapturedGraph {}

impl CapturedGraph {
    /// Records what `enqueue` enqueues on `stream`; nothing of it runs. It must not allocate or
    /// wait.
    pub(super) fn capture(
        device: &Arc<Device>,
        stream: &CudaStream,
        enqueue: impl FnOnce() -> Result<(), BackendError>,
    ) -> Result<Self, BackendError> {
        device.bind()?;
        stream.set_left(None);
        let mode = sys::CUstreamCaptureMode_enum::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
        // SAFETY: the stream lives.
        let begun = unsafe { sys::cuStreamBeginCapture_v2(stream.raw(), mode) };
        check("cuStreamBeginCapture", begun)?;
        let enqueued = enqueue();
        stream.set_left(None);
        let mut graph = std::ptr::null_mut();
        // Whatever `enqueue` said, the stream must leave capture mode.
        // SAFETY: `graph` is a valid place for the result.
        let ended = unsafe { sys::cuStreamEndCapture(stream.raw(), &raw mut graph) };
        let mut captured =
            Self { device: Arc::clone(device), graph, executable: std::ptr::null_mut() };
        enqueued?;
        check("cuStreamEndCapture", ended)?;
        let executable = &raw mut captured.executable;
        // SAFETY: the graph was captured just now; `executable` is a valid place for the result.
        let made = unsafe { sys::cuGraphInstantiateWithFlags(executable, graph, 0) };
        check("cuGraphInstantiate", made)?;
        // SAFETY: both live. The upload keeps the first launch from waiting for it.
        let uploaded = unsafe { sys::cuGraphUpload(captured.executable, stream.raw()) };
        check("cuGraphUpload", uploaded)?;
        Ok(captured)
    }

    pub(super) fn launch(&self, stream: &CudaStream) -> Result<(), BackendError> {
        self.device.bind()?;
        stream.set_left(None);
        // SAFETY: both live, as do the buffers that the recorded operations use.
        check("cuGraphLaunch", unsafe { sys::cuGraphLaunch(self.executable, stream.raw()) })
    }
}

impl Drop for CapturedGraph {
    fn drop(&mut self) {
        if !self.executable.is_null() {
            // SAFETY: instantiated in `capture` and destroyed once; the driver lets launches end.
            self.device.release("cuGraphExecDestroy", || unsafe {
                sys::cuGraphExecDestroy(self.executable)
            });
        }
        if !self.graph.is_null() {
            // SAFETY: captured in `capture` and destroyed once.
            self.device.release("cuGraphDestroy", || unsafe { sys::cuGraphDestroy(self.graph) });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const CAPACITY: StepCapacity = StepCapacity {
        max_tokens: 2048,
        max_rows: 100,
        max_blocks: 5000,
        max_bias: 300,
        num_more_groups: 0,
        max_prefixes: 16,
    };

    fn decode(rows: usize) -> StepShape {
        StepShape {
            num_tokens: rows,
            num_rows: rows,
            num_blocks: rows * 3,
            num_sampled: rows,
            num_bias: 1,
            num_more_groups: 0,
            num_prefixes: 0,
            num_prefix_rows: 0,
        }
    }

    #[test]
    fn decode_steps_are_padded_to_buckets_within_capacity() {
        let rows = |n| padded_shape(decode(n), CAPACITY).map(|shape| shape.num_rows);
        assert_eq!(rows(0), None);
        for (n, padded) in [(1, 1), (3, 4), (5, 8), (31, 32), (64, 64), (65, 80), (97, 100)] {
            assert_eq!(rows(n), Some(padded), "{n} rows");
        }
        let shape = padded_shape(decode(3), CAPACITY).unwrap();
        assert_eq!((shape.num_tokens, shape.num_sampled), (4, 4));
        assert_eq!((shape.num_blocks, shape.num_bias), (5000, 300));
        assert_eq!(padded_shape(decode(101), CAPACITY), None);
    }

    #[test]
    fn steps_with_shared_prefixes_are_padded_to_all_there_may_be() {
        let shape = padded_shape(decode(3), CAPACITY).unwrap();
        assert_eq!((shape.num_prefixes, shape.num_prefix_rows), (0, 0));
        let sharing = StepShape { num_prefixes: 1, num_prefix_rows: 3, ..decode(3) };
        let shape = padded_shape(sharing, CAPACITY).unwrap();
        assert_eq!((shape.num_prefixes, shape.num_prefix_rows), (16, 100));
    }

    #[test]
    fn steps_with_a_prefill_are_not_padded() {
        let prefill = StepShape { num_tokens: 40, ..decode(3) };
        assert_eq!(padded_shape(prefill, CAPACITY), None);
        let unfinished = StepShape { num_sampled: 2, ..decode(3) };
        assert_eq!(padded_shape(unfinished, CAPACITY), None);
        let large = StepCapacity { max_rows: 1000, ..CAPACITY };
        assert!(padded_shape(decode(256), large).is_some());
        assert_eq!(padded_shape(decode(257), large), None);
    }
}

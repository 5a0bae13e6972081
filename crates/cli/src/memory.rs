//! Whose memory is what: planned once the weights are loaded, shown as a table.

use anyhow::{Result, ensure};
use inflight_backend::{Backend, BackendError, CudaBackend, Dtype, KvDtype, cuda::MemoryPlan};
use inflight_engine::EngineConfig;
use inflight_model::ModelConfig;

use crate::resolve::{OnGpu, bytes_per_block};
use crate::swap::give_host_memory;

/// Fewer tokens than these make long prompts slow, so a budget is not lowered further.
const LEAST_BUDGET: usize = 512;

/// How the device's memory is divided, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryTable {
    pub(crate) weights: usize,
    pub(crate) steps: usize,
    pub(crate) kv_cache: usize,
    pub(crate) free: usize,
    /// On the host.
    pub(crate) swap: usize,
}

/// What the engine will be, and what its memory is.
pub(crate) type Fitted = (EngineConfig, MemoryTable);

/// A CPU's memory; `matrix_bytes` are the weights'.
pub(crate) fn on_cpu(
    engine: EngineConfig,
    model: &ModelConfig,
    kv_dtype: KvDtype,
    (matrix_bytes, available): (usize, usize),
) -> Fitted {
    let steps = engine.working_bytes(model, Dtype::F32);
    let block = bytes_per_block(&engine, model, kv_dtype);
    let (kv_cache, swap) = (engine.num_blocks * block, engine.memory.num_swap_blocks * block);
    let taken = matrix_bytes.saturating_add(steps).saturating_add(kv_cache);
    let free = available.saturating_sub(taken);
    (engine, MemoryTable { weights: matrix_bytes, steps, kv_cache, free, swap })
}

/// A GPU's memory, whose weights are loaded.
pub(crate) fn on_gpu(
    backend: &CudaBackend,
    model: &ModelConfig,
    resolved: &OnGpu,
) -> Result<Fitted> {
    let plan = |working| backend.memory_plan(resolved.gpu_memory_utilization, working);
    fit(resolved, model, (backend.activation_dtype(), backend.kv_dtype()), plan)
}

/// Gives the KV cache what `plan` leaves, halving the token budget while that is too little.
fn fit(
    resolved: &OnGpu,
    model: &ModelConfig,
    (activations, kv_dtype): (Dtype, KvDtype),
    plan: impl Fn(usize) -> Result<MemoryPlan, BackendError>,
) -> Result<Fitted> {
    let mut engine = resolved.engine.clone();
    let block = bytes_per_block(&engine, model, kv_dtype);
    let wanted = engine.num_blocks;
    let enough = match resolved.is_kv_cache_fixed {
        true => wanted,
        false => wanted.min(engine.blocks_per_sequence(model)),
    };
    let planned = loop {
        let planned = plan(engine.working_bytes(model, activations));
        let room = planned.as_ref().map_or(0, |plan| plan.num_blocks(block));
        let lower = engine.max_num_batched_tokens / 2;
        let may_lower = !resolved.is_budget_fixed && lower >= LEAST_BUDGET.max(engine.max_num_seqs);
        if room >= enough || !may_lower {
            break planned?;
        }
        engine.max_num_batched_tokens = lower;
    };
    let (room, gib) = (planned.num_blocks(block), f64::from(1 << 30));
    let (asked, left) = (wanted as f64 * block as f64 / gib, planned.kv_cache as f64 / gib);
    ensure!(
        room >= wanted || !resolved.is_kv_cache_fixed,
        "the KV cache asked for takes {asked:.2} GiB, but weights and steps leave {left:.2} GiB of \
         --gpu-memory-utilization {}",
        resolved.gpu_memory_utilization
    );
    ensure!(room > 0, "weights and steps leave no GPU memory for the KV cache");
    engine.num_blocks = wanted.min(room);
    let kv_cache = engine.num_blocks * block;
    give_host_memory(&mut engine, model, resolved.host_bytes, block);
    let swap = engine.memory.num_swap_blocks * block;
    let MemoryPlan { total, weights, working: steps, .. } = planned;
    let free = total.saturating_sub(weights + steps + kv_cache);
    Ok((engine, MemoryTable { weights, steps, kv_cache, free, swap }))
}

#[cfg(test)]
mod tests {
    use clap::Parser;
    use inflight_bench::BuiltInConfig;

    use super::*;
    use crate::args::{Cli, Command};
    use crate::resolve::{Workload, resolve_gpu_use, resolve_on_gpu};

    const GIB: usize = 1 << 30;

    /// `fit` for Llama 3.1 8B on a GPU of `total` GiB of which weights take 15.
    fn fitted(flags: &str, total: usize) -> Result<Fitted> {
        let arguments = ["inflight", "serve"].into_iter().chain(flags.split_whitespace());
        let Command::Serve(args) = Cli::try_parse_from(arguments)?.command else {
            panic!("another command")
        };
        let model = BuiltInConfig::Llama31B8.dummy(0)?.config;
        let resolved = resolve_on_gpu(&args.engine, Workload::serving(8, true), &model)?;
        let kv_dtype = resolve_gpu_use(&args.engine).numerics.kv_dtype;
        let memory = ((total - 15) * GIB, total * GIB);
        fit(&resolved, &model, (Dtype::BF16, kv_dtype), |working| {
            MemoryPlan::new(memory, resolved.gpu_memory_utilization, working)
        })
    }

    #[test]
    fn the_kv_cache_gets_what_is_left() {
        let (engine, memory) = fitted("", 140).unwrap();
        assert_eq!((engine.max_num_seqs, engine.max_num_batched_tokens), (256, 8192));
        assert_eq!(memory.weights, 15 * GIB);
        // 16 tokens take 2 MiB.
        assert_eq!(memory.kv_cache, engine.num_blocks * (2 << 20));
        let used = memory.weights + memory.steps + memory.kv_cache;
        assert_eq!(used + memory.free, 140 * GIB);
        assert!(used <= 126 * GIB && used > 126 * GIB - (4 << 20), "90 %, to a block");
    }

    #[test]
    fn numbers_of_eight_bits_hold_nearly_twice_as_much() {
        let tokens = |flags: &str| {
            let engine = fitted(flags, 140).unwrap().0;
            (engine.num_blocks * engine.block_size) as f64
        };
        let expected = 256.0 / (128.0 + 4.0);
        for flags in ["--kv-cache-dtype fp8", "--kv-cache-dtype int8"] {
            let ratio = tokens(flags) / tokens("");
            assert!((ratio / expected - 1.0).abs() < 1e-3, "{flags}: {ratio}");
        }
    }

    #[test]
    fn no_more_than_is_of_use() {
        let (engine, memory) = fitted("--max-num-seqs 8 --max-model-len 1024", 140).unwrap();
        assert_eq!(engine.num_blocks, 8 * 64);
        assert_eq!(memory.kv_cache, GIB);
    }

    #[test]
    fn where_memory_is_short_batches_are_smaller() {
        let (engine, _) = fitted("--max-num-seqs 16 --max-model-len 12288", 20).unwrap();
        let budget = engine.max_num_batched_tokens;
        assert!((LEAST_BUDGET..8192).contains(&budget), "{budget}");
        // What a user chose stays, or is refused.
        assert!(fitted("--max-num-batched-tokens 65536 --max-num-seqs 16", 20).is_err());
    }

    #[test]
    fn what_does_not_fit_is_refused() {
        let error = fitted("--kv-cache-memory 120", 140).unwrap_err().to_string();
        assert!(error.contains("120.00 GiB") && error.contains("0.9"), "{error}");
        assert!(fitted("--kv-cache-memory 10", 140).unwrap().1.kv_cache == 10 * GIB);
        let error = fitted("", 16).unwrap_err().to_string();
        assert!(error.contains("KV cache"), "{error}");
    }
}

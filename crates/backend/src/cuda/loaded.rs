//! Kernels on the device, ready to be launched.

use std::{
    ffi::{CString, c_void},
    panic,
    path::Path,
    sync::Arc,
    thread::{Scope, ScopedJoinHandle},
};

use cudarc::driver::sys;
use inflight_kernels::{Arch, Compiler, CompilerConfig, Gpu, Kernel, KernelError};

use super::{check::check, device::Device, rehearsal, stream::CudaStream};
use crate::BackendError;

/// Compiles kernels for one GPU and loads them.
pub(super) struct KernelLoader {
    pub(super) device: Arc<Device>,
    pub(super) gpu: Gpu,
    compiler: Compiler,
}

/// One specialisation of a kernel, loaded.
pub(super) struct Loaded<K> {
    kernel: K,
    module: Module,
    function: sys::CUfunction,
    dynamic_smem: u32,
    /// Whether it may begin before the kernel in front of it has ended.
    overlaps: bool,
}

/// A kernel that a thread compiles and loads.
pub(super) struct Loading<'scope, K>(ScopedJoinHandle<'scope, Result<Loaded<K>, BackendError>>);

/// Machine code on the device, unloaded when dropped.
struct Module {
    device: Arc<Device>,
    raw: sys::CUmodule,
}

// SAFETY: the driver locks modules itself, and functions are only read.
unsafe impl<K: Send> Send for Loaded<K> {}
// SAFETY: as above.
unsafe impl<K: Sync> Sync for Loaded<K> {}

impl KernelLoader {
    /// `cache` holds what was compiled before.
    pub(super) fn new(device: &Arc<Device>, cache: Option<&Path>) -> Result<Self, BackendError> {
        let cache_folder = cache.map(|folder| folder.join("kernels"));
        let config = CompilerConfig { nvrtc_folder: None, cache_folder };
        let compiler = Compiler::new(config).map_err(unsupported)?;
        let info = &device.info;
        let (major, minor) = info.compute_capability;
        let word = |value: usize| u32::try_from(value).unwrap_or(u32::MAX);
        let gpu = Gpu {
            arch: Arch::from_capability(major, minor).map_err(unsupported)?,
            num_sms: word(info.num_sms),
            smem_per_block: word(info.max_shared_bytes),
            smem_per_sm: word(info.shared_bytes_per_sm),
        };
        Ok(Self { device: Arc::clone(device), gpu, compiler })
    }

    /// Compiles `kernel`, or takes it from the cache on disk, and loads it. Not while a graph is
    /// being captured.
    pub(super) fn load<K: Kernel>(&self, kernel: K) -> Result<Loaded<K>, BackendError> {
        let spec = kernel.spec();
        assert_eq!(spec.params_bytes, size_of::<K::Params>(), "{spec}: parameters");
        let cubin = self.compiler.compile(&spec, self.gpu.arch).map_err(unsupported)?;
        let module = Module::load(&self.device, cubin.bytes(), spec.entry)?;
        let function = module.function(spec.entry)?;
        let dynamic_smem = spec.dynamic_smem;
        if dynamic_smem > 0 {
            use sys::CUfunction_attribute_enum as Attribute;
            let attribute = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            let bytes = i32::try_from(dynamic_smem).unwrap_or(i32::MAX);
            // SAFETY: the function is of a module that lives.
            let set = unsafe { sys::cuFuncSetAttribute(function, attribute, bytes) };
            check(&format!("cuFuncSetAttribute ({spec})"), set)?;
        }
        let overlaps = self.gpu.arch.is_hopper_or_later();
        Ok(Loaded { kernel, module, function, dynamic_smem, overlaps })
    }

    /// Begins to [`load`](Self::load) `kernel` beside others: compiling takes a core's time only.
    pub(super) fn begin<'scope, K: Kernel + Send + 'scope>(
        &'scope self,
        scope: &'scope Scope<'scope, '_>,
        kernel: K,
    ) -> Loading<'scope, K> {
        Loading(scope.spawn(move || self.load(kernel)))
    }
}

impl<K> Loading<'_, K> {
    /// The kernel, once it is there.
    pub(super) fn end(self) -> Result<Loaded<K>, BackendError> {
        self.0.join().unwrap_or_else(|panicked| panic::resume_unwind(panicked))
    }
}

impl<K: Kernel> Loaded<K> {
    pub(super) fn kernel(&self) -> &K {
        &self.kernel
    }

    /// Enqueues the kernel; in a rehearsal, nothing.
    pub(super) fn launch(
        &self,
        params: &K::Params,
        stream: &CudaStream,
    ) -> Result<(), BackendError> {
        stream.set_left(None);
        let launch = self.kernel.launch(params);
        if launch.is_empty() || rehearsal::is_on() {
            return Ok(());
        }
        self.module.device.bind()?;
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        // It may begin while the kernel in front of it ends: all of ours wait by themselves.
        let mut overlap = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: gx,
            gridDimY: gy,
            gridDimZ: gz,
            blockDimX: bx,
            blockDimY: by,
            blockDimZ: bz,
            sharedMemBytes: self.dynamic_smem,
            hStream: stream.raw(),
            attrs: &raw mut overlap,
            numAttrs: u32::from(self.overlaps),
        };
        let params: *const K::Params = params;
        let mut arguments = [params.cast_mut().cast::<c_void>()];
        // SAFETY: the kernel takes one argument, of `params_bytes` bytes, which the driver copies
        // before it returns, as it does `config`. What the parameters point to outlives the launch:
        // see `Backend`.
        let launched = unsafe {
            sys::cuLaunchKernelEx(
                &raw const config,
                self.function,
                arguments.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        match launched {
            sys::CUresult::CUDA_SUCCESS => Ok(()),
            failed => check(&format!("launch of {}", self.kernel.spec()), failed),
        }
    }
}

impl Module {
    fn load(device: &Arc<Device>, cubin: &[u8], entry: &str) -> Result<Self, BackendError> {
        device.bind()?;
        let mut raw = std::ptr::null_mut();
        // SAFETY: `cubin` is a whole ELF file, which says its own length; `raw` is a valid place.
        let loaded = unsafe { sys::cuModuleLoadData(&raw mut raw, cubin.as_ptr().cast()) };
        check(&format!("cuModuleLoadData ({entry})"), loaded)?;
        Ok(Self { device: Arc::clone(device), raw })
    }

    fn function(&self, entry: &str) -> Result<sys::CUfunction, BackendError> {
        let name = CString::new(entry).expect("names of kernels have no zero byte");
        let mut function = std::ptr::null_mut();
        // SAFETY: the module lives, `name` ends with a zero byte, `function` is a valid place.
        let found = unsafe { sys::cuModuleGetFunction(&raw mut function, self.raw, name.as_ptr()) };
        check(&format!("cuModuleGetFunction ({entry})"), found)?;
        Ok(function)
    }
}

impl Drop for Module {
    fn drop(&mut self) {
        // SAFETY: loaded in `load` and unloaded once.
        self.device.release("cuModuleUnload", || unsafe { sys::cuModuleUnload(self.raw) });
    }
}

/// A kernel that cannot be had on this machine.
pub(super) fn unsupported(error: KernelError) -> BackendError {
    BackendError::Unsupported(error.to_string())
}

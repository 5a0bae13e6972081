//! From a kernel's specification to its machine code.

use std::{
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use crate::{
    Arch, Cubin, KernelError, KernelSpec,
    cache::Cache,
    hash::Hash,
    nvrtc::{CompileError, Nvrtc, Unit},
    spec::HEADERS,
};

/// Where a [`Compiler`] finds and keeps things.
#[derive(Clone, Debug, Default)]
pub struct CompilerConfig {
    /// Folder of libnvrtc; `None`: looked for in the usual places.
    pub nvrtc_folder: Option<PathBuf>,
    /// Folder of compiled kernels; `None`: `${XDG_CACHE_HOME:-~/.cache}/inflight/kernels`.
    pub cache_folder: Option<PathBuf>,
}

/// Turns at kernels of this process, by their keys: of threads that want the same one, the first
/// compiles it and the others find it on disk. That two keys share a turn costs little.
static TURNS: [Mutex<()>; 1024] = [const { Mutex::new(()) }; 1024];

/// Compiles kernels with NVRTC and keeps the results on disk. Several threads may compile at once.
#[derive(Debug)]
pub struct Compiler {
    nvrtc: Nvrtc,
    cache: Cache,
}

impl Compiler {
    /// Finds NVRTC. Never panics: a machine without it gives an error.
    ///
    /// # Errors
    /// [`KernelError::NoNvrtc`], [`KernelError::Nvrtc`].
    pub fn new(config: CompilerConfig) -> Result<Self, KernelError> {
        let nvrtc = Nvrtc::load(config.nvrtc_folder.as_deref())?;
        let folder = config.cache_folder.or_else(Cache::default_folder);
        Ok(Self { nvrtc, cache: Cache::new(folder) })
    }

    /// Major and minor number of NVRTC.
    pub fn version(&self) -> (i32, i32) {
        self.nvrtc.version
    }

    /// The machine code, from the cache or compiled now (about 0.1 to 1 s).
    ///
    /// # Errors
    /// [`KernelError::Compilation`] with the compiler's log, [`KernelError::Nvrtc`].
    pub fn compile(&self, spec: &KernelSpec, arch: Arch) -> Result<Cubin, KernelError> {
        let options = options(spec, arch);
        let key = self.key(spec, &options);
        let turn = &TURNS[(key.value() % TURNS.len() as u128) as usize];
        let _turn = turn.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(cubin) = self.cache.read(key).and_then(|bytes| Cubin::new(bytes).ok()) {
            return Ok(cubin);
        }
        let cubin = self.compile_now(spec, arch, &options)?;
        self.cache.write(key, cubin.bytes());
        Ok(cubin)
    }

    /// Compiles whatever the cache holds, and leaves it alone.
    ///
    /// # Errors
    /// As [`Compiler::compile`].
    pub fn compile_afresh(&self, spec: &KernelSpec, arch: Arch) -> Result<Cubin, KernelError> {
        self.compile_now(spec, arch, &options(spec, arch))
    }

    fn compile_now(
        &self,
        spec: &KernelSpec,
        arch: Arch,
        options: &[String],
    ) -> Result<Cubin, KernelError> {
        let unit = Unit { source: spec.source, headers: &HEADERS, options };
        match self.nvrtc.compile(&unit) {
            Ok(compiled) => Cubin::with_log(compiled.cubin, compiled.log),
            Err(CompileError::Library(error)) => Err(error),
            Err(CompileError::Source(log)) => {
                let kernel = format!("{} ({spec})", spec.source.file);
                Err(KernelError::Compilation { kernel, arch: arch.name(), log })
            }
        }
    }

    /// All that decides the machine code.
    fn key(&self, spec: &KernelSpec, options: &[String]) -> Hash {
        let (major, minor) = self.nvrtc.version;
        let key = Hash::new().text(spec.source.file).text(spec.source.text);
        let key = HEADERS.iter().fold(key, |key, header| key.text(header.text));
        let key = key.text(&format!("{major}.{minor}"));
        options.iter().fold(key, |key, option| key.text(option))
    }
}

/// The compiler's command line.
fn options(spec: &KernelSpec, arch: Arch) -> Vec<String> {
    let mut options = vec![
        format!("--gpu-architecture={}", arch.name()),
        "--std=c++17".into(),
        "--device-as-default-execution-space".into(),
        // Registers and spills, for the log.
        "--ptxas-options=-v".into(),
    ];
    options
        .extend(spec.defines.iter().map(|(name, value)| format!("--define-macro={name}={value}")));
    options
}

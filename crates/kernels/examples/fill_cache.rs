//! Compiles kernels for an H200 into a cache, without a GPU, so that none is compiled there:
//! `fill_cache NVRTC_FOLDER CACHE_FOLDER [ENTRY..]`.

use std::{error::Error, path::PathBuf};

use inflight_kernels::{Compiler, CompilerConfig, Gpu, ops::all};

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let mut folder = || arguments.next().map(PathBuf::from).ok_or("a folder is missing");
    let config = CompilerConfig { nvrtc_folder: Some(folder()?), cache_folder: Some(folder()?) };
    let compiler = Compiler::new(config)?;
    let wanted: Vec<String> = arguments.collect();
    for spec in all::specs(&Gpu::H200)? {
        if wanted.is_empty() || wanted.iter().any(|entry| entry == spec.entry) {
            compiler.compile(&spec, Gpu::H200.arch)?;
        }
    }
    Ok(())
}

//! Finds the GPU and checks every operator on it against the CPU: `cuda_check [CACHE_FOLDER]`.

use std::{path::PathBuf, process::ExitCode, time::Instant};

use inflight_backend::{
    Backend, BackendError, CudaBackend, CudaConfig, cuda,
    self_check::{OperatorCheck, check_operators},
};

fn main() -> ExitCode {
    match run() {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("{error}");
            ExitCode::from(2)
        }
    }
}

/// Whether every operator passed.
fn run() -> Result<bool, BackendError> {
    let folders = cuda::usual_library_folders(|name| std::env::var_os(name));
    let found = cuda::probe(&folders)?;
    println!("found: {found:?}");
    let started = Instant::now();
    let backend = CudaBackend::new(CudaConfig {
        ordinal: 0,
        library_folders: folders,
        cache: std::env::args_os().nth(1).map(PathBuf::from),
        keeps_fastest: true,
        graphs: true,
        blocking_waits: true,
        numerics: cuda::Numerics::default(),
    })?;
    println!("{} (open in {:.2?})", backend.description(), started.elapsed());
    println!("{:?}", backend.info());
    let (free, total) = backend.memory()?;
    println!("memory: {:.1} of {:.1} GiB free", gib(free), gib(total));
    let started = Instant::now();
    let checks = check_operators(&backend)?;
    let failed = checks.iter().filter(|check| !check.passed()).count();
    checks.iter().for_each(print);
    println!("{} checks, {failed} failed, {:.2?}", checks.len(), started.elapsed());
    Ok(failed == 0)
}

fn print(check: &OperatorCheck) {
    let OperatorCheck { name, error, tolerance } = check;
    let verdict = if check.passed() { "ok" } else { "FAILED" };
    println!("{verdict:6} {error:9.2e} of {tolerance:7.0e}  {name}");
}

fn gib(bytes: usize) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

//! Every kernel in every specialisation, compiled without a GPU: no spills, nothing over budget.

use std::{
    collections::HashSet,
    path::PathBuf,
    sync::atomic::{AtomicUsize, Ordering},
    thread,
};

use inflight_kernels::{Compiler, CompilerConfig, Cubin, Gpu, KernelError, KernelSpec, ops::all};

fn compiler(cache: &str) -> Compiler {
    let folder = std::env::var_os("INFLIGHT_TEST_NVRTC").expect(
        "INFLIGHT_TEST_NVRTC names the folder of libnvrtc: scripts/fetch_nvrtc.py prints it",
    );
    let config =
        CompilerConfig { nvrtc_folder: Some(folder.into()), cache_folder: Some(temporary(cache)) };
    Compiler::new(config).expect("NVRTC loads")
}

fn temporary(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("inflight-kernels-{name}-{}", std::process::id()))
}

/// All specialisations for a GPU.
fn specs(gpu: &Gpu) -> Vec<KernelSpec> {
    // While working on one kernel, the others need not be waited for.
    let wanted = std::env::var("INFLIGHT_TEST_KERNEL").unwrap_or_default();
    let mut specs = all::specs(gpu).expect("every specialisation fits the GPU");
    specs.retain(|spec| spec.entry.contains(&wanted));
    specs
}

/// What `work` makes of each of `specs`, in their order, on all cores.
fn on_all_cores<T: Send>(specs: &[KernelSpec], work: impl Fn(&KernelSpec) -> T + Sync) -> Vec<T> {
    let num_threads = thread::available_parallelism().map_or(1, |num| num.get());
    let next = AtomicUsize::new(0);
    let take = || {
        let i = next.fetch_add(1, Ordering::Relaxed);
        specs.get(i).map(|spec| (i, work(spec)))
    };
    let mut made: Vec<(usize, T)> = thread::scope(|scope| {
        let spawn = |_| scope.spawn(|| std::iter::from_fn(take).collect::<Vec<_>>());
        let threads: Vec<_> = (0..num_threads).map(spawn).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    });
    made.sort_by_key(|(i, _)| *i);
    made.into_iter().map(|(_, made)| made).collect()
}

/// Whether a specialisation needs more shared memory than a GPU has.
fn is_too_large(gpu: &Gpu, spec: &KernelSpec) -> bool {
    spec.dynamic_smem + spec.budget.static_smem > gpu.smem_per_block
}

/// What is wrong with what a specialisation is compiled to.
fn complaints(compiler: &Compiler, gpu: &Gpu, spec: &KernelSpec) -> Vec<String> {
    let mut complaints = Vec::new();
    match compiler.compile_afresh(spec, gpu.arch) {
        Ok(cubin) => complain(&cubin, gpu, spec, &mut complaints),
        Err(error) => complaints.push(error.to_string()),
    }
    complaints
}

fn complain(cubin: &Cubin, gpu: &Gpu, spec: &KernelSpec, complaints: &mut Vec<String>) {
    let arch = gpu.arch.name();
    let found = cubin.resources(spec.entry).expect("a cubin of our own compiler");
    println!("{arch:7} {spec}: {found:?}");
    let mut complain = |what: &str, found: u32, most: u32| {
        if found > most {
            complaints.push(format!("{spec} for {arch}: {found} {what}, at most {most}"));
        }
    };
    complain("registers", found.registers, spec.budget.registers);
    complain("bytes of static shared memory", found.static_smem, spec.budget.static_smem);
    complain("bytes of local memory", found.frame, 0);
    if found.params as usize != spec.params_bytes {
        let (theirs, ours) = (found.params, spec.params_bytes);
        complaints.push(format!("{spec}: parameters of {theirs} bytes there, {ours} here"));
    }
    // The log says more than the file: registers spilled although no array is on the stack.
    for line in cubin.log().lines().filter(|line| line.contains("spill stores")) {
        if !line.contains(" 0 bytes spill stores, 0 bytes spill loads") {
            complaints.push(format!("{spec} for {arch}: {line}"));
        }
    }
    let warns = |line: &&str| line.contains("warning") || line.contains("Performance Loss");
    complaints
        .extend(cubin.log().lines().filter(warns).map(|line| format!("{spec} for {arch}: {line}")));
}

#[test]
#[ignore = "needs NVRTC: make test"]
fn every_specialisation_compiles_within_its_budget() {
    let compiler = compiler("unused");
    let mut done = HashSet::new();
    let mut found = Vec::new();
    for gpu in [Gpu::H200, Gpu::A100, Gpu::RTX_3090] {
        let mut specs = specs(&gpu);
        let too_large = specs.iter().filter(|spec| is_too_large(&gpu, spec));
        let bytes_of =
            |spec: &KernelSpec| format!("{spec}: {} bytes of shared memory", spec.dynamic_smem);
        found.extend(too_large.map(bytes_of));
        // Two GPUs may have the same code, but not the same room for it.
        specs.retain(|spec| done.insert((spec.clone(), gpu.arch.name())));
        found.extend(on_all_cores(&specs, |spec| complaints(&compiler, &gpu, spec)).concat());
    }
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

#[test]
#[ignore = "needs NVRTC: make test"]
fn the_second_time_the_cache_answers() {
    let folder = temporary("cache");
    let compiler = compiler("cache");
    let spec = &all::specs(&Gpu::H200).unwrap()[0];
    let first = compiler.compile(spec, Gpu::H200.arch).unwrap();
    assert!(first.log().contains("registers"), "{}", first.log());
    let second = compiler.compile(spec, Gpu::H200.arch).unwrap();
    assert_eq!(second.bytes(), first.bytes());
    assert_eq!(second.log(), "", "was compiled again");

    // For another GPU it is another file; a damaged file is compiled again.
    compiler.compile(spec, Gpu::A100.arch).unwrap();
    let files: Vec<PathBuf> =
        std::fs::read_dir(&folder).unwrap().map(|entry| entry.unwrap().path()).collect();
    assert_eq!(files.len(), 2);
    for file in files {
        std::fs::write(file, b"damaged").unwrap();
    }
    let third = compiler.compile(spec, Gpu::H200.arch).unwrap();
    assert_eq!(third.bytes(), first.bytes());
    std::fs::remove_dir_all(folder).unwrap();
}

/// Side by side, sources that are wrong among them, kernels become what they become one by one.
#[test]
#[ignore = "needs NVRTC: make test"]
fn kernels_compile_side_by_side() {
    let compiler = compiler("unused");
    let mut specs: Vec<KernelSpec> =
        all::specs(&Gpu::H200).unwrap().into_iter().step_by(90).collect();
    let mut wrong = specs[0].clone();
    wrong.source.text = "KERNEL void missing() {";
    specs.insert(1, wrong);
    let compile = |spec: &KernelSpec| {
        let cubin = compiler.compile_afresh(spec, Gpu::H200.arch);
        cubin.map(|cubin| cubin.bytes().to_vec()).map_err(|error| error.to_string())
    };
    let one_by_one: Vec<_> = specs.iter().map(compile).collect();
    assert!(one_by_one.iter().filter(|made| made.is_err()).count() == 1);
    // Two threads at least, however few cores.
    let all = thread::scope(|scope| {
        let threads = [0; 2].map(|_| scope.spawn(|| on_all_cores(&specs, compile)));
        threads.map(|thread| thread.join().unwrap())
    });
    for side_by_side in all {
        assert!(side_by_side == one_by_one, "other machine code or errors");
    }
}

#[test]
#[ignore = "needs NVRTC: make test"]
fn of_threads_that_want_the_same_kernel_one_compiles_it() {
    let compiler = compiler("same");
    let specs = all::specs(&Gpu::H200).unwrap();
    let compile = || compiler.compile(&specs[0], Gpu::H200.arch).unwrap();
    let cubins = thread::scope(|scope| {
        let threads = [0; 4].map(|_| scope.spawn(compile));
        threads.map(|thread| thread.join().unwrap())
    });
    assert!(cubins.iter().all(|cubin| cubin.bytes() == cubins[0].bytes()));
    // Only a compilation has a log.
    assert_eq!(cubins.iter().filter(|cubin| !cubin.log().is_empty()).count(), 1);
    std::fs::remove_dir_all(temporary("same")).unwrap();
}

#[test]
#[ignore = "needs NVRTC: make test"]
fn a_wrong_source_gives_the_compilers_words() {
    let mut spec = all::specs(&Gpu::H200).unwrap()[0].clone();
    spec.source.text = "#include \"common.cuh\"\nKERNEL void unpack() { missing(); }";
    let error = compiler("unused").compile_afresh(&spec, Gpu::H200.arch).unwrap_err();
    let KernelError::Compilation { kernel, arch, log } = &error else { panic!("{error}") };
    assert!(kernel.starts_with("unpack.cu") && *arch == "sm_90a");
    assert!(log.contains("unpack.cu(2)") && log.contains("missing"), "{log}");
}

#[test]
fn a_folder_without_nvrtc_is_an_error_that_names_it() {
    let config = CompilerConfig { nvrtc_folder: Some("/nowhere".into()), cache_folder: None };
    let error = Compiler::new(config).unwrap_err().to_string();
    assert!(error.contains("/nowhere") && error.contains("pip install"), "{error}");
}

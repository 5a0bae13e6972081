//! Every kernel in every specialisation, compiled without a GPU: no spills, nothing over budget.

use std::{collections::HashSet, path::PathBuf};

use inflight_kernels::{Compiler, CompilerConfig, Gpu, KernelError, KernelSpec, ops::all};

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

/// Compiles all specialisations for a GPU; complaints about what is wrong with them.
fn complaints(
    compiler: &Compiler,
    gpu: &Gpu,
    done: &mut HashSet<(KernelSpec, &str)>,
) -> Vec<String> {
    let mut complaints = Vec::new();
    // While working on one kernel, the others need not be waited for.
    let wanted = std::env::var("INFLIGHT_TEST_KERNEL").unwrap_or_default();
    for spec in all::specs(gpu).expect("every specialisation fits the GPU") {
        if !spec.entry.contains(&wanted) {
            continue;
        }
        if spec.dynamic_smem + spec.budget.static_smem > gpu.smem_per_block {
            complaints.push(format!("{spec}: {} bytes of shared memory", spec.dynamic_smem));
        }
        if !done.insert((spec.clone(), gpu.arch.name())) {
            continue;
        }
        let cubin = match compiler.compile_afresh(&spec, gpu.arch) {
            Ok(cubin) => cubin,
            Err(error) => {
                complaints.push(error.to_string());
                continue;
            }
        };
        let found = cubin.resources(spec.entry).expect("a cubin of our own compiler");
        println!("{:7} {spec}: {found:?}", gpu.arch.name());
        let mut complain = |what: &str, found: u32, most: u32| {
            if found > most {
                let arch = gpu.arch.name();
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
                complaints.push(format!("{spec} for {}: {line}", gpu.arch.name()));
            }
        }
        for line in cubin
            .log()
            .lines()
            .filter(|line| line.contains("warning") || line.contains("Performance Loss"))
        {
            complaints.push(format!("{spec} for {}: {line}", gpu.arch.name()));
        }
    }
    complaints
}

#[test]
#[ignore = "needs NVRTC: make test"]
fn every_specialisation_compiles_within_its_budget() {
    let compiler = compiler("unused");
    let mut done = HashSet::new();
    let mut found = Vec::new();
    for gpu in [Gpu::H200, Gpu::A100, Gpu::RTX_3090] {
        found.extend(complaints(&compiler, &gpu, &mut done));
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

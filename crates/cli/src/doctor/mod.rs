//! `inflight doctor`: what was found, and whether it computes what it should.
//!
//! [`groups`]: the checks of operators, which several threads make at once, since most of their
//! time goes to compiling kernels. Their lines come in order all the same. What an error stopped
//! beside others is checked once more alone, as an engine computes.

mod groups;

use std::collections::BTreeSet;
use std::fs;
use std::num::NonZeroUsize;
use std::time::Instant;

use anyhow::{Error, Result, ensure};
use inflight_backend::{Backend, CpuBackend, CpuConfig, CudaBackend, SimdLevel};
use inflight_bench::{check_loop, measure_bandwidths};

use self::groups::{Findings, Group, Outcome, cpu_groups, gpu_groups, invariance};
use crate::args::DoctorArgs;
use crate::device::{Chosen, GpuUse, choose};
use crate::resolve::Machine;
use crate::side_by_side::side_by_side;

/// Libraries that a GPU needs, as their files' names begin.
const GPU_LIBRARIES: [&str; 3] = ["libcuda.so", "libnvrtc.so", "libcublasLt.so"];

/// Checks so far.
#[derive(Debug, Default)]
struct Tally {
    num_passed: usize,
    num_failed: usize,
}

pub(crate) fn doctor(args: &DoctorArgs) -> Result<()> {
    let started = Instant::now();
    let num_threads = args.threads.map_or(Machine::detect().num_cores, NonZeroUsize::get);
    // Its kernels are compiled once, before all groups want them.
    let device = choose(args.device, GpuUse::default())?;
    let mut tally = Tally::default();
    describe_cpu();
    match &device {
        Chosen::Cuda(backend) => {
            describe_gpu(backend)?;
            tally.note_groups(&gpu_groups(args.device), num_threads, Group::run);
            if let Err(error) = finish_device(&mut tally, backend) {
                tally.note_unchecked("the rest", &error);
            }
        }
        Chosen::Cpu { no_gpu } => {
            row("gpu", no_gpu.as_deref().unwrap_or("not looked for (see --device)"));
            tally.note_groups(&cpu_groups(), num_threads, Group::run);
            let backend = CpuBackend::new(CpuConfig::detect())?;
            finish_device(&mut tally, &backend)?;
            tally.note(&invariance(&backend)?);
        }
    }
    let Tally { num_passed, num_failed } = tally;
    println!();
    ensure!(num_failed == 0, "{num_failed} of {} checks failed", num_passed + num_failed);
    println!("all {num_passed} checks passed in {:.1} s", started.elapsed().as_secs_f64());
    Ok(())
}

impl Tally {
    /// Counts a check and prints it.
    fn note(&mut self, outcome: &Outcome) {
        let Outcome { passed, name, measured } = outcome;
        let verdict = if *passed { "ok" } else { "FAILED" };
        *(if *passed { &mut self.num_passed } else { &mut self.num_failed }) += 1;
        println!("  {verdict:6}  {measured:22}  {name}");
    }

    /// Makes the checks of all groups by `run`, those again alone that an error stopped.
    fn note_groups(
        &mut self,
        groups: &[Group],
        num_threads: usize,
        run: impl Fn(&Group) -> Findings + Sync,
    ) {
        let (mut last, mut stopped) = ("", Vec::new());
        let make = |group: &Group| Ok(run(group));
        side_by_side(groups, num_threads, make, |group, found| {
            if group.heading != last {
                last = group.heading;
                heading(last);
            }
            let found = found.unwrap_or_else(panicked);
            match &found.stopped_by {
                Some(error) if num_threads > 1 => {
                    println!("  {:6}  {:22}  {}: {error:#}", "again", "alone, below", group.name());
                    // Those that passed will again; what is wrong stays so.
                    let wrong = found.outcomes.iter().filter(|check| !check.passed);
                    wrong.for_each(|check| self.note(check));
                    stopped.push(group.clone());
                }
                _ => self.note_group(&group.name(), found),
            }
        });
        if !stopped.is_empty() {
            heading("Alone, what an error stopped beside others");
        }
        side_by_side(&stopped, 1, make, |group, found| {
            self.note_group(&group.name(), found.unwrap_or_else(panicked));
        });
    }

    /// A group's checks, why there are no more if so, and its seconds.
    fn note_group(&mut self, name: &str, found: Findings) {
        let Findings { outcomes, elapsed, stopped_by } = found;
        outcomes.iter().for_each(|outcome| self.note(outcome));
        if let Some(error) = stopped_by {
            self.note_unchecked(name, &error);
        }
        println!("  {:6}  {:20.1} s  {name}", "", elapsed.as_secs_f64());
    }

    /// Counts what could not be checked as one that failed.
    fn note_unchecked(&mut self, what: &str, error: &Error) {
        let (name, measured) = (format!("{what}: {error:#}"), "not checked".into());
        self.note(&Outcome { passed: false, name, measured });
    }
}

/// A group that found no more than this.
fn panicked(error: Error) -> Findings {
    Findings { stopped_by: Some(error), ..Findings::default() }
}

fn heading(text: &str) {
    println!("\n{text}");
}

fn row(label: &str, text: &str) {
    println!("  {label:14}  {text}");
}

fn describe_cpu() {
    println!("Found");
    let machine = Machine::detect();
    let cpu_info = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    row("inflight", env!("CARGO_PKG_VERSION"));
    row("cpu", cpu_name(&cpu_info).unwrap_or("of unknown name"));
    let levels: Vec<_> = SimdLevel::available().map(|level| format!("{level:?}")).collect();
    row("instructions", &levels.join(", "));
    let gib = machine.memory_bytes as f64 / f64::from(1 << 30);
    row("cores", &machine.num_cores.to_string());
    row("memory", &format!("{gib:.1} GiB available"));
}

fn describe_gpu(backend: &CudaBackend) -> Result<()> {
    let (info, found) = (backend.info(), backend.found());
    let gib = |bytes: usize| bytes as f64 / f64::from(1 << 30);
    let (free, total) = backend.memory()?;
    let (major, minor) = info.compute_capability;
    row("gpu", &format!("{}, one of {}", info.name, found.num_devices));
    row("capability", &format!("{major}.{minor}, {} multiprocessors", info.num_sms));
    row("gpu memory", &format!("{:.1} of {:.1} GiB free", gib(free), gib(total)));
    row("driver", &format!("of CUDA {}", cuda_version(found.driver_version)));
    row("NVRTC", &cuda_version(found.nvrtc_version));
    row("cuBLASLt", &cublas_version(found.cublaslt_version));
    let maps = fs::read_to_string("/proc/self/maps").unwrap_or_default();
    for path in loaded_libraries(&maps) {
        row("", path);
    }
    Ok(())
}

/// The engine's loop and the memory, on the device that serves.
fn finish_device<B: Backend>(tally: &mut Tally, backend: &B) -> Result<()> {
    heading("The engine's loop, overlap on against off");
    let check = check_loop(backend)?;
    tally.note(&Outcome {
        passed: check.num_different == 0,
        name: "tokens: greedy, sampled, penalised, logprobs".into(),
        measured: format!("{} of {} differ", check.num_different, check.num_tokens),
    });
    tally.note(&Outcome {
        passed: check.num_waits == 0,
        name: "the host launches before it waits".into(),
        measured: format!("{} waits", check.num_waits),
    });
    heading("Bandwidth");
    for bandwidth in measure_bandwidths(backend)? {
        println!("  {:8.1} GB/s  {}", bandwidth.gb_per_s, bandwidth.what);
    }
    Ok(())
}

fn cpu_name(cpu_info: &str) -> Option<&str> {
    let line = cpu_info.lines().find_map(|line| line.strip_prefix("model name"))?;
    Some(line.trim_start_matches([' ', '\t', ':']))
}

/// Files of GPU libraries among what the process has mapped.
fn loaded_libraries(maps: &str) -> BTreeSet<&str> {
    let paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
    let is_wanted = |path: &&str| {
        let name = path.rsplit('/').next().unwrap_or_default();
        GPU_LIBRARIES.iter().any(|library| name.starts_with(library))
    };
    paths.filter(is_wanted).collect()
}

/// `13000` is 13.0.
fn cuda_version(number: u32) -> String {
    format!("{}.{}", number / 1000, number % 1000 / 10)
}

/// `130002` is 13.0.2.
fn cublas_version(number: usize) -> String {
    format!("{}.{}.{}", number / 10_000, number / 100 % 100, number % 100)
}

#[cfg(test)]
mod tests {
    use std::{collections::HashMap, sync::Mutex};

    use anyhow::anyhow;

    use super::*;

    #[test]
    fn what_the_system_tells() {
        let cpu_info = "processor\t: 0\nmodel name\t: Some CPU @ 2 GHz\nflags\t: fpu\n";
        assert_eq!(cpu_name(cpu_info), Some("Some CPU @ 2 GHz"));
        assert_eq!(cpu_name(""), None);
        let maps = "7f00-7f01 r-xp 00000000 08:01 11 /usr/lib/libcuda.so.580.1\n\
            7f01-7f02 r--p 00001000 08:01 11 /usr/lib/libcuda.so.580.1\n\
            7f02-7f03 rw-p 00000000 00:00 0\n\
            7f03-7f04 r-xp 00000000 08:01 12 /usr/lib/libc.so.6\n\
            7f04-7f05 r-xp 00000000 08:01 13 /opt/cuda 13/libcublasLt.so.13\n";
        let expected = ["/opt/cuda 13/libcublasLt.so.13", "/usr/lib/libcuda.so.580.1"];
        assert_eq!(loaded_libraries(maps), BTreeSet::from(expected));
    }

    /// Counts after groups of one check each, where `run` is told how often a group ran before.
    fn counts(num_threads: usize, run: impl Fn(usize) -> Findings + Sync) -> (usize, usize) {
        let groups = &cpu_groups()[..3];
        let runs = Mutex::new(HashMap::new());
        let mut tally = Tally::default();
        tally.note_groups(groups, num_threads, |group| {
            let before = {
                let mut runs = runs.lock().unwrap();
                let num_runs = runs.entry(group.name()).or_insert(0);
                *num_runs += 1;
                *num_runs - 1
            };
            // The last group alone has trouble.
            if group.name() == groups[2].name() { run(before) } else { found(true) }
        });
        (tally.num_passed, tally.num_failed)
    }

    fn found(passed: bool) -> Findings {
        let check = Outcome { passed, name: "a check".into(), measured: "1".into() };
        Findings { outcomes: vec![check], ..Findings::default() }
    }

    fn stopped(found: Findings) -> Findings {
        Findings { stopped_by: Some(anyhow!("lost")), ..found }
    }

    #[test]
    fn what_an_error_stops_beside_others_is_checked_again_alone() {
        let once = |before| if before == 0 { stopped(found(true)) } else { found(true) };
        assert_eq!(counts(2, once), (3, 0));
        // With nobody beside, and with an error again, it has failed.
        assert_eq!(counts(1, once), (3, 1));
        assert_eq!(counts(2, |_| stopped(found(true))), (3, 1));
        // A wrong number stays one, whatever stopped the group after it.
        let wrong = |before| if before == 0 { stopped(found(false)) } else { found(true) };
        assert_eq!(counts(2, wrong), (3, 1));
        let panics = |before| if before == 0 { panic!("at first") } else { found(true) };
        assert_eq!(counts(2, panics), (3, 0));
    }

    #[test]
    fn versions() {
        assert_eq!(cuda_version(12080), "12.8");
        assert_eq!(cublas_version(130_002), "13.0.2");
        assert_eq!(cublas_version(120_804), "12.8.4");
    }
}

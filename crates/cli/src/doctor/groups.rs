//! Groups of checks, each of which one thread makes with a backend of its own.

use std::time::{Duration, Instant};

use anyhow::{Error, Result, bail};
use inflight_backend::{
    Backend, CpuBackend, CpuConfig, CudaBackend, KvDtype, SimdLevel,
    cuda::{Numerics, Softmax},
    self_check::{OperatorCheck, Section, check_sections},
};
use inflight_bench::check_invariance;

use crate::args::DeviceChoice;
use crate::device::{Chosen, GpuUse, choose};

/// Checks that are made together.
#[derive(Clone, Debug)]
pub(super) struct Group {
    /// Stands above the first group that has it.
    pub(super) heading: &'static str,
    /// Stands before each check's name; empty for the usual way to compute.
    prefix: String,
    part: Part,
    device: GroupDevice,
}

/// What of a device is checked.
#[derive(Clone, Copy, Debug)]
struct Part {
    name: &'static str,
    sections: &'static [Section],
    /// Whether tokens are compared that are computed alone and among others.
    invariance: bool,
}

/// What computes.
#[derive(Clone, Copy, Debug)]
enum GroupDevice {
    Cpu(SimdLevel),
    Gpu(DeviceChoice, Numerics),
}

/// How one check went.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Outcome {
    pub(super) passed: bool,
    pub(super) name: String,
    pub(super) measured: String,
}

/// What a group found, and how long it took.
#[derive(Debug, Default)]
pub(super) struct Findings {
    pub(super) outcomes: Vec<Outcome>,
    pub(super) elapsed: Duration,
    /// Why the rest could not be checked.
    pub(super) stopped_by: Option<Error>,
}

const fn part(name: &'static str, sections: &'static [Section]) -> Part {
    Part { name, sections, invariance: false }
}

/// Every operator. What is replayed is attention that leaves codes for weights in fp8.
const ALL: [Part; 6] = [
    part("products and norms", &[Section::Dense]),
    part("weights in fp8, replays", &[Section::Fp8, Section::Replays]),
    part("sampling, cut prompts, moves", &[Section::Sampling, Section::Cuts, Section::Moves]),
    part("rotation", &[Section::Rotation]),
    part("attention", &[Section::Attention]),
    part("attention of more shapes", &[Section::MoreAttention]),
];

/// What uses the KV cache.
const OF_KV: [Part; 2] = [
    part("rotation, cut prompts, moves", &[Section::Rotation, Section::Cuts, Section::Moves]),
    part("attention, replays", &[Section::Attention, Section::Replays]),
];

const INVARIANCE: Part = Part { invariance: true, ..part("invariance", &[]) };

/// The groups for a CPU: all operators with each kind of instructions.
pub(super) fn cpu_groups() -> Vec<Group> {
    let of_level = |level: SimdLevel| {
        ALL.map(|part| Group {
            heading: "Operators by the instructions used, against those of the best",
            prefix: format!("{level:?}: "),
            part,
            device: GroupDevice::Cpu(level),
        })
    };
    SimdLevel::available().flat_map(of_level).collect()
}

/// The groups for a GPU: all operators, and what uses the KV cache in every other way there is.
pub(super) fn gpu_groups(device: DeviceChoice) -> Vec<Group> {
    let group = |part, heading, prefix, numerics| {
        let device = GroupDevice::Gpu(device, numerics);
        Group { heading, prefix, part, device }
    };
    let usual = Numerics::default();
    let mut groups = ALL.map(|part| group(part, OPERATORS, String::new(), usual)).to_vec();
    for (name, numerics) in other_numerics() {
        let invariance = numerics.batch_invariant.then_some(INVARIANCE);
        for part in OF_KV.into_iter().chain(invariance) {
            groups.push(group(part, OTHERS, format!("{name}: "), numerics));
        }
    }
    groups
}

const OPERATORS: &str = "Operators against the CPU";
const OTHERS: &str =
    "The KV cache's other types, and attention's: unified, batch-invariant, cascade";

/// The other ways in which a GPU can compute attention.
fn other_numerics() -> [(&'static str, Numerics); 11] {
    let usual = Numerics::default();
    let (unified, cascade) = (Softmax::Unified, true);
    let of = |kv_dtype| Numerics { kv_dtype, ..usual };
    let (int8, fp8, int4) = (of(KvDtype::Int8), of(KvDtype::Fp8), of(KvDtype::Int4));
    [
        ("unified", Numerics { softmax: unified, ..usual }),
        ("int8", int8),
        ("fp8", fp8),
        ("fp8 unified", Numerics { softmax: unified, ..fp8 }),
        ("int4", int4),
        ("int4 unified", Numerics { softmax: unified, ..int4 }),
        ("invariant", Numerics { batch_invariant: true, ..usual }),
        ("cascade", Numerics { cascade, ..usual }),
        ("cascade, fp8", Numerics { cascade, ..fp8 }),
        ("cascade, int8", Numerics { cascade, ..int8 }),
        ("cascade, int4", Numerics { cascade, ..int4 }),
    ]
}

impl Group {
    pub(super) fn name(&self) -> String {
        format!("{}{}", self.prefix, self.part.name)
    }

    /// Makes the checks.
    pub(super) fn run(&self) -> Findings {
        let started = Instant::now();
        let mut outcomes = Vec::new();
        let stopped_by = self.run_on_device(&mut outcomes).err();
        Findings { outcomes, elapsed: started.elapsed(), stopped_by }
    }

    fn run_on_device(&self, outcomes: &mut Vec<Outcome>) -> Result<()> {
        match self.device {
            GroupDevice::Cpu(simd) => {
                let backend = CpuBackend::new(CpuConfig { simd, ..CpuConfig::detect() })?;
                self.check(&backend, outcomes)
            }
            GroupDevice::Gpu(device, numerics) => {
                // Products are timed while other groups use the device.
                let gpu_use = GpuUse { numerics, keeps_fastest: false, ..GpuUse::default() };
                let Chosen::Cuda(backend) = choose(device, gpu_use)? else {
                    bail!("the GPU cannot be opened again")
                };
                self.check(&backend, outcomes)?;
                outcomes.extend(self.recomputed(&backend, numerics)?);
                Ok(())
            }
        }
    }

    fn check<B: Backend>(&self, backend: &B, outcomes: &mut Vec<Outcome>) -> Result<()> {
        let outcome = |check: OperatorCheck| Outcome {
            passed: check.passed(),
            measured: format!("{:9.2e} of {:7.0e}", check.error, check.tolerance),
            name: format!("{}{}", self.prefix, check.name),
        };
        let mut checks = Vec::new();
        let checked = check_sections(backend, self.part.sections, &mut checks);
        outcomes.extend(checks.into_iter().map(outcome));
        checked?;
        if self.part.invariance {
            outcomes.push(invariance(backend)?);
        }
        Ok(())
    }

    /// Whether a unified softmax met the scores that it cannot take, and knew.
    fn recomputed(&self, backend: &CudaBackend, numerics: Numerics) -> Result<Option<Outcome>> {
        let has_attention = self.part.sections.contains(&Section::Attention);
        if numerics.softmax != Softmax::Unified || !has_attention {
            return Ok(None);
        }
        let num = backend.num_recomputed()?;
        let (name, measured) = ("rows of great scores", format!("{num} again"));
        Ok(Some(Outcome { passed: num > 0, name: format!("{}{name}", self.prefix), measured }))
    }
}

/// Whether tokens depend on what they are computed with.
pub(super) fn invariance<B: Backend>(backend: &B) -> Result<Outcome> {
    let check = check_invariance(backend)?;
    Ok(Outcome {
        passed: check.num_different == 0,
        name: "tokens and logprobs: alone, in a batch, prompts cut otherwise".into(),
        measured: format!("{} of {} differ", check.num_different, check.num_tokens),
    })
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    /// The sections that are checked under a prefix.
    fn sections(groups: &[Group], prefix: &str) -> Vec<Section> {
        let groups = groups.iter().filter(|group| group.prefix == prefix);
        groups.flat_map(|group| group.part.sections).copied().collect()
    }

    #[test]
    fn every_section_is_checked_once_the_usual_way_and_with_all_instructions() {
        let gpu = gpu_groups(DeviceChoice::Cuda(0));
        let cpu = cpu_groups();
        for (groups, prefix) in [(&gpu, ""), (&cpu, "Plain: ")] {
            let sections = sections(groups, prefix);
            assert_eq!(sections.len(), Section::ALL.len());
            assert!(Section::ALL.iter().all(|section| sections.contains(section)));
        }
        assert_eq!(cpu.len(), ALL.len() * SimdLevel::available().count());
    }

    #[test]
    fn all_other_ways_are_checked_and_no_two_groups_have_one_name() {
        let groups = gpu_groups(DeviceChoice::Cuda(0));
        for prefix in ["unified: ", "int4 unified: ", "invariant: ", "cascade, int4: "] {
            assert_eq!(sections(&groups, prefix).len(), 5, "{prefix}");
        }
        let names: HashSet<String> = groups.iter().map(Group::name).collect();
        assert_eq!(names.len(), groups.len());
        assert!(names.contains("int8: attention, replays") && names.contains("rotation"));
        assert!(names.contains("invariant: invariance"));
    }
}

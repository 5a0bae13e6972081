//! Planted bugs must be found, and named for what they are.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use inflight_engine::{Damage, Preemption};
use inflight_sim::check::{Plants, Scenario, run, run_with};
use inflight_sim::{Faults, Wait};

/// Runs of this many seeds, none with faults of its own.
const NUM_SEEDS: u64 = 400;
const UNORDERED: &str = "no event orders the two";

fn scenarios() -> impl Iterator<Item = Scenario> {
    (0..NUM_SEEDS).map(|seed| Scenario { faults: Faults::default(), ..Scenario::new(seed) })
}

/// Damages the books once in each run, as soon as it can be done after some steps; gives what was
/// found in each run that was damaged.
fn violations(damage: Damage, scenarios: impl Iterator<Item = Scenario>) -> Vec<Option<String>> {
    let mut found = Vec::new();
    for scenario in scenarios {
        let mut num_steps = 0;
        let mut is_done = false;
        let mut after_step = |engine: &mut inflight_engine::Engine<inflight_sim::SimBackend>| {
            num_steps += 1;
            is_done = is_done || num_steps > 3 && engine.damage(damage);
        };
        let plants = Plants { after_step: Some(&mut after_step), ..Plants::default() };
        let result = run_with(&scenario, plants);
        if is_done {
            found.push(result.err().map(|failure| failure.violation));
        }
    }
    assert!(found.len() > 20, "only {} runs could be damaged", found.len());
    found
}

fn check_all_named(damage: Damage, name: &str) {
    for violation in violations(damage, scenarios()) {
        let violation = violation.expect("every damage is found");
        assert!(violation.contains(name), "{damage:?} was found as: {violation}");
    }
}

#[test]
fn a_leaked_block_is_found() {
    check_all_named(Damage::LeakBlock, "it is leaked");
}

#[test]
fn a_double_free_is_found() {
    check_all_named(Damage::DoubleFree, "it was freed once too often");
}

/// Nobody may have needed those blocks in time; where somebody did, it is found before a token is
/// wrong.
#[test]
fn early_reuse_is_found() {
    let scenarios = scenarios().map(|mut scenario| {
        scenario.engine.overlap = true;
        scenario.engine.memory.preemption = Preemption::Swap;
        scenario.engine.memory.num_swap_blocks = 200;
        scenario.engine.num_blocks = scenario.engine.max_model_len.div_ceil(2);
        scenario.engine.block_size = 2;
        scenario.policy = Default::default();
        scenario.tunings.clear();
        scenario
    });
    let found: Vec<_> = violations(Damage::ReuseEarly, scenarios).into_iter().flatten().collect();
    assert!(found.len() >= 10, "found {} times only", found.len());
    for violation in found {
        // A block of the device that compute writes, or of the host that is read too early.
        let is_named = violation.starts_with("block ") && violation.contains("while d2h still");
        assert!(is_named && violation.ends_with(UNORDERED), "found as: {violation}");
    }
}

#[test]
fn a_lost_final_message_is_found() {
    let mut num_found = 0;
    for scenario in scenarios() {
        let lost_final = Some(scenario.requests.len() - 1);
        match run_with(&scenario, Plants { lost_final, ..Plants::default() }) {
            Err(failure) => {
                let name = format!("request {} has no final message", scenario.requests.len() - 1);
                assert_eq!(failure.violation, name);
                num_found += 1;
            }
            // It was refused, and there is no message to lose.
            Ok(figures) => assert!(figures.num_requests < scenario.requests.len()),
        }
    }
    assert!(num_found > NUM_SEEDS * 3 / 4, "{num_found}");
}

/// The waits that every step needs are found in every run; the others wherever they are done. The
/// one for blocks that come back (`D2hForSwapIn`) is for the host alone, which reads how long they
/// took: the next batch orders all uses of memory besides.
#[test]
fn every_missing_wait_is_found() {
    let waits = [
        (Wait::ComputeForH2d, 0.95, &["compute reads while h2d still writes"][..]),
        (Wait::D2hForCompute, 0.95, &["d2h reads while compute", "the host writes while h2d"]),
        (Wait::HostForD2h, 0.95, &["the host ", "block "]),
        (Wait::ComputeForLate, 0.2, &["device_late: compute reads while h2d still writes"]),
        (Wait::H2dForCompute, 0.005, &["block "]),
    ];
    for (wait, least, names) in waits {
        let mut num_found = 0;
        for scenario in scenarios() {
            let faults = Faults { skipped_wait: Some(wait), ..Faults::default() };
            let Err(failure) = run(&Scenario { faults, ..scenario }) else { continue };
            let violation = failure.violation;
            let is_named = names.iter().any(|name| violation.contains(name));
            assert!(is_named && violation.ends_with(UNORDERED), "{wait:?} found as: {violation}");
            num_found += 1;
        }
        let part = f64::from(num_found) / NUM_SEEDS as f64;
        assert!(part >= least, "{wait:?} was found in {part} of all runs");
    }
}

/// Somebody writes to a block that is full. Its checksum tells when it is used again; rows that had
/// it all along may draw another token before.
#[test]
fn a_changed_block_is_found_by_its_checksum() {
    let mut num_named = 0;
    for (i, mut scenario) in scenarios().enumerate() {
        scenario.checks_blocks = true;
        scenario.engine.memory.prefix_caching = true;
        scenario.faults.flips_after = Some(i % 40);
        let Err(failure) = run(&scenario) else { continue };
        let violation = failure.violation;
        let is_named = violation.ends_with("is not what it was when it was full");
        assert!(is_named || violation.contains(": token "), "found as: {violation}");
        num_named += u64::from(is_named);
    }
    assert!(num_named >= NUM_SEEDS / 25, "named {num_named} times only");
}

/// A run is the same each time, and another seed is another run.
#[test]
fn a_seed_reproduces_a_run() {
    let runs = [5, 5, 6].map(|seed| run(&Scenario::new(seed)).unwrap());
    assert_eq!(runs[0], runs[1]);
    assert_ne!(runs[0], runs[2]);
}

/// Overlap on and off: the same tokens for everybody who was left in peace, which is what every
/// client compares with; here, that both ways were taken at all.
#[test]
fn overlap_changes_no_token() {
    for scenario in scenarios() {
        let with = |overlap| {
            let mut scenario = scenario.clone();
            scenario.engine.overlap = overlap;
            scenario.tunings.clear();
            scenario.policy.max_queue_time = None;
            for request in &mut scenario.requests {
                request.spec.timeout = None;
                request.leaving = None;
            }
            run(&scenario).unwrap_or_else(|failure| panic!("{failure}"))
        };
        let (on, off) = (with(true), with(false));
        assert_eq!((on.num_tokens, on.num_complete), (off.num_tokens, off.num_complete));
        assert_eq!(on.num_complete, on.num_requests as u64);
    }
}

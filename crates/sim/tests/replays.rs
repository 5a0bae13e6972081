//! What an engine records is decided again in the same way.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use inflight_engine::{Damage, Engine, Record, Replay};
use inflight_sim::SimBackend;
use inflight_sim::check::{Plants, Scenario, run_with};

/// A run's record, and what was found in the run.
fn recorded(scenario: &Scenario, damage: Option<Damage>) -> (Option<Record>, Option<String>) {
    let mut record = None;
    let mut is_done = false;
    let mut num_steps = 0;
    let mut after_step = |engine: &mut Engine<SimBackend>| {
        num_steps += 1;
        if let Some(damage) = damage {
            is_done = is_done || num_steps > 10 && engine.damage(damage);
        }
    };
    let plants = Plants {
        after_step: Some(&mut after_step),
        record: Some(&mut record),
        ..Plants::default()
    };
    let violation = run_with(scenario, plants).err().map(|failure| failure.violation);
    (record, violation.filter(|_| damage.is_none() || is_done))
}

/// The same after a trip through a file.
fn through_text(record: &Record) -> Record {
    let text = serde_json::to_string(record).unwrap();
    let read = serde_json::from_str(&text).unwrap();
    assert_eq!(*record, read);
    read
}

/// Prompts that begin alike, stops, aborts, lost devices, preemption, swaps and changes of policy:
/// every plan is the same plan again, and the books agree after each.
#[test]
fn every_run_is_decided_again_as_before() {
    let (mut num_plans, mut num_shared) = (0, 0);
    for seed in 0..1000 {
        let (record, violation) = recorded(&Scenario::new(seed), None);
        assert_eq!(violation, None, "seed {seed}");
        // An engine that did not start has none.
        let Some(record) = record else { continue };
        let record = through_text(&record);
        let mut replay = Replay::new(&record).unwrap();
        while let Some(step) = replay.step().unwrap_or_else(|error| panic!("{seed}: {error}")) {
            assert!(step.is_same() && step.replayed.is_some(), "seed {seed}: {step:?}");
            assert_eq!(step.violation, None, "seed {seed}");
            num_plans += 1;
        }
        let blocks: Vec<u64> = record.sequences.iter().flat_map(|s| s.blocks.clone()).collect();
        let distinct: std::collections::HashSet<_> = blocks.iter().collect();
        num_shared += blocks.len() - distinct.len();
    }
    assert!(num_plans > 20_000, "{num_plans} plans");
    assert!(num_shared > 5_000, "{num_shared} blocks were like others");
}

/// What went wrong goes wrong again, at the same place.
#[test]
fn a_failing_run_fails_again() {
    let mut num_failed = 0;
    for seed in 0..100 {
        for damage in [Damage::LeakBlock, Damage::DoubleFree] {
            let (record, violation) = recorded(&Scenario::new(seed), Some(damage));
            let (Some(record), Some(violation)) = (record, violation) else { continue };
            if violation.starts_with("panicked") {
                continue; // it was found before the books were looked at
            }
            let record = through_text(&record);
            let mut replay = Replay::new(&record).unwrap();
            let mut found = None;
            while let Some(step) = replay.step().unwrap() {
                assert!(step.is_same(), "seed {seed}: {step:?}");
                found = found.or(step.violation);
            }
            assert_eq!(found, Some(violation), "seed {seed}");
            num_failed += 1;
        }
    }
    assert!(num_failed > 50, "{num_failed} runs failed");
}

#[test]
fn a_record_has_no_tokens() {
    let scenario = Scenario::new(3);
    let (record, _) = recorded(&scenario, None);
    let text = serde_json::to_string(&record.unwrap()).unwrap();
    for name in ["token_ids", "\"prompt\":", "salt"] {
        assert!(!text.contains(name), "{name}");
    }
}

/// Whatever a file holds, reading it gives a value or an error.
#[test]
fn damaged_records_are_refused() {
    let (record, _) = recorded(&Scenario::new(3), None);
    let record = record.unwrap();
    let check = |damage: fn(&mut Record), expected: &str| {
        let mut record = record.clone();
        damage(&mut record);
        let mut end = Ok(Some(()));
        let result = Replay::new(&record);
        if let Ok(mut replay) = result {
            while let Ok(Some(())) = end {
                end = replay.step().map(|step| step.map(|_| ()));
            }
        } else {
            end = result.map(|_| None);
        }
        let error = end.expect_err(expected).to_string();
        assert!(error.contains(expected), "{error}");
    };
    check(|record| record.version = 7, "layout 7");
    check(|record| record.log.push('x'), "hexadecimal");
    check(|record| record.log.insert_str(0, "63"), "it is no call");
    check(|record| record.log.insert_str(0, "07"), "nothing was planned");
    check(|record| record.sequences.clear(), "no such sequence");
    check(|record| record.config.block_size = 0, "block_size must be at least 1");
}

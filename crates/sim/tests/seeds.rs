//! Ten thousand runs of the real engine on a simulated device, each from a seed of its own.

#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use inflight_sim::check::{Failure, Figures, Scenario, run};

const NUM_SEEDS: u64 = 10_000;

/// Runs all seeds on all cores; gives what they went through, and the failures.
fn run_all(seeds: std::ops::Range<u64>) -> (Vec<Figures>, Vec<Failure>) {
    let next = AtomicU64::new(seeds.start);
    let results = Mutex::new((Vec::new(), Vec::new()));
    let work = || {
        loop {
            let seed = next.fetch_add(1, Ordering::Relaxed);
            if seed >= seeds.end {
                return;
            }
            let result = run(&Scenario::new(seed));
            let mut results = results.lock().unwrap();
            match result {
                Ok(figures) => results.0.push(figures),
                Err(failure) => results.1.push(failure),
            }
        }
    };
    let num_threads = std::thread::available_parallelism().map_or(2, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..num_threads {
            scope.spawn(work);
        }
    });
    results.into_inner().unwrap()
}

#[test]
fn ten_thousand_runs_keep_every_invariant() {
    let (figures, mut failures) = run_all(0..NUM_SEEDS);
    failures.sort_by_key(|failure| failure.seed);
    for failure in failures.iter().take(10) {
        eprintln!("{failure}");
    }
    assert!(failures.is_empty(), "{} of {NUM_SEEDS} runs failed", failures.len());
    // The runs are about something.
    let sum = |of: fn(&Figures) -> u64| figures.iter().map(of).sum::<u64>();
    let seen = [
        ("tokens", sum(|f| f.num_tokens), 100 * NUM_SEEDS / 4),
        ("complete", sum(|f| f.num_complete), NUM_SEEDS),
        ("aborted", sum(|f| f.num_aborted), NUM_SEEDS / 4),
        ("lapsed", sum(|f| f.num_lapsed), NUM_SEEDS / 20),
        ("failed", sum(|f| f.num_failed), NUM_SEEDS / 20),
        ("preemptions", sum(|f| f.num_preemptions), NUM_SEEDS / 2),
        ("swaps", sum(|f| f.num_swaps), NUM_SEEDS / 8),
        ("shared", sum(|f| f.num_shared), NUM_SEEDS),
        ("fetched", sum(|f| f.num_fetched), NUM_SEEDS / 6),
        ("fetched of groups", sum(|f| f.num_fetched_of_groups), NUM_SEEDS / 25),
        ("turned", sum(|f| f.num_turns), NUM_SEEDS),
        ("cut", sum(|f| f.num_cuts), NUM_SEEDS / 60),
        ("cascaded", sum(|f| f.num_cascaded), NUM_SEEDS),
    ];
    println!("{} steps, {seen:?}", sum(|f| f.num_steps));
    for (what, count, least) in seen {
        assert!(count >= least, "{count} {what} in {NUM_SEEDS} runs, expected {least}");
    }
}

/// Repeats one run: `INFLIGHT_SIM_SEED=7 cargo test -p inflight-sim --test seeds one_seed`.
#[test]
fn one_seed() {
    let seed = std::env::var("INFLIGHT_SIM_SEED").map_or(0, |seed| seed.parse().unwrap());
    let scenario = Scenario::new(seed);
    match run(&scenario) {
        Ok(figures) => println!("seed {seed}: {figures:?}"),
        Err(failure) => panic!("{scenario:#?}\n{failure}"),
    }
}

//! Latency targets and fairness on a device of virtual time: an H200 with an 8B model, by its
//! roofline and a little noise.

mod device;

use std::time::Duration;

use inflight_scheduler::{LimitedBy, Order, Policy, Targets};
use proptest::prelude::*;

use device::{Device, Job, Report, decode_step_ms, least_chunk_step_ms};

const TARGET_MS: f64 = 40.0;

fn with_target(ms: f64) -> Policy {
    let targets = Targets { itl: Some(Duration::from_secs_f64(ms / 1e3)), ttft: None };
    Policy { targets, ..Policy::default() }
}

/// 32 decodes, and after a second a prompt of 32k tokens.
fn long_prompt() -> Vec<Job> {
    let decode = Job { at_s: 0.0, prompt_len: 256, max_tokens: 1200, tenant: "a" };
    let mut jobs = vec![decode; 32];
    jobs.push(Job { at_s: 1.0, prompt_len: 32_768, max_tokens: 1, tenant: "a" });
    jobs
}

fn run(policy: Policy, noise: f64, jobs: &[Job]) -> Report {
    Device::h200(policy, noise).run(jobs)
}

#[test]
fn a_long_prompt_keeps_to_the_target() {
    let free = run(Policy::default(), 0.03, &long_prompt());
    let beside = free.itl_ms_while_prompting(0..32, 32, 0.99);
    assert!(beside > 4.0 * TARGET_MS, "without a target decodes wait for chunks");
    let held = run(with_target(TARGET_MS), 0.03, &long_prompt());
    let p99 = held.itl_ms(0..32, 0.99);
    assert!(p99 <= TARGET_MS, "{p99} ms");
    // Of the gaps beside the prompt, too, and without giving away half of what is allowed.
    let beside = held.itl_ms_while_prompting(0..32, 32, 0.99);
    assert!((0.6 * TARGET_MS..=TARGET_MS).contains(&beside), "{beside} ms");
    assert!(held.decisions.iter().any(|decision| decision.limited_by == LimitedBy::ItlTarget));
}

#[test]
fn without_a_target_throughput_is_that_of_the_best_chunk() {
    let seconds = |policy| run(policy, 0.0, &long_prompt()).end_s;
    let best = [256, 512, 1024, 2048, 4096, 8192]
        .map(|chunk| {
            let max_batch_prefill_tokens = Some(chunk);
            seconds(Policy { max_batch_prefill_tokens, ..Policy::default() })
        })
        .into_iter()
        .fold(f64::INFINITY, f64::min);
    let adaptive = seconds(Policy::default());
    assert!(adaptive <= 1.02 * best, "{adaptive} s, the best chunk {best} s");
}

#[test]
fn noise_does_not_make_the_limit_flap() {
    let held = run(with_target(TARGET_MS), 0.05, &long_prompt());
    let limited = held.decisions.iter().filter(|d| d.limited_by == LimitedBy::ItlTarget);
    let limits: Vec<usize> = limited.map(|decision| decision.prefill_limit).collect();
    let num_raises = limits.windows(2).filter(|pair| pair[1] > pair[0]).count();
    assert!(limits.len() > 20, "{limits:?}");
    assert!(num_raises * 8 < limits.len(), "{num_raises} raises in {} plans", limits.len());
}

/// One tenant asks for one answer at a time, another floods the queue from the start.
#[test]
fn a_flood_does_not_reach_other_tenants() {
    let job = |at_s, tenant| Job { at_s, prompt_len: 256, max_tokens: 256, tenant };
    let modest: Vec<_> = (0..10).map(|i| job(0.5 + f64::from(i) * 2.0, "modest")).collect();
    let flood = vec![job(0.0, "flood"); 4000];
    let both = [modest.clone(), flood].concat();
    let alone = run(Policy::default(), 0.03, &modest);
    let target_ms = 1.2 * alone.itl_ms(0..10, 0.5);
    let fair = Policy { order: Order::Fair, ..with_target(target_ms) };
    let latency = |report: &Report| report.latency_s(0..10, 0.5);
    let slowdown = latency(&run(fair, 0.03, &both)) / latency(&alone);
    assert!(slowdown <= 1.5, "{slowdown}");
    let unfair = latency(&run(Policy::default(), 0.03, &both)) / latency(&alone);
    assert!(unfair > 3.0, "first come, first served, a flood goes first: {unfair}");
}

/// Where every token costs alike, a flood is held back to what the target leaves, and a long prompt
/// to what the decodes leave.
#[test]
fn targets_are_kept_where_time_goes_by_tokens() {
    let job = |at_s, prompt_len, max_tokens, tenant| Job { at_s, prompt_len, max_tokens, tenant };
    let mut jobs = vec![job(0.0, 64, 600, "a"); 8];
    jobs.push(job(2.0, 4000, 1, "a"));
    let held = Device::cpu(with_target(20.0), 0.03).run(&jobs);
    let p99 = held.itl_ms(0..8, 0.99);
    assert!(p99 <= 20.0, "{p99} ms");
    assert!(held.itl_ms_while_prompting(0..8, 8, 0.5) > 12.0, "what is allowed is used");

    let modest: Vec<_> = (0..10).map(|i| job(1.0 + f64::from(i), 64, 64, "modest")).collect();
    let both = [modest.clone(), vec![job(0.0, 64, 64, "flood"); 600]].concat();
    let alone = Device::cpu(Policy::default(), 0.03).run(&modest);
    let fair = Policy { order: Order::Fair, ..with_target(3.0 * alone.itl_ms(0..10, 0.5)) };
    let flooded = Device::cpu(fair, 0.03).run(&both);
    let slowdown = flooded.latency_s(0..10, 0.5) / alone.latency_s(0..10, 0.5);
    let free = Device::cpu(Policy { order: Order::Fair, ..Policy::default() }, 0.03).run(&both);
    let unheld = free.latency_s(0..10, 0.5) / alone.latency_s(0..10, 0.5);
    assert!(slowdown < 4.0 && unheld > 2.0 * slowdown, "{slowdown}, without a target {unheld}");
}

/// Every place is taken by long outputs that all began together; a tenant that comes then waits for
/// a few steps, not for their end.
#[test]
fn a_flood_makes_way_for_who_has_nothing_running() {
    let job = |at_s, max_tokens, tenant| Job { at_s, prompt_len: 64, max_tokens, tenant };
    let mut jobs: Vec<_> = (0..5).map(|i| job(2.0 + f64::from(i), 1, "modest")).collect();
    jobs.extend(vec![job(0.0, 400, "flood"); 200]);
    let policy = Policy { order: Order::Fair, ..Policy::default() };
    let report = Device::cpu(policy, 0.03).run(&jobs);
    // A step of 64 rows and one with a prompt besides take 28 and 54 ms.
    let waited = report.latency_s(0..5, 1.0);
    assert!(waited < 0.3, "{waited} s until a first token");
    // Who gave way lost nothing.
    assert!((5..205).all(|job| report.has_ended(job)));
    let num_preempted: usize = report.decisions.iter().map(|d| d.num_preempted).sum();
    assert!((1..=5).contains(&num_preempted), "{num_preempted} gave way");
}

/// Both have more than there is room for: each gets half.
#[test]
fn tenants_that_both_flood_get_equal_service() {
    let job = |prompt_len, max_tokens, tenant| Job { at_s: 0.0, prompt_len, max_tokens, tenant };
    // One asks for much at once, the other for little at a time.
    let jobs = [vec![job(1000, 300, "a"); 1500], vec![job(100, 50, "b"); 9000]].concat();
    let policy = Policy { order: Order::Fair, ..Policy::default() };
    let report = Device::h200(policy, 0.03).run_for(&jobs, 60.0);
    let service = |tenant: &str| report.service[tenant] as f64;
    let ratio = service("a") / service("b");
    assert!((0.9..1.1).contains(&ratio), "{ratio}");
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 12,
        failure_persistence: None,
        ..ProptestConfig::default()
    })]

    /// Whatever the target and the noise: the target is kept wherever it can be, and a prompt is
    /// computed in the end.
    #[test]
    fn targets_are_kept_wherever_they_can_be(
        target_ms in 5.0f64..80.0,
        noise in 0.0f64..0.06,
        num_decodes in 1usize..64,
    ) {
        let decode = Job { at_s: 0.0, prompt_len: 200, max_tokens: 900, tenant: "a" };
        let mut jobs = vec![decode; num_decodes];
        jobs.push(Job { at_s: 0.8, prompt_len: 16_384, max_tokens: 1, tenant: "a" });
        let report = run(with_target(target_ms), noise, &jobs);
        // No step with a chunk is shorter than this. Near it there is no room for noise, and below
        // it the target is kept on average.
        let least_ms = least_chunk_step_ms(num_decodes, 1100, 16_384) * (1.0 + noise);
        if target_ms > 1.5 * least_ms {
            let p99 = report.itl_ms(0..num_decodes, 0.99);
            prop_assert!(p99 <= 1.02 * target_ms, "p99 is {} ms", p99);
        } else {
            let mean = report.mean_itl_ms(0..num_decodes);
            let alone = decode_step_ms(num_decodes, 1100);
            let best = target_ms.max(1.3 * alone * (1.0 + noise));
            prop_assert!(mean <= 1.1 * best, "mean is {} ms, alone {}", mean, alone);
        }
        prop_assert!(report.has_ended(num_decodes));
    }
}

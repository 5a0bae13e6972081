//! What a policy may change: who goes when. What it may not: anybody's tokens.

mod support;

use std::time::Duration;

use inflight_engine::{
    Batching, EngineConfig, FinishReason, Gate, Lapse, Mixing, Order, Policy, RequestSpec, Targets,
    Tenant, Tuning,
};
use support::{config, mixed_request, start};

fn policies() -> Vec<Policy> {
    let usual = Policy::default;
    vec![
        Policy { batching: Batching::Static { batch_size: 5 }, ..usual() },
        Policy { mixing: Mixing::PrefillFirst, ..usual() },
        Policy { mixing: Mixing::DecodeFirst, gate: Gate::USUAL, ..usual() },
        Policy { order: Order::Priority, max_batch_total_tokens: Some(600), ..usual() },
        Policy {
            order: Order::Fair,
            max_batch_prefill_tokens: Some(7),
            targets: Targets {
                itl: Some(Duration::from_micros(300)),
                ttft: Some(Duration::from_millis(3)),
            },
            ..usual()
        },
    ]
}

#[test]
fn policies_change_no_token() {
    let request = |i: u32| RequestSpec {
        priority: (i % 5) as i32 - 2,
        tenant: Tenant::named(["a", "b", "c"][(i % 3) as usize]),
        ..mixed_request(i)
    };
    // Room for about four of the longer sequences: most policies have to preempt.
    let engine = start(EngineConfig { num_blocks: 80, ..config(true) });
    let alone: Vec<_> = (0..32).map(|i| engine.submit(request(i)).wait()).collect();
    for policy in policies() {
        for overlap in [true, false] {
            engine.handle.tune(Tuning { overlap, policy: policy.clone() });
            let clients: Vec<_> = (0..32).map(|i| engine.submit(request(i))).collect();
            for (i, client) in clients.into_iter().enumerate() {
                assert_eq!(client.wait(), alone[i], "request {i}, overlap {overlap}, {policy:?}");
            }
        }
    }
    engine.stop();
}

/// One sequence at a time, so that the second request waits for the whole of the first.
#[test]
fn whoever_waits_too_long_gets_an_error_and_no_answer() {
    let engine = start(EngineConfig { max_num_seqs: 1, ..config(true) });
    let long =
        || RequestSpec { prompt: vec![1, 2, 3], max_tokens: Some(120), ..RequestSpec::default() };
    let soon = Some(Duration::from_micros(1));
    let mut first = engine.submit(long());
    let late = engine.submit(RequestSpec { timeout: soon, ..long() });
    let output = late.wait();
    assert_eq!(output.finish, FinishReason::Lapsed(Lapse::Deadline));
    assert_eq!(output.tokens, [], "a request that lapsed in the queue has no answer");
    assert_eq!(first.wait().finish, FinishReason::Length);

    let policy = Policy { max_queue_time: soon, ..Policy::default() };
    engine.handle.tune(Tuning { overlap: true, policy });
    // Whether the first is admitted in time is the clock's doing; then the others wait for it.
    first = engine.submit(long());
    let others: Vec<_> = (0..3).map(|_| engine.submit(long())).collect();
    let mut reasons: Vec<_> = others.into_iter().map(|client| client.wait().finish).collect();
    reasons.push(first.wait().finish);
    let num_lapsed =
        reasons.iter().filter(|reason| **reason == FinishReason::Lapsed(Lapse::QueueTime)).count();
    assert!(num_lapsed >= 3, "{reasons:?}");
    engine.stop();
}

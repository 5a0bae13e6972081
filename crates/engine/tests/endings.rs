//! Every request ends with exactly one message and frees all it held, however it ends.

mod saboteur;
mod support;

use std::{
    sync::atomic::Ordering,
    time::{Duration, Instant},
};

use inflight_engine::{EngineConfig, FinishReason, RequestSpec, SubmitError};
use support::{Client, Finals, config, engine, mixed_request, start};

/// A small generator, so that a seed reproduces a run.
struct Draws(u64);

impl Draws {
    fn below(&mut self, limit: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % limit
    }
}

fn long_request(i: u32) -> RequestSpec {
    RequestSpec {
        max_tokens: Some(60),
        min_tokens: 0,
        stop_token_ids: Vec::new(),
        ..mixed_request(i)
    }
}

/// Idle engines publish their figures after the last step; this waits for that.
fn wait_for_free_blocks(engine: &support::Running, expected: usize) {
    let deadline = Instant::now() + Duration::from_secs(30);
    while engine.num_free_blocks() != expected {
        assert!(Instant::now() < deadline, "{} of {expected} free", engine.num_free_blocks());
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn two_thousand_aborts_free_everything_and_disturb_nobody() {
    let config = EngineConfig { num_blocks: 160, ..config(true) };
    let num_blocks = config.num_blocks;
    let engine = start(config);
    let alone: Vec<_> = (0..4).map(|i| engine.submit(long_request(i)).wait()).collect();
    let mut draws = Draws(2);
    let mut num_aborted = 0;
    let mut live: Vec<Client> = Vec::new();
    let mut witnesses = Vec::new();
    for i in 0.. {
        if num_aborted >= 2000 {
            break;
        }
        if i % 100 == 0 {
            witnesses.extend((0..4).map(|k| (k, engine.submit(long_request(k as u32)))));
        }
        live.push(engine.submit(long_request(i)));
        // Aborts at once, after some tokens, or in a heap later: every phase is met.
        let newest = live.last().unwrap();
        for _ in 0..draws.below(4) {
            let _ = newest.updates.recv();
        }
        while live.len() as u64 > draws.below(24) {
            let victim = live.swap_remove(draws.below(live.len() as u64) as usize);
            engine.handle.abort(victim.id);
            let finish = victim.wait().finish;
            assert!(matches!(finish, FinishReason::Aborted | FinishReason::Length), "{finish:?}");
            num_aborted += u32::from(finish == FinishReason::Aborted);
        }
    }
    for client in live {
        engine.handle.abort(client.id);
        client.wait();
    }
    for (k, witness) in witnesses {
        assert_eq!(witness.wait(), alone[k], "a neighbour's tokens changed");
    }
    wait_for_free_blocks(&engine, num_blocks);
    assert_eq!(engine.handle.num_outstanding(), 0);
    engine.stop();
}

#[test]
fn a_client_that_goes_away_or_falls_behind_is_aborted() {
    let config = config(true);
    let num_blocks = config.num_blocks;
    let engine = start(config);
    drop(engine.submit(long_request(1)));
    let neighbour = engine.submit(long_request(2)).wait();
    assert_eq!(neighbour.finish, FinishReason::Length);
    wait_for_free_blocks(&engine, num_blocks);
    engine.stop();
}

#[test]
fn a_full_queue_refuses_at_once() {
    let (engine, handle) = engine(EngineConfig { max_outstanding: 3, ..config(true) });
    let finals = Finals::default();
    let submit = || {
        let request = handle.limits().validate(long_request(1)).unwrap();
        handle.submit(request, Box::new(finals.clone()))
    };
    for _ in 0..3 {
        submit().unwrap();
    }
    assert_eq!(submit(), Err(SubmitError::QueueFull { max_outstanding: 3 }));
    handle.drain();
    engine.run().unwrap();
    assert_eq!(*finals.0.lock().unwrap(), vec![FinishReason::Length; 3]);
    assert_eq!(handle.num_outstanding(), 0);
    assert_eq!(submit(), Err(SubmitError::Stopped));
    assert_eq!(finals.0.lock().unwrap().len(), 3, "a refused request got a message");
}

#[test]
fn an_engine_that_never_runs_still_ends_its_requests() {
    let (engine, handle) = engine(config(true));
    let finals = Finals::default();
    let request = handle.limits().validate(long_request(1)).unwrap();
    handle.submit(request, Box::new(finals.clone())).unwrap();
    drop(engine);
    assert!(matches!(&finals.0.lock().unwrap()[..], [FinishReason::Failed(_)]));
    assert_eq!(handle.stats().num_steps.load(Ordering::Relaxed), 0);
}

#[test]
fn a_lost_device_fails_every_request_and_says_so() {
    let backend = saboteur::Saboteur::lost_after(support::cpu(), 21);
    let (engine, handle) = support::engine_on(backend, config(true));
    // More requests than rows: some are running, some still wait.
    let clients: Vec<_> = (0..40).map(|i| support::submit(&handle, long_request(i))).collect();
    let error = engine.run().unwrap_err().to_string();
    assert!(error.contains("device lost: sabotaged"), "{error}");
    for client in clients {
        let FinishReason::Failed(reason) = client.wait().finish else { panic!("it did not fail") };
        assert!(reason.contains("device lost: sabotaged"), "{reason}");
    }
    let request = handle.limits().validate(long_request(1)).unwrap();
    let refused = handle.submit(request, Box::new(Finals::default()));
    assert_eq!(refused, Err(SubmitError::Stopped));
}

#[test]
fn the_next_batch_is_launched_before_the_host_waits_for_the_last() {
    let (mut engine, handle) = engine(config(true));
    let (sender, records) = std::sync::mpsc::sync_channel(10_000);
    engine.trace_to(sender);
    let clients: Vec<_> = (0..8).map(|i| support::submit(&handle, long_request(i))).collect();
    handle.drain();
    engine.run().unwrap();
    clients.into_iter().for_each(|client| drop(client.wait()));
    let records: Vec<_> = records.into_iter().collect();
    assert!(records.len() >= 60);
    for pair in records.windows(2) {
        let (batch, next) = (&pair[0], &pair[1]);
        assert_eq!(next.batch, batch.batch + 1);
        assert!(next.launch.end <= batch.blocked.start, "{batch:?}\n{next:?}");
        assert!(batch.h2d.end <= batch.compute.start && batch.compute.end <= batch.d2h.start);
        assert!(batch.compute.end <= next.compute.start);
    }
}

#[test]
fn an_engine_that_does_not_get_on_is_seen() {
    let (engine, handle) = support::engine(config(true));
    std::thread::sleep(Duration::from_millis(20));
    assert_eq!(handle.stalled_for(), Duration::ZERO, "without work nothing stalls");
    let submitted = Instant::now();
    let client = support::submit(&handle, long_request(0));
    assert!(handle.stalled_for() <= submitted.elapsed() + Duration::from_millis(1));
    std::thread::sleep(Duration::from_millis(20));
    let stalled = handle.stalled_for();
    assert!(stalled >= Duration::from_millis(19), "nobody runs the engine: {stalled:?}");
    let thread = std::thread::spawn(|| engine.run());
    client.wait();
    handle.drain();
    thread.join().unwrap().unwrap();
    assert_eq!(handle.stalled_for(), Duration::ZERO);
}

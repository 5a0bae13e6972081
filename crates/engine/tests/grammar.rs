//! Outputs under a grammar: what they are, how they end, and what they depend on.

mod grammars;
mod support;

use std::sync::Arc;

use grammars::{After, Broken, Fault, Odd};
use inflight_engine::{EngineConfig, FinishReason, RequestSpec, SharedGrammar};
use support::{config, mixed_request, start};

const END: u32 = 250;

fn constrained(i: u32, grammar: SharedGrammar) -> RequestSpec {
    RequestSpec {
        grammar: Some(grammar),
        max_tokens: Some(30),
        min_tokens: 0,
        stop_token_ids: vec![END],
        ..mixed_request(i)
    }
}

#[test]
fn outputs_are_what_their_grammars_allow() {
    for overlap in [true, false] {
        let engine = start(config(overlap));
        let grammar = |i: u32| Odd::new(i, i.is_multiple_of(2).then_some((END, i as usize)));
        let submit = |i| engine.submit(constrained(i, SharedGrammar(Arc::new(grammar(i)))));
        let clients: Vec<_> = (0..24).map(submit).collect();
        for (i, client) in (0..).zip(clients) {
            let output = client.wait();
            grammar(i).check(&output.ids()).unwrap();
            let expected = match i % 2 {
                0 => (FinishReason::Stop { token: END }, i as usize + 1),
                _ => (FinishReason::Length, 30),
            };
            assert_eq!((output.finish, output.tokens.len()), expected, "request {i}");
        }
        engine.stop();
    }
}

#[test]
fn a_complete_output_ends_whatever_else_was_asked_for() {
    let engine = start(config(true));
    let grammar = || Odd::grammar(3, Some((END, 4)));
    let end = FinishReason::Stop { token: END };
    let no_stop_tokens = RequestSpec { stop_token_ids: Vec::new(), ..constrained(1, grammar()) };
    let too_long = RequestSpec { min_tokens: 20, ..constrained(2, grammar()) };
    for spec in [no_stop_tokens, too_long] {
        let output = engine.submit(spec).wait();
        assert_eq!((output.finish, output.tokens.len()), (end.clone(), 5));
    }
    engine.stop();
}

#[test]
fn stop_tokens_are_banned_for_min_tokens_where_others_are_allowed() {
    let engine = start(config(true));
    let stop_token_ids: Vec<u32> = (0..120).collect();
    for think in [0, 40] {
        let grammar = SharedGrammar(Arc::new(After(think, Odd::new(5, None))));
        let spec = RequestSpec {
            min_tokens: 12,
            stop_token_ids: stop_token_ids.clone(),
            ..constrained(1, grammar)
        };
        let output = engine.submit(spec).wait();
        let first = output.ids().iter().position(|token| stop_token_ids.contains(token));
        assert!(first.is_none_or(|first| first >= 12), "stopped after {first:?}");
        assert!(output.tokens.len() > 12);
    }
    engine.stop();
}

#[test]
fn a_grammar_may_begin_after_a_while() {
    let engine = start(config(true));
    let odd = Odd::new(9, Some((END, 6)));
    let free = RequestSpec { grammar: None, ..constrained(8, Odd::grammar(0, None)) };
    let free = RequestSpec { stop_token_ids: Vec::new(), ..free };
    let grammar = SharedGrammar(Arc::new(After(10, odd.clone())));
    let after = engine.submit(RequestSpec { grammar: Some(grammar), ..free.clone() }).wait().ids();
    assert_eq!(after[..10], engine.submit(free).wait().ids()[..10]);
    odd.check(&after[10..]).unwrap();
    assert_eq!(after.len(), 17);
    engine.stop();
}

#[test]
fn a_grammar_that_fails_fails_its_request_alone() {
    for overlap in [true, false] {
        let config = config(overlap);
        let num_blocks = config.num_blocks;
        let engine = start(config);
        let neighbour = mixed_request(4);
        let alone = engine.submit(neighbour.clone()).wait();
        for (after, fault) in
            [(0, Fault::Error), (3, Fault::Error), (3, Fault::Panic), (3, Fault::AllowsNothing)]
        {
            let beside = engine.submit(neighbour.clone());
            let grammar = SharedGrammar(Arc::new(Broken(after, fault)));
            let output = engine.submit(constrained(1, grammar)).wait();
            assert!(matches!(output.finish, FinishReason::Failed(_)), "{:?}", output.finish);
            assert_eq!(output.tokens.len(), after);
            assert_eq!(beside.wait(), alone);
        }
        engine.handle.drain();
        let handle = engine.handle.clone();
        engine.thread.join().unwrap().unwrap();
        let free = handle.stats().num_free_blocks.load(std::sync::atomic::Ordering::Relaxed);
        assert_eq!(free, num_blocks);
    }
}

/// Every third request is under a grammar, with an end or without.
fn mixed(i: u32) -> RequestSpec {
    let end = i.is_multiple_of(2).then_some((END, (i % 9) as usize));
    let grammar = match i % 6 {
        0 => Some(Odd::grammar(i, end)),
        3 => Some(SharedGrammar(Arc::new(After(i as usize % 10, Odd::new(i, end))))),
        _ => None,
    };
    let mut spec = mixed_request(i);
    if grammar.is_some() {
        spec.stop_token_ids.push(END);
    }
    RequestSpec { grammar, ..spec }
}

#[test]
fn overlap_neighbours_chunks_and_preemption_change_no_constrained_token() {
    const NUM_REQUESTS: u32 = 64;
    let engine = start(config(false));
    let alone: Vec<_> = (0..NUM_REQUESTS).map(|i| engine.submit(mixed(i)).wait()).collect();
    engine.stop();
    for overlap in [false, true] {
        let chunks = EngineConfig { max_num_batched_tokens: 16, ..config(overlap) };
        let small_pool = EngineConfig { num_blocks: 36, ..config(overlap) };
        for (name, config) in
            [("all at once", config(overlap)), ("chunks", chunks), ("small pool", small_pool)]
        {
            let engine = start(config);
            let clients: Vec<_> = (0..NUM_REQUESTS).map(|i| engine.submit(mixed(i))).collect();
            for (i, (client, expected)) in clients.into_iter().zip(&alone).enumerate() {
                let output = client.wait();
                assert_eq!(&output, expected, "{name}, overlap {overlap}, request {i}");
            }
            if name == "small pool" {
                let preemptions = &engine.handle.stats().num_preemptions;
                assert!(preemptions.load(std::sync::atomic::Ordering::Relaxed) > 0);
            }
            engine.stop();
        }
    }
}

#[test]
fn aborts_in_any_phase_leave_others_as_they_are() {
    let engine = start(config(true));
    let spec = |i| RequestSpec { max_tokens: Some(40), ..mixed(i) };
    let witness = engine.submit(spec(0)).wait();
    for i in 0..300 {
        let beside = (i % 50 == 0).then(|| engine.submit(spec(0)));
        let victim = engine.submit(spec(3 * i));
        for _ in 0..i % 5 {
            let _ = victim.updates.recv();
        }
        engine.handle.abort(victim.id);
        victim.updates.iter().for_each(drop);
        if let Some(beside) = beside {
            assert_eq!(beside.wait(), witness);
        }
    }
    let handle = engine.handle.clone();
    engine.stop();
    assert_eq!(handle.num_outstanding(), 0);
}

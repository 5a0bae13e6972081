//! Cold prefixes that the host keeps.

use inflight_scheduler::{MemoryConfig, MoveCosts, Preemption, SchedulerConfig};

use crate::engine::{Engine, Moment, Turn};
use crate::workload::Lengths;

const BLOCK_SIZE: usize = 4;
/// Tokens of a chat's beginning, all of it in full blocks.
const PREFIX: usize = 48;
const NUM_CHATS: u64 = 16;
/// Sixteen chats of twelve blocks are four times this pool.
const NUM_BLOCKS: usize = 48;

fn config(num_swap_blocks: usize) -> SchedulerConfig {
    SchedulerConfig {
        other_windows: Vec::new(),
        max_num_seqs: 4,
        max_num_batched_tokens: 32,
        max_model_len: 80,
        block_size: BLOCK_SIZE,
        num_blocks: NUM_BLOCKS,
        memory: MemoryConfig {
            prefix_caching: true,
            preemption: Preemption::Auto,
            num_swap_blocks,
            keeps_cold_prefixes: num_swap_blocks > 0,
            max_moved_blocks: 4,
        },
    }
}

/// A turn of a chat: what it always begins with, and some tokens of its own.
fn chat(family: u64) -> Lengths {
    Lengths { family: (family, PREFIX), ..Lengths::of(PREFIX + 3, 5) }
}

/// The same for a model of three layer groups, two of which look back on 10 tokens.
fn grouped(num_swap_blocks: usize) -> SchedulerConfig {
    let config = config(3 * num_swap_blocks);
    let memory = MemoryConfig { max_moved_blocks: 12, ..config.memory };
    let other_windows = vec![Some(10); 2];
    SchedulerConfig { other_windows, num_blocks: 3 * NUM_BLOCKS, memory, ..config }
}

/// Serves a turn of every chat, one after the other; gives the tokens that were computed.
fn round(engine: &mut Engine) -> usize {
    let before = engine.device.num_computed_tokens;
    for family in 0..NUM_CHATS {
        engine.run(&[Turn { adds: vec![chat(family)], aborts: Vec::new() }]);
    }
    engine.device.num_computed_tokens - before
}

#[test]
fn chats_of_four_times_the_pool_come_back_from_the_host() {
    for overlap in [false, true] {
        let mut engine = Engine::new(config(256), overlap);
        let all = NUM_CHATS as usize * (PREFIX + 3 + 4);
        assert_eq!(round(&mut engine), all);
        // All but a turn's own seven inputs is there; all but what the pool still has was fetched.
        assert_eq!(round(&mut engine), NUM_CHATS as usize * 7);
        let host = engine.scheduler.host_prefixes();
        assert!(host.num_fetched >= NUM_CHATS * 12 - NUM_BLOCKS as u64, "{host:?}");
        assert_eq!(host.num_lost, 0, "{host:?}");
        // A block that the host has is not copied there again.
        let num_kept = host.num_kept;
        assert_eq!(round(&mut engine), NUM_CHATS as usize * 7);
        let again = engine.scheduler.host_prefixes().num_kept - num_kept;
        assert!(again <= NUM_CHATS, "{again}: at most a turn's own last block");
    }
}

#[test]
fn of_windows_only_what_is_seen_comes_back() {
    for overlap in [false, true] {
        let mut engine = Engine::new(grouped(256), overlap);
        round(&mut engine);
        let mut num_fetched = 0;
        for family in 0..NUM_CHATS {
            let before = engine.device.num_computed_tokens;
            engine.run(&[Turn { adds: vec![chat(family)], aborts: Vec::new() }]);
            assert_eq!(engine.device.num_computed_tokens - before, 7);
            let now = engine.scheduler.host_prefixes().num_fetched;
            // Twelve blocks of the group that sees everything. The token at 48 sees those from 39
            // on: three blocks of each of the others.
            assert!(now - num_fetched <= 12 + 2 * 3, "chat {family}: {}", now - num_fetched);
            num_fetched = now;
        }
        let host = engine.scheduler.host_prefixes();
        assert!(num_fetched > 100 && host.num_lost == 0, "{host:?}");
    }
}

/// Windows are evicted first: then the group that sees everything has all it needs on the device.
#[test]
fn a_window_alone_comes_back() {
    for num_others in 0..100 {
        let mut engine = Engine::new(grouped(256), true);
        engine.run(&[Turn { adds: vec![chat(0)], aborts: Vec::new() }]);
        for family in 0..num_others {
            let other = Lengths { family: (100 + family, 8), ..Lengths::of(8, 1) };
            engine.run(&[Turn { adds: vec![other], aborts: Vec::new() }]);
        }
        let before = engine.device.num_computed_tokens;
        engine.run(&[Turn { adds: vec![chat(0)], aborts: Vec::new() }]);
        assert_eq!(engine.device.num_computed_tokens - before, 7);
        let num_fetched = engine.scheduler.host_prefixes().num_fetched;
        if num_fetched > 0 {
            assert!(num_fetched <= 6, "{num_fetched}, two windows of three blocks are lost");
            return;
        }
    }
    panic!("nothing was evicted");
}

#[test]
fn without_the_host_everything_is_computed_again() {
    let mut engine = Engine::new(config(0), true);
    assert_eq!(round(&mut engine), round(&mut engine));
    let host = engine.scheduler.host_prefixes();
    assert!(host.num_lost > 0 && host.num_lost == host.num_evicted, "{host:?}");
}

#[test]
fn a_smaller_host_keeps_what_was_used_last() {
    let mut engine = Engine::new(config(64), true);
    round(&mut engine);
    assert_eq!(engine.scheduler.host_prefixes().num_blocks, 64);
    let mut computed = |family| {
        let before = engine.device.num_computed_tokens;
        engine.run(&[Turn { adds: vec![chat(family)], aborts: Vec::new() }]);
        engine.device.num_computed_tokens - before
    };
    // The last chats are in the pool, those before on the host, the first ones nowhere.
    assert_eq!((computed(NUM_CHATS - 1), computed(NUM_CHATS - 5)), (7, 7));
    assert_eq!(computed(0), PREFIX + 7);
}

#[test]
fn what_is_computed_faster_is_not_fetched() {
    for (token_ns, expected) in [(1_000, 7), (10, PREFIX + 7)] {
        let mut engine = Engine::new(config(256), true);
        round(&mut engine);
        engine.scheduler.set_costs(MoveCosts { token_ns, swap_out_ns: 100, swap_in_ns: 100 });
        let before = engine.device.num_computed_tokens;
        engine.run(&[Turn { adds: vec![chat(0)], aborts: Vec::new() }]);
        assert_eq!(engine.device.num_computed_tokens - before, expected);
    }
}

/// Chats come back together, each ended at another moment; what is left gets its tokens.
#[test]
fn aborts_while_blocks_are_on_their_way_leave_nothing_behind() {
    abort_while_blocks_are_on_their_way(config(256));
}

#[test]
fn aborts_leave_nothing_behind_in_any_layer_group() {
    abort_while_blocks_are_on_their_way(grouped(256));
}

fn abort_while_blocks_are_on_their_way(config: SchedulerConfig) {
    let moments = [Moment::BeforePlan, Moment::Launched, Moment::Advanced, Moment::MidCollect];
    let mut engine = Engine::new(config, true);
    round(&mut engine);
    let mut num_aborted = 0;
    for i in 0..1000 {
        let added = engine.records.len();
        let adds = vec![chat(i % NUM_CHATS), chat((i * 7 + 3) % NUM_CHATS)];
        engine.turn(&Turn { adds, aborts: Vec::new() });
        for _ in 0..i % 5 {
            engine.turn(&Turn::default());
        }
        let aborts = vec![(moments[i as usize % 4], added)];
        engine.turn(&Turn { adds: Vec::new(), aborts });
        let record = engine.records.values().nth(added);
        num_aborted += usize::from(record.is_some_and(|record| record.is_aborted));
        if i % 3 == 0 {
            engine.drain();
        }
    }
    engine.drain();
    assert!(num_aborted > 900, "{num_aborted}");
    assert!(engine.scheduler.host_prefixes().num_fetched > 1000);
}

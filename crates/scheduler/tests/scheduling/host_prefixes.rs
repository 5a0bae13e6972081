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
    let moments = [Moment::BeforePlan, Moment::Launched, Moment::Advanced, Moment::MidCollect];
    let mut engine = Engine::new(config(256), true);
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
        num_aborted += usize::from(engine.records.values().nth(added).unwrap().is_aborted);
        if i % 3 == 0 {
            engine.drain();
        }
    }
    engine.drain();
    assert!(num_aborted > 900, "{num_aborted}");
    assert!(engine.scheduler.host_prefixes().num_fetched > 1000);
}

//! Random use of one pool by many tables, checked against a plain model after every call.

use inflight_kv_cache::{BlockId, BlockPool, BlockTable, KvCacheError, blocks_for};
use proptest::prelude::*;

#[derive(Debug, Clone)]
enum Call {
    Create,
    Grow { table: usize, num_tokens: usize },
    Fork { table: usize, num_tokens: usize },
    Release { table: usize },
}

fn calls() -> impl Strategy<Value = Vec<Call>> {
    let call = prop_oneof![
        1 => Just(Call::Create),
        4 => (0usize..8, 0usize..60)
            .prop_map(|(table, num_tokens)| Call::Grow { table, num_tokens }),
        2 => (0usize..8, 0usize..60)
            .prop_map(|(table, num_tokens)| Call::Fork { table, num_tokens }),
        2 => (0usize..8).prop_map(|table| Call::Release { table }),
    ];
    prop::collection::vec(call, 1..80)
}

/// Applies a call and checks what it alone promises.
fn apply(call: &Call, tables: &mut Vec<BlockTable>, pool: &mut BlockPool, block_size: usize) {
    let num_tables = tables.len().max(1);
    match *call {
        Call::Create => tables.push(BlockTable::new(block_size)),
        Call::Grow { table, num_tokens } => {
            let Some(table) = tables.get_mut(table % num_tables) else { return };
            let (before, free) = (table.blocks().to_vec(), pool.num_free());
            let needed = blocks_for(num_tokens, block_size).saturating_sub(before.len());
            let result = table.grow_to(num_tokens, pool);
            assert_eq!(table.blocks()[..before.len()], before, "old blocks stay where they were");
            let added = table.blocks().len() - before.len();
            assert_eq!(free - pool.num_free(), added);
            if needed > free {
                assert_eq!(result, Err(KvCacheError::OutOfBlocks { needed, free }));
                assert_eq!(added, 0);
            } else {
                assert_eq!((result, added), (Ok(()), needed));
            }
        }
        Call::Fork { table, num_tokens } => {
            let Some(table) = tables.get(table % num_tables) else { return };
            let num_tokens = num_tokens.min(table.capacity());
            let child = table.fork(num_tokens, pool);
            assert_eq!(child.capacity(), num_tokens / block_size * block_size);
            tables.push(child);
        }
        Call::Release { table } => {
            let Some(table) = tables.get_mut(table % num_tables) else { return };
            table.release(pool);
            assert!(table.blocks().is_empty());
        }
    }
}

/// Counts match the tables, and a place that two tables name lies in a block they share.
fn check(tables: &[BlockTable], pool: &BlockPool) {
    pool.check_integrity().expect("the pool is sound after every call");
    let mut holders = vec![0; pool.num_total()];
    for table in tables {
        for (i, &block) in table.blocks().iter().enumerate() {
            holders[block.index()] += 1;
            assert!(!table.blocks()[..i].contains(&block), "a table holds each block once");
            let first = i * table.block_size();
            assert_eq!(table.slot(first) as usize, block.index() * table.block_size());
        }
    }
    for (block, &expected) in (0u32..).map(BlockId).zip(&holders) {
        assert_eq!(pool.ref_count(block), expected, "references to block {block}");
    }
    let held = holders.iter().filter(|&&count| count > 0).count();
    assert_eq!(pool.num_free() + held, pool.num_total());
}

proptest! {
    #[test]
    fn counts_always_match_the_tables(
        calls in calls(),
        num_blocks in 0u32..24,
        block_size in 1usize..6,
    ) {
        let mut pool = BlockPool::new(num_blocks);
        let mut tables = Vec::new();
        for call in &calls {
            apply(call, &mut tables, &mut pool, block_size);
            check(&tables, &pool);
        }
        for table in &mut tables {
            table.release(&mut pool);
        }
        prop_assert_eq!(pool.num_free(), pool.num_total());
        pool.check_integrity().unwrap();
    }
}

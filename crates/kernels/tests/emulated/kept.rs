//! `choose_kept.cu`: which positions of a prompt stay.

use inflight_kernels::{
    Arch,
    ops::cut_prompt::{ChooseKept, ChooseKeptParams},
};

use crate::{
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

const HEADS: usize = 2;

/// Votes are small whole numbers, so that sums are exact and many are equal: those with the
/// greatest sums over two neighbours on each side stay, of equals the first; and the last tokens.
fn expected(votes: &[u32], num_observed: usize, num_kept: usize) -> Vec<u32> {
    let num_voted = votes.len() - num_observed;
    let sum = |i: usize| votes[i.saturating_sub(2)..(i + 3).min(num_voted)].iter().sum::<u32>();
    let mut order: Vec<usize> = (0..num_voted).collect();
    order.sort_by_key(|i| (std::cmp::Reverse(sum(*i)), *i));
    let mut kept = order[..num_kept - num_observed].to_vec();
    kept.sort_unstable();
    kept.into_iter().chain(num_voted..votes.len()).map(|i| i as u32).collect()
}

fn check(context_len: usize, num_observed: usize, num_kept: usize, greatest: u32) {
    let Some(kernel) = Emulated::new(ChooseKept, Arch::SM_80) else { return };
    let mut dice = Dice::new(context_len as u64);
    let votes: Vec<u32> = (0..HEADS * context_len).map(|_| dice.below(greatest)).collect();
    let mut floats = Memory::new(&votes.iter().map(|vote| *vote as f32).collect::<Vec<_>>());
    let mut bits = Memory::<u32>::unwritten(votes.len());
    let mut kept = Memory::<u32>::unwritten(HEADS * num_kept);
    let params = ChooseKeptParams {
        votes: floats.address(),
        bits: bits.address(),
        kept: kept.address(),
        context_len: context_len as u32,
        num_observed: num_observed as u32,
        num_kept: num_kept as u32,
        num_kv_heads: HEADS as u32,
    };
    // SAFETY: memory is of the sizes that parameters say.
    unsafe { kernel.launch(&params, Order::Shuffled(1)) };
    bits.as_slice();
    for (votes, found) in votes.chunks(context_len).zip(kept.as_slice().chunks(num_kept)) {
        assert_eq!(found, expected(votes, num_observed, num_kept));
    }
}

#[test]
fn the_most_wanted_stay_in_order() {
    check(2500, 32, 700, 1000);
    check(100, 16, 99, 1000);
    // Hardly any differ, or none.
    check(1500, 8, 600, 2);
    check(1500, 8, 600, 1);
}

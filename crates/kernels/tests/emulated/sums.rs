//! What adds up and no more: `add_bias.cu`, `sum_parts.cu`.

use half::bf16;
use inflight_kernels::{
    Arch,
    ops::{
        add_bias::{AddBias, AddBiasParams},
        sum_parts::{SumParts, SumPartsParams},
    },
};

use crate::{
    attention::NULL,
    emulator::{Emulated, Order},
    memory::{Dice, Memory},
};

const NUM_ROWS: usize = 3;

#[test]
fn a_bias_is_added_to_every_row() {
    let Some(kernel) = Emulated::new(AddBias, Arch::SM_80) else { return };
    // Not of whole vectors, and of more than a block's threads take.
    for len in [13, 2061, 2056] {
        let mut dice = Dice::new(31);
        let (before, bias) = (dice.bf16s(NUM_ROWS * len, 2.0), dice.f32s(len, 2.0));
        let (mut x, mut to_add) = (Memory::new(&before), Memory::new(&bias));
        let params = AddBiasParams {
            x: x.address(),
            bias: to_add.address(),
            num_rows: NUM_ROWS as u32,
            len: len as u32,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, Order::Shuffled(1)) };
        for (i, (found, x)) in x.as_slice().iter().zip(&before).enumerate() {
            assert_eq!(*found, bf16::from_f32(x.to_f32() + bias[i % len]), "{len}: {i}");
        }
    }
}

#[test]
fn parts_are_added_in_their_order() {
    let Some(kernel) = Emulated::new(SumParts, Arch::SM_80) else { return };
    for (len, num_parts, has_bias) in [(8, 1, true), (2056, 6, true), (2056, 3, false)] {
        let mut dice = Dice::new(32);
        // Of sizes that differ so much that the order shows.
        let of_all: Vec<f32> = (0..num_parts * NUM_ROWS * len)
            .map(|_| dice.number() * 2_f32.powi(dice.below(30) as i32))
            .collect();
        let bias = dice.f32s(len, 2.0);
        let (mut parts, mut first) = (Memory::new(&of_all), Memory::new(&bias));
        let mut out = Memory::<bf16>::unwritten(NUM_ROWS * len);
        let params = SumPartsParams {
            parts: parts.address(),
            bias: if has_bias { first.address() } else { NULL },
            out: out.address(),
            num_rows: NUM_ROWS as u32,
            num_parts: num_parts as u32,
            len: len as u32,
            reserved: 0,
        };
        // SAFETY: memory is of the sizes that parameters say.
        unsafe { kernel.launch(&params, Order::Shuffled(1)) };
        for (i, found) in out.as_slice().iter().enumerate() {
            let bias = if has_bias { bias[i % len] } else { 0.0 };
            let sum = of_all.chunks(NUM_ROWS * len).fold(bias, |sum, part| sum + part[i]);
            assert_eq!(*found, bf16::from_f32(sum), "{len}: {i}");
        }
    }
}

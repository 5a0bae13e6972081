//! `decode_attention.cu` where it leaves its output as codes besides.

use half::bf16;
use inflight_kernels::{
    Gpu, KvNumbers, KvShape,
    ops::{
        decode_attention::{DecodeAttention, Softmax},
        fp8_split::SplitRows,
    },
};

use crate::{
    attention::{Layer, Row, Step},
    codes::{Codes, split},
    decode::{GPU, NO_WINDOW, run, tolerance},
    emulator::{Emulated, ORDERS, Order},
    memory::Memory,
};

/// Rows whole, in pieces, of padding, and of another kernel; as one of them has large scores.
fn step(numbers: KvNumbers, heads: [u32; 2]) -> Step {
    let cache = KvShape { numbers, head_dim: 128, block_size: 16 };
    let [num_heads, num_kv_heads] = heads;
    let layer = Layer { cache, num_heads, num_kv_heads, window: NO_WINDOW };
    let rows = [1, 400, 0, 63, 65].map(|context| Row { context, queries: 1 });
    let mut step = Step::new(layer, &[&rows[..], &[Row { context: 9, queries: 3 }]].concat(), 61);
    step.amplify(0, 200.0);
    step.amplify(1, 40.0);
    step
}

fn check(numbers: KvNumbers, softmax: Softmax, heads: [u32; 2]) {
    let gpu = Gpu { num_sms: 3, ..GPU };
    let cache = step(numbers, heads).layer.cache;
    let kernel = DecodeAttention::new(&gpu, cache, softmax).unwrap().leaving_codes().unwrap();
    let Some(kernel) = Emulated::new(kernel, gpu.arch) else { return };
    for order in ORDERS {
        let mut step = step(numbers, heads);
        let len = (step.layer.num_heads * cache.head_dim) as usize;
        let mut codes = Codes::new(step.num_tokens() as usize, len);
        let recomputed = run(&mut step, &kernel, codes.address(), order).unwrap();
        assert_eq!(recomputed > 0, softmax == Softmax::Unified);
        step.check(|row| row.queries == 1, tolerance(numbers, softmax));
        check_codes(&mut step, &codes, len);
    }
    // They need not be asked for.
    let mut step = step(numbers, heads);
    run(&mut step, &kernel, SplitRows::default(), Order::Shuffled(1)).unwrap();
    step.check(|row| row.queries == 1, tolerance(numbers, softmax));
}

/// Codes are those of the output, as the kernel makes them that does nothing else.
fn check_codes(step: &mut Step, codes: &Codes, len: usize) {
    let out = step.out.as_slice().to_vec();
    let expected = split(&mut Memory::<bf16>::new(&out), len).unwrap();
    for (row, token) in step.rows.iter().zip(step.row_starts.as_slice()) {
        let token = *token as usize;
        if row.queries > 1 {
            assert!(codes.codes(token).concat().iter().all(|code| *code == u8::MAX));
            assert!(codes.scales(token).iter().all(|scale| scale.is_nan()), "another's rows");
        } else if row.context == 0 {
            // Any scale will do that is a number.
            assert!(codes.codes(token).concat().iter().all(|code| *code == 0));
            assert!(codes.scales(token).iter().all(|scale| scale.is_finite()));
        } else {
            codes.check_row(token, &out[token * len..][..len]);
            assert_eq!(codes.codes(token), expected.codes(token));
            assert_eq!(codes.scales(token), expected.scales(token));
        }
    }
}

#[test]
fn codes_are_those_of_the_output() {
    check(KvNumbers::Bf16, Softmax::Unified, [10, 1]);
    check(KvNumbers::Fp8, Softmax::Online, [4, 2]);
}

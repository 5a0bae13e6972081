//! The emulator itself: its conversions and what it finds wrong with kernels.

use half::{bf16, f16};
use inflight_kernels::{Arch, Budget, DevicePtr, Kernel, KernelSpec, Launch, Source};

use crate::{
    emulator::{Emulated, Order},
    kv::e4m3,
    memory::{Dice, Memory},
};

/// A kernel of one block of a warp or more, with 256 bytes of shared memory.
#[derive(Clone, Copy)]
struct Small {
    text: &'static str,
    threads: u32,
}

#[derive(Clone, Copy)]
#[repr(C)]
struct SmallParams {
    from: DevicePtr,
    to: DevicePtr,
}

impl Kernel for Small {
    type Params = SmallParams;

    fn spec(&self) -> KernelSpec {
        KernelSpec {
            source: Source { file: "small.cu", text: self.text },
            entry: "small",
            defines: vec![("HEAD_DIM", 64), ("BLOCK_SIZE", 16), ("KV", 1)],
            dynamic_smem: 256,
            params_bytes: size_of::<SmallParams>(),
            budget: Budget { registers: 255, static_smem: 0 },
        }
    }

    fn launch(&self, _: &SmallParams) -> Launch {
        Launch { grid: [1; 3], block: [self.threads, 1, 1] }
    }
}

/// `body` as a kernel, with `from` and `to` of u32.
macro_rules! kernel {
    ($body:expr) => {
        concat!(
            "#include \"hopper.cuh\"\n#include \"kv_cache.cuh\"\n",
            "struct Params { const u32* from; u32* to; };\nKERNEL void small(const Params p) {\n",
            "extern __shared__ __align__(16) u8 memory[];\n",
            "u32 shared = shared_address(memory), i = threadIdx.x;\n",
            $body,
            "}\n"
        )
    };
}

/// What `to`, of as many words, is afterwards; `None` where there is no C++ compiler.
fn run(text: &'static str, threads: u32, from: &[u32]) -> Option<Result<Vec<u32>, String>> {
    let kernel = Emulated::new(Small { text, threads }, Arch::SM_90A)?;
    let (mut from, mut to) = (Memory::new(from), Memory::unwritten(from.len()));
    let params = SmallParams { from: from.address(), to: to.address() };
    // SAFETY: kernels here read and write a word a thread, of as many.
    let result = unsafe { kernel.try_launch(&params, Order::InTurn) };
    Some(result.map(|()| to.as_slice().to_vec()))
}

#[test]
fn conversions_are_those_of_other_implementations() {
    // Close to each other, so that many are halfway between two; and of all sizes.
    let mut dice = Dice::new(1);
    let mut floats: Vec<f32> = (0..512).map(|i| 1.0 + i as f32 / 4096.0).collect();
    floats.extend((0..512).map(|_| f32::from_bits(dice.next() as u32)));
    floats.extend([0.0, -0.0, 65519.9, 65520.0, 3.3e38, 3.4e38, 1e-8, f32::INFINITY, f32::NAN]);
    floats.resize(1024, 2_f32.powi(-24) * 1.5);
    let words: Vec<u32> = floats.iter().map(|x| x.to_bits()).collect();
    let text = kernel!("float x = __uint_as_float(p.from[i]); p.to[i] = pack_bf16(x, x);");
    let Some(found) = run(text, 1024, &words) else { return };
    for (x, found) in floats.iter().zip(found.unwrap()) {
        let expected = u32::from(bf16::from_f32(*x).to_bits()) * 0x1_0001;
        assert!(x.is_nan() || found == expected, "{x}: {found:x}, not {expected:x}");
    }
    let text = kernel!("float x = __uint_as_float(p.from[i]); p.to[i] = pack_f16(x, 0.0f);");
    for (x, found) in floats.iter().zip(run(text, 1024, &words).unwrap().unwrap()) {
        let expected = u32::from(f16::from_f32(*x).to_bits());
        assert!(x.is_nan() || found == expected, "{x}: {found:x}, not {expected:x}");
    }
    // Codes of e4m3 as f16, and back.
    let codes: Vec<u32> = (0..256).collect();
    let text = kernel!(
        "u32 first, second; widen_to_f16(p.from[i], first, second);
         float x = unpack_f16(first).x;
         p.to[i] = __float_as_uint(x) >> 16 << 16 | narrow_pair(x, x * 2.0f);"
    );
    for (code, found) in codes.iter().zip(run(text, 256, &codes).unwrap().unwrap()) {
        let x = e4m3(*code as u8);
        let nearest_to_double = (0..=255_u8).filter(|c| e4m3(*c) == (2.0 * x).clamp(-448.0, 448.0));
        if x.is_nan() || x == 0.0 {
            continue;
        }
        assert_eq!(f64::from(f32::from_bits(found >> 16 << 16)), x);
        assert_eq!(found & 0xff, *code);
        assert_eq!([(found >> 8 & 0xff) as u8][..], nearest_to_double.collect::<Vec<_>>(), "{x}");
    }
}

#[test]
fn lanes_have_the_parts_of_matrices_that_the_manual_says() {
    // Row r of a matrix is 8 r to 8 r + 7: lane i gets elements 2 i and 2 i + 1, transposed column
    // i / 4 of rows 2 (i % 4) and the next.
    let text = kernel!(
        "reinterpret_cast<u32*>(memory)[i] = p.from[i];
         __syncwarp();
         u32 m[4], t[4], address = shared + i % 8 * 16;
         load_matrices(address, m); load_matrices_transposed(address, t);
         p.to[i] = m[2] == p.from[i] && transpose_matrix(m[0]) == t[3] ? t[1] : 0;"
    );
    let pairs: Vec<u32> = (0..32).map(|i| (2 * i) | (2 * i + 1) << 16).collect();
    let Some(found) = run(text, 32, &pairs) else { return };
    let transposed = |i: u32| (16 * (i % 4) + i / 4) | (16 * (i % 4) + 8 + i / 4) << 16;
    assert_eq!(found.unwrap(), (0..32).map(transposed).collect::<Vec<_>>());
}

#[test]
fn what_is_wrong_is_found() {
    let check = |text, threads, expected: &str| {
        let Some(result) = run(text, threads, &[0; 64]) else { return };
        let error = result.expect_err(expected);
        assert!(error.contains(expected), "{error}\n  lacks: {expected}");
    };
    check(
        kernel!("if (i < 31) p.to[i] = __shfl_xor_sync(ALL_LANES, i, 1);"),
        32,
        "waits for ever: thread 0 and what follows at __shfl_xor_sync; thread 31 and what follows \
         at its end",
    );
    check(
        kernel!("if (i < 32) __syncthreads(); else __syncthreads_or(1);"),
        64,
        "thread 32: is at __syncthreads_or, where others are at __syncthreads",
    );
    check(kernel!("p.to[i] = load_shared_word(shared + 4 * i + 4);"), 64, "4 bytes at 256 of 256");
    check(kernel!("memory[4 * i + 4] = 0;"), 64, "wrote 0 bytes behind its shared memory");
    check(kernel!("copy16_or_zero(shared + 8, p.from, true);"), 32, "16 bytes of shared memory at");
    check(kernel!("copy16_or_zero(shared, p.from + 1, true);"), 32, "a copy of 16 bytes from 0x");
    check(kernel!("p.to[i] = *reinterpret_cast<u32*>(4096);"), 32, "reads or writes at 0x1000");
    check(kernel!("p.to[i] = __any_sync(1u, 1);"), 32, "__any_sync of some lanes only");
    check(kernel!("barrier_wait(shared, 0);"), 32, "is no barrier: nobody made one there");
    check(
        kernel!(
            "if (i == 0) barrier_init(shared, 2);
                 __syncthreads(); if (i < 2) barrier_arrive(shared);
                 __syncthreads(); barrier_wait(shared, i / 32);"
        ),
        64,
        "thread 0 and what follows at its end; thread 32 and what follows at mbarrier 49152, \
         parity 1",
    );
    check(
        kernel!(
            "if (i > 0) return; barrier_init(shared, 1); barrier_arrive_and_expect(shared, 32);
                 copy_bytes(shared + 16, p.from, 16, shared); barrier_wait(shared, 0);"
        ),
        32,
        "waits for ever: thread 0 and what follows at mbarrier 49152, parity 0",
    );
    check(
        kernel!(
            "if (i > 0) return; barrier_init(shared, 1);
                 copy_bytes(shared + 16, p.from, 16, shared);"
        ),
        32,
        "ends before a copy that it asked for has arrived",
    );
    check(
        kernel!("float d[1][4]; Product<8>::both(d, rows_descriptor(shared), 0, 0);"),
        128,
        "wgmma.mma_async without wgmma.fence",
    );
    check(kernel!("meet(1, 64);"), 32, "waits for ever: thread 0 and what follows at bar.sync 1");
}

#[test]
fn copies_arrive_when_they_are_waited_for() {
    let text = kernel!(
        "copy4_or_zero(shared + 4 * i, p.from + i, true); copies_commit();
         copy4_or_zero(shared + 128, p.from, false); copies_commit();
         copies_wait<1>();
         p.to[i] = load_shared_word(shared + 4 * i);
         p.to[32 + i] = load_shared_word(shared + 128);"
    );
    let from: Vec<u32> = (0..64).collect();
    let Some(found) = run(text, 32, &from) else { return };
    assert_eq!(found.unwrap(), [&from[..32], &[u32::MAX; 32]].concat());
}

#[test]
fn bytes_of_the_copy_engine_arrive_when_a_barrier_says_so() {
    let text = kernel!(
        "if (i == 0) { barrier_init(shared, 1); barriers_are_ready(); }
         __syncthreads();
         for (u32 phase = 0; phase < 2; phase++) {
             if (i == 0) {
                 barrier_arrive_and_expect(shared, 128);
                 copy_bytes(shared + 64, p.from + 32 * phase, 64, shared);
                 copy_bytes(shared + 128, p.from + 32 * phase + 16, 64, shared);
             }
             if (i == 0 && load_shared_word(shared + 64) != NONE) return;
             barrier_wait(shared, phase);
             p.to[32 * phase + i] = load_shared_word(shared + 64 + 4 * i);
             __syncthreads();
         }"
    );
    let from: Vec<u32> = (0..64).collect();
    let Some(found) = run(text, 32, &from) else { return };
    assert_eq!(found.unwrap(), from);
}

#[test]
fn barriers_hold_the_whole_block() {
    let text = kernel!(
        "__shared__ u32 words[64], all;
         words[i] = i; if (i == 0) all = 0;
         __syncthreads();
         p.to[i] = words[63 - i]; atomicAdd(&all, 1u);
         if (__syncthreads_or(i == 40) && all == 64) p.to[i] += 100;"
    );
    let Some(found) = run(text, 64, &[0; 64]) else { return };
    assert_eq!(found.unwrap(), (0..64).map(|i| 163 - i).collect::<Vec<_>>());
}

/// Functions of the same name have variables at other places where other variables come first.
#[test]
fn programs_share_no_places_of_shared_variables() {
    macro_rules! with_words {
        ($num:literal) => {
            kernel!(concat!(
                "__shared__ u32 words[",
                $num,
                "]; u32 total;
                 for (u32 at = i; at < ",
                $num,
                "; at += 64) words[at] = at;
                 p.to[i] = block_prefix_sum<2>(1, total);
                 for (u32 at = i; at < ",
                $num,
                "; at += 64) p.to[i] += 100 * (words[at] - at);"
            ))
        };
    }
    for text in [with_words!(64), with_words!(1024)] {
        let Some(found) = run(text, 64, &[0; 64]) else { return };
        assert_eq!(found.unwrap(), (0..64).collect::<Vec<_>>());
    }
}

#[test]
#[should_panic(expected = "ptx_made_up_b32")]
fn an_unknown_instruction_is_named() {
    let text = kernel!("asm(\"made.up.b32 %0, 1;\" : \"=r\"(p.to[i]));");
    // Where there is no compiler nothing can be found.
    run(text, 32, &[0; 32]).expect("ptx_made_up_b32: skipped").unwrap();
}

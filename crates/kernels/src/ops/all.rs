//! Every specialisation that is checked before it meets a GPU.

use super::{
    add_bias::AddBias,
    add_norm::AddNorm,
    cut_prompt::{ChooseKept, CopyKept, VotePrompt},
    decode_attention::{DecodeAttention, Softmax},
    embed::Embed,
    flat_gemm::{FlatGemm, FlatShape, Ring},
    fp8_expand::Fp8Expand,
    fp8_gemv::Fp8Gemv,
    fp8_quantize::Fp8Quantize,
    fp8_split::Fp8Split,
    gate_and_mul::GateAndMul,
    gated_gemm::{GatedGemm, GatedShape},
    gather_sampled::GatherSampled,
    gemv::Gemv,
    greatest_logits::GreatestLogits,
    hopper_gemm::{HopperGemm, HopperOp, HopperShape, HopperWeights},
    move_blocks::MoveBlocks,
    plan_attention::PlanAttention,
    prefill_attention::PrefillAttention,
    prefill_hopper::PrefillHopper,
    prefix_attention::PrefixAttention,
    random_normal::RandomNormal,
    rms_norm::RmsNorm,
    rope_and_cache::{RopeAndCache, Rotation},
    sample::Sample,
    sum_parts::SumParts,
    track_tokens::TrackTokens,
    turn_blocks::TurnBlocks,
    unpack::Unpack,
};
use crate::{Arch, Element, Gpu, Kernel, KernelError, KernelSpec, KvNumbers, KvShape};

/// Head sizes and block sizes that are checked.
pub const HEAD_DIMS: [u32; 4] = [64, 96, 128, 256];
/// Block sizes that are checked.
pub const BLOCK_SIZES: [u32; 3] = [16, 32, 64];

/// The specialisations for a GPU: all element types, the usual heads and blocks.
///
/// # Errors
/// If one does not fit the GPU at all.
pub fn specs(gpu: &Gpu) -> Result<Vec<KernelSpec>, KernelError> {
    let both = [Element::F32, Element::Bf16];
    let mut specs = vec![
        Unpack.spec(),
        TrackTokens.spec(),
        AddBias.spec(),
        AddNorm { split: false }.spec(),
        SumParts.spec(),
        GateAndMul { gelu: false }.spec(),
        GateAndMul { gelu: true }.spec(),
        RmsNorm::of_branch().spec(),
        PlanAttention.spec(),
        GreatestLogits.spec(),
        Sample { unusual: false }.spec(),
        Sample { unusual: true }.spec(),
        MoveBlocks.spec(),
        ChooseKept.spec(),
    ];
    for first in both {
        specs.push(GatherSampled { element: first }.spec());
        specs.push(RandomNormal { out: first }.spec());
        specs.push(Fp8Quantize { x: first }.spec());
        for out in both {
            specs.push(Embed { table: first, out }.spec());
            specs.push(RmsNorm { x: first, out, add: false }.spec());
        }
    }
    for (out, accumulate) in [(both[0], false), (both[0], true), (both[1], false), (both[1], true)]
    {
        for blocks in [false, true] {
            specs.push(Fp8Gemv { out, accumulate, blocks }.spec());
        }
        for num_rows in 1..=Gemv::MAX_ROWS {
            specs.push(Gemv::new(num_rows, out, accumulate)?.spec());
        }
        for (num_rows, rows) in
            [4096, 28672].into_iter().flat_map(|rows| [8, 16, 32].map(|n| (n, rows)))
        {
            let shape = FlatShape { num_rows, rows, out, accumulate };
            specs.push(FlatGemm::new(gpu, shape, Ring::Whole)?.spec());
            specs.push(FlatGemm::new(gpu, shape, Ring::Half)?.spec());
        }
    }
    for blocks in [false, true] {
        specs.push(Fp8Expand { blocks }.spec());
    }
    if gpu.arch == Arch::SM_90A {
        specs.extend([Fp8Split.spec(), AddNorm { split: true }.spec()]);
        specs.extend(hopper_gemms(gpu)?);
        // One of each size of tile.
        for (num_rows, len) in [(8192, 14336), (1024, 14336), (256, 14336), (128, 11008)] {
            for has_codes in [false, true] {
                let shape = GatedShape { num_rows, len, has_codes };
                specs.push(GatedGemm::new(gpu, shape)?.spec());
            }
        }
    }
    add_attention(gpu, &mut specs)?;
    Ok(specs)
}

/// What uses the KV cache.
fn add_attention(gpu: &Gpu, specs: &mut Vec<KernelSpec>) -> Result<(), KernelError> {
    for head_dim in HEAD_DIMS {
        for block_size in BLOCK_SIZES {
            for numbers in KvNumbers::ALL {
                // The usual sizes, and one for prefixes that are long.
                if block_size == if numbers.has_scales() { 16 } else { 32 } && head_dim != 128 {
                    continue;
                }
                let cache = KvShape { numbers, head_dim, block_size };
                for softmax in [Softmax::Online, Softmax::Unified] {
                    let decode = DecodeAttention::new(gpu, cache, softmax)?;
                    specs.push(decode.spec());
                    if gpu.arch == Arch::SM_90A {
                        specs.extend(decode.leaving_codes().map(|decode| decode.spec()));
                    }
                }
                let decode = DecodeAttention::new(gpu, cache, Softmax::Online)?;
                specs.extend([
                    decode.behind_prefixes().spec(),
                    PrefixAttention::new(gpu, cache)?.spec(),
                ]);
                let prefill = PrefillAttention::new(gpu, cache)?;
                specs.extend([prefill.spec(), prefill.with_small_tiles().spec()]);
                specs.extend(PrefillHopper::new(gpu, cache, 1).map(|k| k.spec()));
            }
        }
        for numbers in KvNumbers::ALL {
            let cache = KvShape { numbers, head_dim, block_size: 16 };
            for (interleaved, qk_norm) in
                [(false, false), (true, false), (false, true), (true, true)]
            {
                let rotation = Rotation { dim: head_dim, interleaved, qk_norm };
                specs.push(RopeAndCache::new(cache, rotation)?.spec());
            }
            for votes in [false, true] {
                specs.push(VotePrompt::new(cache, votes)?.spec());
            }
            specs.push(CopyKept { cache }.spec());
            for interleaved in [false, true] {
                specs.push(TurnBlocks { cache, interleaved }.spec());
            }
        }
    }
    Ok(())
}

/// Products of few rows, of the tilings that models of 8B have.
fn hopper_gemms(gpu: &Gpu) -> Result<Vec<KernelSpec>, KernelError> {
    let mut specs = Vec::new();
    for (rows, op) in [
        (4096, HopperOp::Parts),
        (5120, HopperOp::Parts),
        (6144, HopperOp::Parts),
        (28672, HopperOp::Silu),
        (24576, HopperOp::Silu),
        (128_256, HopperOp::Sums),
    ] {
        for weights in [HopperWeights::Bf16, HopperWeights::Fp8, HopperWeights::Fp8Blocks] {
            for num_rows in [8, 16, 32, 64] {
                let shape = HopperShape { num_rows, rows, cols: 4096, weights };
                let rows_fit = num_rows <= 32 || weights != HopperWeights::Fp8Blocks;
                if rows_fit && (op != HopperOp::Sums || weights != HopperWeights::Bf16) {
                    specs.push(HopperGemm::new(gpu, shape, op)?.spec());
                }
            }
        }
    }
    Ok(specs)
}

//! The operators: for each its specialisations, its parameters and its launch.
//!
//! In a step's order: [`unpack`], [`track_tokens`], [`embed`], [`rms_norm`], [`add_bias`],
//! [`rope_and_cache`], [`plan_attention`] (once a step), [`decode_attention`] (rows of one new
//! token), [`prefill_attention`] (rows of several; [`prefill_hopper`] where it can),
//! [`gate_and_mul`], [`gather_sampled`], [`greatest_logits`] and [`sample`]. [`gemv`] and
//! [`flat_gemm`] are matrix products of very few and of few rows; [`hopper_gemm`] leaves what comes
//! next to be done by [`add_norm`] or [`sum_parts`], or does it itself, as [`gated_gemm`] does for
//! many rows; [`fp8_gemv`] has weights in fp8, [`fp8_split`] makes activations codes that lose
//! nothing, [`fp8_quantize`] rounds to fp8, [`fp8_expand`] undoes that.
//! [`random_normal`] fills dummy weights; [`move_blocks`] copies blocks of the KV cache,
//! [`turn_blocks`] with keys of other positions; [`cut_prompt`] copies of a prompt what its end
//! attends to.
//!
//! All numbers in parameters are of the padded shape of a step. Rows and tokens past the real ones
//! are neutral (see [`unpack`]): they cost their share and change nothing.

pub mod add_bias;
pub mod add_norm;
pub mod all;
pub mod cut_prompt;
pub mod decode_attention;
pub mod embed;
pub mod flat_gemm;
pub mod fp8_expand;
pub mod fp8_gemv;
pub mod fp8_quantize;
pub mod fp8_split;
pub mod gate_and_mul;
pub mod gated_gemm;
pub mod gather_sampled;
pub mod gemv;
pub mod greatest_logits;
pub mod hopper_gemm;
pub mod move_blocks;
pub mod plan_attention;
pub mod prefill_attention;
pub mod prefill_hopper;
pub mod prefix_attention;
pub mod random_normal;
pub mod rms_norm;
pub mod rope_and_cache;
pub mod sample;
pub mod sum_parts;
pub mod track_tokens;
pub mod turn_blocks;
pub mod unpack;

//! Logits of whole models on the GPU, against the CPU in f32, against double precision and against
//! transformers on the same GPU:
//!
//! ```text
//! cuda_logits CACHE_FOLDER [FAMILY..]                  # random models of each family, or these
//! cuda_logits CACHE_FOLDER exact MODEL.gguf EXACT.json  # tests/default_model/exact.json
//! cuda_logits CACHE_FOLDER fixtures FOLDER GPU.json     # by transformers_logits.py
//! ```

use std::{
    collections::BTreeMap,
    error::Error,
    path::{Path, PathBuf},
    process::ExitCode,
};

use inflight_backend::{
    CpuBackend, CpuConfig, CudaBackend, CudaConfig, KvDtype, WeightPrecision,
    cuda::{Numerics, usual_library_folders},
    philox,
};
use inflight_model::{
    Decoder, DummyWeights, ModelConfig, ModelFiles, Weights,
    eval::{all_logits, logits_from},
};
use serde::Deserialize;

type Failure = Box<dyn Error>;

/// Most that logits may be off: `|out - expected| / |expected|`. Weights and activations are bf16.
const TOLERANCE: f64 = 2e-2;
/// Most that a logprob of the default model may be off; other engines differ by 0.28.
const LOGPROB_TOLERANCE: f64 = 0.3;

/// Families, and what sets them apart.
const FAMILIES: [(&str, &str); 6] = [
    ("llama", r#""architectures":["LlamaForCausalLM"],"model_type":"llama""#),
    ("qwen2", r#""architectures":["Qwen2ForCausalLM"],"model_type":"qwen2""#),
    ("qwen3", r#""architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","head_dim":128"#),
    (
        "mistral",
        r#""architectures":["MistralForCausalLM"],"model_type":"mistral","sliding_window":50"#,
    ),
    (
        "mixed",
        r#""architectures":["Qwen3ForCausalLM"],"model_type":"qwen3","head_dim":128,
            "use_sliding_window":true,"sliding_window":50,"layer_types":["sliding_attention",
            "full_attention","sliding_attention","full_attention"]"#,
    ),
    (
        "gemma3",
        r#""architectures":["Gemma3ForCausalLM"],"model_type":"gemma3_text","head_dim":256,
            "hidden_act":"gelu_pytorch_tanh","query_pre_attn_scalar":256,"sliding_window":50,
            "layer_types":["sliding_attention","sliding_attention","full_attention",
            "sliding_attention"]"#,
    ),
];
const SIZES: &str = r#""vocab_size":2000,"hidden_size":512,"num_hidden_layers":4,
    "num_attention_heads":8,"num_key_value_heads":2,"intermediate_size":1536,
    "rms_norm_eps":1e-5,"rope_theta":10000.0,"max_position_embeddings":4096,
    "tie_word_embeddings":false,"hidden_act":"silu""#;

fn main() -> Result<ExitCode, Failure> {
    let mut arguments = std::env::args().skip(1);
    let cuda = CudaBackend::new(CudaConfig {
        ordinal: 0,
        library_folders: usual_library_folders(|name| std::env::var_os(name)),
        cache: arguments.next().map(PathBuf::from),
        keeps_fastest: true,
        graphs: true,
        blocking_waits: true,
        numerics: Numerics::default(),
    })?;
    let arguments: Vec<String> = arguments.collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let passed = match arguments[..] {
        ["exact", model, exact] => {
            check_model(&cuda, model.as_ref(), &std::fs::read_to_string(exact)?)?
        }
        ["fixtures", folder, logits] => {
            check_fixtures(&cuda, folder.as_ref(), &std::fs::read_to_string(logits)?)?
        }
        ref names if names.iter().all(|name| is_family(name)) => {
            let mut passed = true;
            for (name, family) in FAMILIES {
                let is_asked = names.is_empty() || names.contains(&name);
                passed &= !is_asked || check_family(&cuda, name, family)?;
            }
            passed
        }
        _ => return Err("usage: see the example's first lines".into()),
    };
    Ok(if passed { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

fn is_family(name: &str) -> bool {
    FAMILIES.iter().any(|(known, _)| *known == name)
}

fn check_family(cuda: &CudaBackend, name: &str, family: &str) -> Result<bool, Failure> {
    let config = ModelConfig::from_json(name, &format!("{{{SIZES},{family}}}"))?;
    let weights = Weights::Dummy(DummyWeights { seed: 3 });
    let draw = |i| (philox::uniform(9, i) * config.vocab_size as f64) as u32;
    let tokens: Vec<u32> = (0..150).map(draw).collect();
    let cpu = CpuBackend::new(CpuConfig {
        kv_dtype: KvDtype::F32,
        weights: WeightPrecision::F32,
        ..CpuConfig::detect()
    })?;
    let expected = Decoder::load(&cpu, &config, &weights, 256, &mut |_| {})?;
    let expected = all_logits(&cpu, &expected, &tokens, 64)?;
    let decoder = Decoder::load(cuda, &config, &weights, 256, &mut |_| {})?;
    let mut passed = true;
    for chunk in [150, 7, 1] {
        let logits = all_logits(cuda, &decoder, &tokens, chunk)?;
        let error = relative_error(&logits, &expected);
        let rows = logits.chunks_exact(config.vocab_size);
        let rows = rows.zip(expected.chunks_exact(config.vocab_size));
        let same = rows.filter(|(a, b)| argmax(a) == argmax(b)).count();
        let ok = error <= TOLERANCE;
        println!("{name:8} chunks of {chunk:3}: error {error:.2e}, argmax {same}/150, ok {ok}");
        passed &= ok;
    }
    Ok(passed)
}

/// A text and what a forward pass in double precision says of it.
#[derive(Deserialize)]
struct Exact {
    name: String,
    tokens: Vec<u32>,
    first: usize,
    logprobs: Vec<f64>,
    top: Vec<usize>,
    margin: Vec<f64>,
}

fn check_model(cuda: &CudaBackend, path: &Path, exact: &str) -> Result<bool, Failure> {
    let files = ModelFiles::open(path)?;
    let decoder = Decoder::load(cuda, &files.config, &files.weights, 2048, &mut |_| {})?;
    let texts: Vec<Exact> = serde_json::from_str(exact)?;
    let mut passed = true;
    for Exact { name, tokens, first, logprobs, top, margin } in &texts {
        let (tokens, targets) = (&tokens[..tokens.len() - 1], &tokens[*first..]);
        let logits = logits_from(cuda, &decoder, tokens, first - 1, 256)?;
        let rows = logits.chunks_exact(files.config.vocab_size);
        let (mut worst, mut parted, mut wrong) = (0f64, 0, 0);
        for (i, row) in rows.enumerate() {
            worst = worst.max((logprob(row, targets[i]) - logprobs[i]).abs());
            if argmax(row) != top[i] {
                parted += 1;
                wrong += usize::from(margin[i] > LOGPROB_TOLERANCE);
            }
        }
        let ok = worst < LOGPROB_TOLERANCE && wrong == 0;
        let num = targets.len();
        println!("{name:20} logprobs off by {worst:.3}, {parted} of {num} tops differ, ok {ok}");
        passed &= ok;
    }
    Ok(passed)
}

/// What transformers gives for a sequence on this GPU.
#[derive(Deserialize)]
struct Sequence {
    input_ids: Vec<u32>,
    argmax: Vec<usize>,
    margin: Vec<f32>,
    last_logits: Vec<Vec<f32>>,
}

#[derive(Deserialize)]
struct Fixture {
    sequences: Vec<Sequence>,
}

fn check_fixtures(cuda: &CudaBackend, folder: &Path, logits: &str) -> Result<bool, Failure> {
    let theirs: BTreeMap<String, Fixture> = serde_json::from_str(logits)?;
    let mut passed = true;
    for (name, theirs) in &theirs {
        let exact = std::fs::read_to_string(folder.join(name).join("expected.json"))?;
        let exact: Fixture = serde_json::from_str(&exact)?;
        let files = ModelFiles::open(&folder.join(name))?;
        if !files.config.head_dim.is_multiple_of(16) {
            println!(
                "{name:14} skipped: the GPU has no kernel for heads of {}",
                files.config.head_dim
            );
            continue;
        }
        let decoder = Decoder::load(cuda, &files.config, &files.weights, 128, &mut |_| {})?;
        for (theirs, exact) in theirs.sequences.iter().zip(&exact.sequences) {
            let logits = all_logits(cuda, &decoder, &exact.input_ids, 64)?;
            passed &= check_sequence(name, &logits, theirs, exact);
        }
    }
    Ok(passed)
}

/// In bf16 we may be as far from f32 as transformers is, and half as much again.
fn check_sequence(name: &str, logits: &[f32], theirs: &Sequence, exact: &Sequence) -> bool {
    let vocab_size = logits.len() / exact.input_ids.len();
    let rows: Vec<&[f32]> = logits.chunks_exact(vocab_size).collect();
    let last_rows = rows[rows.len() - exact.last_logits.len()..].concat();
    let f32_logits = exact.last_logits.concat();
    let our_error = relative_error(&last_rows, &f32_logits);
    let their_error = relative_error(&theirs.last_logits.concat(), &f32_logits);
    let largest = f32_logits.iter().fold(0f32, |max, x| max.max(x.abs()));
    let wide = 2.0 * TOLERANCE as f32 * largest;
    let clear = (0..rows.len()).filter(|i| exact.margin[*i] > wide && theirs.margin[*i] > wide);
    let wrong = clear.filter(|i| argmax(rows[*i]) != theirs.argmax[*i]).count();
    let ok = our_error <= TOLERANCE.max(1.5 * their_error) && wrong == 0;
    let num = rows.len();
    println!(
        "{name:14} {num:3} tokens: off f32 by {our_error:.2e}, transformers in bf16 by \
         {their_error:.2e}; {wrong} clear tops differ, ok {ok}"
    );
    ok
}

fn relative_error(out: &[f32], expected: &[f32]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let difference: f64 = out.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|value| square(*value)).sum::<f64>()).sqrt()
}

fn argmax(row: &[f32]) -> usize {
    (0..row.len()).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap_or(0)
}

fn logprob(row: &[f32], id: u32) -> f64 {
    let max = f64::from(row[argmax(row)]);
    let sum: f64 = row.iter().map(|logit| (f64::from(*logit) - max).exp()).sum();
    f64::from(row[id as usize]) - max - sum.ln()
}

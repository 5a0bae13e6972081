//! Small random models of every family: logits must be those of transformers.
//!
//! The folders and the format of `expected.json` are described in `fixtures/README.md`.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::path::{Path, PathBuf};

use inflight_backend::{Backend, CpuBackend, CpuConfig, KvDtype, WeightPrecision};
use inflight_model::{
    Decoder, Fp8Weights, ModelFiles,
    eval::{all_logits, logits_from},
};
use serde::Deserialize;
use serde_json::{Value, json};
use support::{TempFolder, gemma3_gguf::gemma3_gguf, plain_backend::PlainBackend};

/// Of the largest |logit|: what the order of f32 sums can change, many times over.
const TOLERANCE: f32 = 1e-3;

#[derive(Deserialize)]
struct Expected {
    sequences: Vec<Sequence>,
}

#[derive(Deserialize)]
struct Sequence {
    input_ids: Vec<u32>,
    argmax: Vec<u32>,
    margin: Vec<f32>,
    last_logits: Vec<Vec<f32>>,
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

/// Checks the model at `path`, whose `expected.json` lies in `folder`.
fn check(backend: &impl Backend, folder: &str, path: &Path) {
    let expected = std::fs::read(fixture(folder).join("expected.json")).unwrap();
    let expected: Expected = serde_json::from_slice(&expected).unwrap();
    let ModelFiles { config, weights, .. } = ModelFiles::open(path).unwrap();
    let decoder = Decoder::load(backend, &config, &weights, 128, &mut |_| {}).unwrap();
    for sequence in &expected.sequences {
        for chunk in [sequence.input_ids.len(), 16, 7] {
            let logits = all_logits(backend, &decoder, &sequence.input_ids, chunk).unwrap();
            let what = format!("{}, {} tokens, chunk {chunk}", path.display(), logits.len());
            check_logits(&what, &logits, sequence, config.vocab_size);
        }
    }
}

fn check_logits(what: &str, logits: &[f32], expected: &Sequence, vocab_size: usize) {
    let rows: Vec<&[f32]> = logits.chunks_exact(vocab_size).collect();
    assert_eq!(rows.len(), expected.input_ids.len(), "{what}");
    let largest = expected.last_logits.iter().flatten().fold(0f32, |max, x| max.max(x.abs()));
    let last_rows = &rows[rows.len() - expected.last_logits.len()..];
    for (row, expected) in last_rows.iter().zip(&expected.last_logits) {
        for (id, (logit, expected)) in row.iter().zip(expected).enumerate() {
            let difference = (logit - expected).abs();
            assert!(
                difference <= TOLERANCE * largest,
                "{what}: logit {id} is {logit} instead of {expected}"
            );
        }
    }
    for (position, row) in rows.iter().enumerate() {
        if expected.margin[position] > TOLERANCE * largest {
            let best = (0..vocab_size).max_by(|a, b| row[*a].total_cmp(&row[*b])).unwrap();
            assert_eq!(best as u32, expected.argmax[position], "{what}: position {position}");
        }
    }
}

/// All in f32, so that only the order of sums is left to differ.
fn cpu() -> CpuBackend {
    let config =
        CpuConfig { weights: WeightPrecision::F32, kv_dtype: KvDtype::F32, ..CpuConfig::detect() };
    CpuBackend::new(config).unwrap()
}

/// Tests of one model on each backend.
macro_rules! families {
    ($($name:ident: $folder:literal, $path:literal;)*) => {$(
        mod $name {
            #[test]
            fn by_plain_loops() {
                super::check(&super::PlainBackend, $folder, &super::fixture($path));
            }

            #[test]
            fn by_the_cpu_backend() {
                super::check(&super::cpu(), $folder, &super::fixture($path));
            }
        }
    )*};
}

families! {
    llama3: "llama3", "llama3";
    llama3_gguf: "llama3", "llama3/model.gguf";
    llama_tied: "llama_tied", "llama_tied";
    llama_linear: "llama_linear", "llama_linear";
    llama_yarn: "llama_yarn", "llama_yarn";
    mistral: "mistral", "mistral";
    qwen2: "qwen2", "qwen2";
    qwen3: "qwen3", "qwen3";
    qwen3_gguf: "qwen3", "qwen3/model.gguf";
    gemma3: "gemma3", "gemma3";
    qwen2_mixed: "qwen2_mixed", "qwen2_mixed";
    qwen3_mixed: "qwen3_mixed", "qwen3_mixed";
    fp8_channel: "fp8_channel", "fp8_channel";
    fp8_tensor: "fp8_tensor", "fp8_tensor";
    fp8_block: "fp8_block", "fp8_block";
}

/// The same weights in a file as llama.cpp's converter writes it. llama.cpp itself was asked once:
/// its logits for this file are within the tolerance, too.
#[test]
fn gemma3_in_a_gguf_file() {
    let folder = TempFolder::new();
    let path = folder.write("gemma3.gguf", gemma3_gguf(&fixture("gemma3")).build());
    check(&PlainBackend, "gemma3", &path);
    check(&cpu(), "gemma3", &path);
}

/// A folder of more than a language model, as Gemma 3's with a vision tower: the same logits.
#[test]
fn a_language_model_within_another_is_found() {
    let (backend, folder) = (cpu(), TempFolder::new());
    let config = std::fs::read_to_string(fixture("gemma3").join("config.json")).unwrap();
    let text: Value = serde_json::from_str(&config).unwrap();
    let config = json!({
        "architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3",
        "text_config": text, "vision_config": {}
    });
    folder.write("config.json", config.to_string().into_bytes());
    let expected = logits_of_fixture(&backend, &fixture("gemma3"));
    for prefix in ["language_model.model.", "model.language_model."] {
        let bytes = std::fs::read(fixture("gemma3").join("model.safetensors")).unwrap();
        let (len, rest) = bytes.split_at(8);
        let (header, data) = rest.split_at(u64::from_le_bytes(len.try_into().unwrap()) as usize);
        let header =
            std::str::from_utf8(header).unwrap().replace("\"model.", &format!("\"{prefix}"));
        let len = (header.len() as u64).to_le_bytes();
        folder.write("model.safetensors", [&len[..], header.as_bytes(), data].concat());
        assert_eq!(logits_of_fixture(&backend, folder.path()), expected);
    }
}

fn logits_of_fixture(backend: &CpuBackend, path: &Path) -> Vec<f32> {
    let ModelFiles { config, weights, .. } = ModelFiles::open(path).unwrap();
    let decoder = Decoder::load(backend, &config, &weights, 128, &mut |_| {}).unwrap();
    all_logits(backend, &decoder, &[1, 2, 3, 4, 5], 16).unwrap()
}

/// What the CPU serves fp8 with: weights rounded to bf16 once more.
#[test]
fn fp8_as_bf16_stays_close() {
    let backend = CpuBackend::new(CpuConfig::detect()).unwrap();
    for name in ["fp8_channel", "fp8_block"] {
        let expected = std::fs::read(fixture(name).join("expected.json")).unwrap();
        let expected: Expected = serde_json::from_slice(&expected).unwrap();
        let files = ModelFiles::open(&fixture(name)).unwrap();
        let decoder = Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {});
        let sequence = expected.sequences.last().unwrap();
        let logits = all_logits(&backend, &decoder.unwrap(), &sequence.input_ids, 64).unwrap();
        let exact = sequence.last_logits.concat();
        let error = relative_error(&logits[logits.len() - exact.len()..], &exact);
        assert!(error < 0.02, "{name}: {error}");
    }
}

#[test]
fn rounding_to_fp8_when_loaded_changes_logits_a_little_and_the_output_matrix_not() {
    let mut files = ModelFiles::open(&fixture("llama3")).unwrap();
    let (backend, tokens) = (cpu(), (0..40).map(|i| i * 37 % 256).collect::<Vec<u32>>());
    let logits = |files: &ModelFiles| {
        let decoder = Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {});
        all_logits(&backend, &decoder.unwrap(), &tokens, 64).unwrap()
    };
    let exact = logits(&files);
    files.round_to_fp8(false);
    assert_eq!(files.config.fp8_weights, Some(Fp8Weights::AtLoad));
    let error = relative_error(&logits(&files), &exact);
    // A weight is off by 0.026 of itself in the mean square, and so is each product with them;
    // there are a dozen one after the other, and random scores make softmax amplify it.
    assert!((0.01..0.2).contains(&error), "{error}");

    let mut stored = ModelFiles::open(&fixture("fp8_tensor")).unwrap();
    stored.round_to_fp8(false);
    assert_eq!(stored.config.fp8_weights, Some(Fp8Weights::Stored));
    let dummy = ModelFiles::dummy(&fixture("fp8_tensor"), 1).unwrap();
    assert_eq!(dummy.config.fp8_weights, Some(Fp8Weights::AtLoad));
}

/// Also where the layers' weights are stored so: then it is the output matrix alone.
#[test]
fn the_output_matrix_is_rounded_to_fp8_only_where_all_are() {
    let (backend, tokens) = (cpu(), (0..40).map(|i| i * 37 % 96).collect::<Vec<u32>>());
    for name in ["llama3", "fp8_tensor", "fp8_block"] {
        let logits = |all| {
            let mut files = ModelFiles::open(&fixture(name)).unwrap();
            files.round_to_fp8(all);
            let decoder = Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {});
            all_logits(&backend, &decoder.unwrap(), &tokens, 64).unwrap()
        };
        // One product more whose weights are off by 0.026 of themselves in the mean square.
        let error = relative_error(&logits(true), &logits(false));
        assert!((0.01..0.05).contains(&error), "{name}: {error}");
    }
}

fn relative_error(out: &[f32], expected: &[f32]) -> f64 {
    let square = |value: f32| f64::from(value) * f64::from(value);
    let difference: f64 = out.iter().zip(expected).map(|(a, b)| square(a - b)).sum();
    (difference / expected.iter().map(|value| square(*value)).sum::<f64>()).sqrt()
}

/// The CPU backend promises more than closeness: a row's arithmetic never depends on its batch.
/// From 41 on, steps sample no token, some, or all, so that their last layer works on as many.
#[test]
fn chunks_and_skipped_logits_change_no_bit_on_the_cpu_backend() {
    let backend = CpuBackend::new(CpuConfig::detect()).unwrap();
    for name in ["qwen3", "gemma3", "llama3"] {
        let files = ModelFiles::open(&fixture(name)).unwrap();
        let decoder = Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {});
        let decoder = decoder.unwrap();
        let vocab_size = files.config.vocab_size;
        let tokens: Vec<u32> = (0..50).map(|i| i * 37 % vocab_size as u32).collect();
        let whole = all_logits(&backend, &decoder, &tokens, 50).unwrap();
        for chunk in [1, 7, 16, 33] {
            let logits = all_logits(&backend, &decoder, &tokens, chunk).unwrap();
            assert!(logits == whole, "{name}, chunk {chunk}");
            let end = logits_from(&backend, &decoder, &tokens, 41, chunk).unwrap();
            assert!(end == whole[41 * vocab_size..], "{name}, chunk {chunk}, from 41");
        }
    }
}

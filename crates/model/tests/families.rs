//! Small random models of every family: logits must be those of transformers.
//!
//! The folders and the format of `expected.json` are described in `fixtures/README.md`.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::path::{Path, PathBuf};

use inflight_backend::{Backend, CpuBackend, CpuConfig, Dtype, WeightPrecision};
use inflight_model::{
    Decoder, ModelFiles,
    eval::{all_logits, logits_from},
};
use serde::Deserialize;
use support::plain_backend::PlainBackend;

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
        CpuConfig { weights: WeightPrecision::F32, kv_dtype: Dtype::F32, ..CpuConfig::detect() };
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
}

/// The CPU backend promises more than closeness: a row's arithmetic never depends on its batch.
#[test]
fn chunks_and_skipped_logits_change_no_bit_on_the_cpu_backend() {
    let files = ModelFiles::open(&fixture("qwen3")).unwrap();
    let backend = CpuBackend::new(CpuConfig::detect()).unwrap();
    let decoder = Decoder::load(&backend, &files.config, &files.weights, 64, &mut |_| {}).unwrap();
    let tokens: Vec<u32> = (0..50).map(|i| i * 37 % 256).collect();
    let whole = all_logits(&backend, &decoder, &tokens, 50).unwrap();
    for chunk in [1, 7, 16, 33] {
        assert!(all_logits(&backend, &decoder, &tokens, chunk).unwrap() == whole, "chunk {chunk}");
        let end = logits_from(&backend, &decoder, &tokens, 41, chunk).unwrap();
        assert!(end == whole[41 * files.config.vocab_size..], "chunk {chunk}, from 41");
    }
}

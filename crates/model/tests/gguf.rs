//! GGUF files: what is read from a good one, and what is said about bad ones.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod support;

use inflight_backend::Dtype;
use inflight_model::{GgufFile, GgufTokenizer, GgufValue, ModelConfig, ModelError};
use proptest::prelude::*;
use support::{GgufBytes, TempFolder, array, assert_holds, code, message, string};

fn open(bytes: &[u8]) -> Result<GgufFile, ModelError> {
    let folder = TempFolder::new();
    // On Unix the mapping outlives the file's name.
    GgufFile::open(&folder.write("m.gguf", bytes))
}

/// A llama of one layer, small enough to write out in full.
fn llama() -> GgufBytes {
    let tokens = ["<s>", "a", "b"].map(string);
    let ints = [3i32, 1, 1].map(|kind| kind.to_le_bytes().to_vec());
    let scores = [0f32, -1.0, -2.5].map(|score| score.to_le_bytes().to_vec());
    GgufBytes::new()
        .text("general.architecture", "llama")
        .u32("llama.block_count", 1)
        .u32("llama.context_length", 64)
        .u32("llama.embedding_length", 8)
        .u32("llama.feed_forward_length", 12)
        .u32("llama.attention.head_count", 2)
        .u32("llama.attention.head_count_kv", 1)
        .f32("llama.attention.layer_norm_rms_epsilon", 1e-5)
        .f32("llama.rope.freq_base", 500.0)
        .text("tokenizer.ggml.model", "llama")
        .meta("tokenizer.ggml.tokens", code::ARRAY, array(code::STRING, &tokens))
        .meta("tokenizer.ggml.token_type", code::ARRAY, array(code::I32, &ints))
        .meta("tokenizer.ggml.scores", code::ARRAY, array(code::F32, &scores))
        .u32("tokenizer.ggml.eos_token_id", 2)
        .meta("tokenizer.ggml.add_bos_token", code::BOOL, [1])
        .zeros("token_embd.weight", &[8, 3])
        .zeros("output_norm.weight", &[8])
}

#[test]
fn metadata_of_every_type() {
    let nested = array(code::ARRAY, &[array(code::U8, &[vec![1], vec![2]]), array(code::I8, &[])]);
    let bytes = GgufBytes::new()
        .meta("u8", code::U8, [200])
        .meta("i8", code::I8, [0xfe])
        .meta("u16", code::U16, 60_000u16.to_le_bytes())
        .meta("i16", code::I16, (-300i16).to_le_bytes())
        .meta("u32", code::U32, 4_000_000_000u32.to_le_bytes())
        .meta("i32", code::I32, (-70_000i32).to_le_bytes())
        .meta("u64", code::U64, u64::MAX.to_le_bytes())
        .meta("i64", code::I64, i64::MIN.to_le_bytes())
        .meta("f32", code::F32, 0.5f32.to_le_bytes())
        .meta("f64", code::F64, 0.1f64.to_le_bytes())
        .meta("bool", code::BOOL, [1])
        .meta("string", code::STRING, string("Größe"))
        .meta("nested", code::ARRAY, nested)
        .build();
    let file = open(&bytes).unwrap();
    let is = |key: &str, value: GgufValue| assert_eq!(file.metadata(key), Some(&value));
    is("u8", GgufValue::Unsigned(200));
    is("i8", GgufValue::Signed(-2));
    is("u16", GgufValue::Unsigned(60_000));
    is("i16", GgufValue::Signed(-300));
    is("u32", GgufValue::Unsigned(4_000_000_000));
    is("i32", GgufValue::Signed(-70_000));
    is("u64", GgufValue::Unsigned(u64::MAX));
    is("i64", GgufValue::Signed(i64::MIN));
    is("f32", GgufValue::Float(0.5));
    is("f64", GgufValue::Float(0.1));
    is("bool", GgufValue::Bool(true));
    is("string", GgufValue::String("Größe".into()));
    let bytes = GgufValue::Array(vec![GgufValue::Unsigned(1), GgufValue::Unsigned(2)]);
    is("nested", GgufValue::Array(vec![bytes, GgufValue::Array(vec![])]));
    assert_eq!(file.metadata("absent"), None);
}

#[test]
fn tensors_lie_where_the_table_says() {
    let mut bytes = GgufBytes::new().entry("w", &[2, 3], 0, 0).entry("q", &[32, 2], 8, 32);
    bytes.data = (1..=6).flat_map(|i| (i as f32).to_le_bytes()).collect();
    bytes.data.resize(32, 0);
    bytes.data.extend([&[0x00, 0x3c][..], &[1; 32], &[0x00, 0x40], &[0xff; 32]].concat());
    for version in [2, 3] {
        let file = open(&GgufBytes { version, ..bytes.clone() }.build()).unwrap();
        assert_eq!(file.names().collect::<Vec<_>>(), ["w", "q"]);
        let w = file.tensor("w").unwrap();
        // Innermost first in the file: three rows of two.
        assert_eq!((w.shape.as_slice(), w.dtype), (&[3, 2][..], Dtype::F32));
        assert_eq!(w.to_f32(), [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let q = file.tensor("q").unwrap();
        assert_eq!((q.shape.as_slice(), q.dtype), (&[2, 32][..], Dtype::Q8_0));
        assert_eq!(q.to_f32(), [[1.0; 32], [-2.0; 32]].concat());
        assert_holds(&message(file.tensor("x")), &["m.gguf", "tensor x is missing"]);
    }
}

#[test]
fn alignment_is_respected() {
    let mut bytes = GgufBytes::new().u32("general.alignment", 64).zeros("a", &[4]);
    bytes.alignment = 64;
    bytes = bytes.zeros("b", &[4]);
    *bytes.data.last_mut().unwrap() = 0x40;
    let file = open(&bytes.build()).unwrap();
    assert_eq!(file.tensor("b").unwrap().to_f32(), [0.0, 0.0, 0.0, 2.0]);
    let bytes = bytes.entry("c", &[4], 0, 96);
    assert_holds(&message(open(&bytes.build())), &["tensor c", "multiple of 64"]);
    for alignment in [0, 24, 1 << 30] {
        let bytes = GgufBytes::new().u32("general.alignment", alignment);
        assert_holds(&message(open(&bytes.build())), &["general.alignment", "power of two"]);
    }
}

#[test]
fn other_files_are_told_apart() {
    let file = GgufBytes::new;
    let check = |bytes: GgufBytes, expected: &str| {
        assert_holds(&message(open(&bytes.build())), &["m.gguf", expected]);
    };
    check(GgufBytes { magic: *b"ggjt", ..file() }, "no GGUF file: it starts with ggjt");
    check(GgufBytes { version: 1, ..file() }, "version 1 is not supported");
    check(GgufBytes { version: 4, ..file() }, "version 4 is not supported");
    check(GgufBytes { version: 3u32.swap_bytes(), ..file() }, "big-endian");
    assert_holds(&message(open(b"")), &["the file ends in the magic number"]);
    let missing = GgufFile::open(std::path::Path::new("/nowhere/m.gguf"));
    assert_holds(&message(missing), &["/nowhere/m.gguf", "No such file"]);
}

#[test]
fn hostile_headers_are_refused_by_name() {
    let file = GgufBytes::new;
    let check = |bytes: GgufBytes, expected: &[&str]| {
        assert_holds(&message(open(&bytes.build())), expected);
    };
    let huge = u64::MAX;
    let long = [&huge.to_le_bytes()[..], b"short"].concat();
    let deep = (0..9).fold(array(code::U8, &[]), |inner, _| array(code::ARRAY, &[inner]));
    let many = [&code::U8.to_le_bytes()[..], &(1u64 << 40).to_le_bytes()].concat();
    check(
        GgufBytes { num_tensors: Some(huge), ..file() },
        &["number of tensors", "cannot be true"],
    );
    check(GgufBytes { num_metadata: Some(1 << 60), ..file() }, &["metadata", "cannot be true"]);
    check(file().meta("k", code::STRING, &long), &["metadata k", "cannot be true"]);
    check(file().meta("k", code::STRING, [1, 0, 0, 0, 0, 0, 0, 0, 0xff]), &["k", "not UTF-8"]);
    check(file().meta("k", code::ARRAY, &deep), &["metadata k", "nested"]);
    check(file().meta("k", code::ARRAY, &many), &["metadata k", "cannot be true"]);
    check(file().meta("k", code::BOOL, [2]), &["metadata k", "2 is no bool"]);
    check(file().meta("k", 13, [0]), &["metadata k", "unknown value type 13"]);
    check(file().u32("k", 1).u32("k", 2), &["metadata k occurs twice"]);

    check(file().entry("t", &[], 0, 0), &["tensor t", "0 dimensions"]);
    check(file().entry("t", &[1; 5], 0, 0), &["tensor t", "5 dimensions"]);
    check(file().entry("t", &[0], 0, 0), &["tensor t", "extent is zero"]);
    check(file().entry("t", &[1 << 40, 1 << 40], 0, 0), &["tensor t", "too large"]);
    check(file().entry("t", &[huge], 0, 0), &["tensor t", "too large"]);
    check(file().entry("t", &[33], 8, 0), &["tensor t", "rows of 33", "Q8_0 blocks of 32"]);
    check(file().entry("t", &[256], 11, 0), &["tensor t", "Q3_K is not supported", "Q4_K"]);
    check(file().entry("t", &[256], 999, 0), &["tensor t", "unknown type 999"]);
    check(file().entry("t", &[8], 0, 0), &["tensor t", "truncated", "32 bytes"]);
    check(file().entry("t", &[8], 0, huge - 31), &["tensor t", "too large"]);
    check(file().entry("t", &[8], 0, 1 << 62), &["tensor t", "truncated"]);
    check(file().zeros("t", &[8]).entry("u", &[1], 0, 4), &["tensor u", "multiple of 32"]);
    let overlapping = file().zeros("t", &[16]).entry("u", &[8], 0, 32);
    check(overlapping, &["tensor u", "shares bytes with tensor t"]);
    check(file().zeros("t", &[8]).zeros("t", &[8]), &["tensor t", "occurs twice"]);
}

#[test]
fn a_llama_is_read_whole() {
    let file = open(&llama().build()).unwrap();
    let config = ModelConfig::from_gguf(&file).unwrap();
    assert_eq!((config.vocab_size, config.hidden_size, config.head_dim), (3, 8, 4));
    let tokenizer = file.tokenizer().unwrap();
    let expected = GgufTokenizer {
        model: "llama".into(),
        tokens: ["<s>", "a", "b"].map(String::from).into(),
        scores: vec![0.0, -1.0, -2.5],
        token_types: vec![3, 1, 1],
        eos_token_id: Some(2),
        add_bos_token: Some(true),
        ..GgufTokenizer::default()
    };
    assert_eq!(tokenizer, expected);
}

#[test]
fn a_tokenizer_of_wrong_types_is_refused_by_key() {
    let check = |bytes: GgufBytes, expected: &[&str]| {
        let file = open(&bytes.build()).unwrap();
        assert_holds(&message(file.tokenizer()), expected);
    };
    check(GgufBytes::new(), &["tokenizer.ggml.model", "is missing"]);
    let model = GgufBytes::new().text("tokenizer.ggml.model", "gpt2");
    check(model.clone(), &["tokenizer.ggml.tokens", "is missing"]);
    check(model.u32("tokenizer.ggml.tokens", 1), &["tokenizer.ggml.tokens", "wrong type"]);
}

#[test]
fn truncation_anywhere_is_noticed() {
    let bytes = llama().build();
    for len in 0..bytes.len() {
        let text = message(open(&bytes[..len]));
        assert_holds(&text, &["m.gguf"]);
    }
    let text = message(open(&bytes[..bytes.len() - 1]));
    assert_holds(&text, &["m.gguf", "tensor output_norm.weight", "truncated"]);
}

/// Reads everything that can be read. What matters is that it returns.
fn read_all(bytes: &[u8]) {
    let Ok(file) = open(bytes) else { return };
    let _ = ModelConfig::from_gguf(&file);
    let _ = file.tokenizer();
    for name in file.names() {
        let tensor = file.tensor(name).unwrap();
        // Values of a tensor take at most eight times its bytes, which are inside the file.
        assert!(tensor.to_f32().len() <= 8 * bytes.len());
    }
}

proptest! {
    #[test]
    fn damaged_files_never_panic(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        end in any::<prop::sample::Index>(),
        truncate in prop::bool::weighted(0.2),
    ) {
        let mut bytes = llama().build();
        for (place, byte) in changes {
            let place = place.index(bytes.len());
            bytes[place] = byte;
        }
        if truncate {
            bytes.truncate(end.index(bytes.len()));
        }
        read_all(&bytes);
    }

    #[test]
    fn huge_numbers_anywhere_never_panic(place in any::<prop::sample::Index>(), value: u64) {
        let mut bytes = llama().build();
        let place = place.index(bytes.len() - 8);
        bytes[place..place + 8].copy_from_slice(&value.to_le_bytes());
        read_all(&bytes);
    }
}

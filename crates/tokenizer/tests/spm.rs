//! The `llama` family against SentencePiece itself (`data/make_spm_refs.py`).

#![allow(clippy::unwrap_used, reason = "a test's helper may fail like the test")]

mod common;

use inflight_tokenizer::{GgufVocab, Special, Tokenizer};
use proptest::prelude::*;
use serde_json::Value;

fn vocab(name: &str) -> (GgufVocab, Value) {
    let refs = common::data("spm_refs.json");
    let model = refs["models"][name].clone();
    let list = |key: &str| model[key].clone();
    let vocab = GgufVocab {
        model: "llama".to_string(),
        tokens: serde_json::from_value(list("pieces")).unwrap(),
        scores: serde_json::from_value(list("scores")).unwrap(),
        token_types: serde_json::from_value(list("types")).unwrap(),
        bos: Some(1),
        eos: Some(2),
        unk: Some(0),
        add_space_prefix: model["add_space_prefix"].as_bool(),
        ..GgufVocab::default()
    };
    (vocab, model["encodings"].clone())
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_gguf(vocab(name).0).unwrap()
}

#[test]
fn ids_and_texts_equal_sentencepiece() {
    for name in ["llama", "gemma"] {
        let (vocab, encodings) = vocab(name);
        let tokenizer = Tokenizer::from_gguf(vocab).unwrap();
        let encodings = encodings.as_array().unwrap();
        assert!(encodings.len() > 250);
        for encoding in encodings {
            let text = encoding["text"].as_str().unwrap();
            // llama.cpp, and so we, put the space prefix after user-defined tokens too; only the
            // model without a prefix has any.
            let ids = tokenizer.encode(text, Special::AsText).unwrap();
            assert_eq!(ids, common::ids(&encoding["ids"]), "{name}: {text:?}");
            let decoded = encoding.get("decoded").and_then(Value::as_str).unwrap_or(text);
            assert_eq!(tokenizer.decode(&ids, true), decoded, "{name}: {text:?}");
        }
    }
}

#[test]
fn control_tokens_and_bos() {
    let tokenizer = tokenizer("llama");
    let plain = tokenizer.encode("the", Special::AsText).unwrap();
    let prompt = tokenizer.encode_prompt("the", Special::AsText).unwrap();
    assert_eq!(prompt, [&[1], plain.as_slice()].concat());
    assert_eq!(tokenizer.encode_prompt("<s>the", Special::Parse).unwrap(), prompt, "one BOS");
    assert_eq!(tokenizer.encode_prompt("", Special::AsText).unwrap(), [1]);
    assert!(!tokenizer.encode("<s></s><unk>", Special::AsText).unwrap().contains(&1));
    assert_eq!(tokenizer.decode(&prompt, true), "the");
    assert_eq!(tokenizer.decode(&prompt, false), "<s> the");
    assert_eq!(tokenizer.eos_ids(), [2]);
}

#[test]
fn a_long_text_takes_no_quadratic_time() {
    let tokenizer = tokenizer("llama");
    let text = "the token ".repeat(50_000);
    let ids = tokenizer.encode(&text, Special::AsText).unwrap();
    assert_eq!(tokenizer.decode(&ids, true), text);
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused() {
    let check = |break_it: fn(&mut GgufVocab), expected: &str| {
        let mut vocab = vocab("llama").0;
        break_it(&mut vocab);
        let message = Tokenizer::from_gguf(vocab).unwrap_err().to_string();
        assert!(message.contains(expected), "{message}");
    };
    check(|v| v.scores.truncate(3), "3 scores for 480 tokens");
    check(|v| v.token_types.push(1), "481 token types");
    check(|v| v.scores[5] = f32::NAN, "score of token 5");
    check(|v| v.tokens[300] = v.tokens[301].clone(), "occurs twice");
    check(|v| v.tokens.clear(), "0 tokens");
    check(|v| v.eos = Some(480), "special token 480");
    check(|v| v.extra_eog = vec![u32::MAX], "special token 4294967295");
    check(|v| v.model = "t5".to_string(), "`t5`");
    check(
        |v| {
            v.model = "gpt2".to_string();
            v.pre = Some("klingon".to_string());
        },
        "`klingon`",
    );
    check(|v| v.chat_template = Some("{% if %}".to_string()), "malformed");
}

proptest! {
    #[test]
    fn decoding_inverts_encoding(
        text in prop_oneof![any::<String>(), "[ a-z\u{e9}\u{65e5}]{0,40}"]
    ) {
        prop_assume!(!text.contains('\u{2581}'));
        for tokenizer in [tokenizer("llama"), tokenizer("gemma")] {
            let ids = tokenizer.encode(&text, Special::AsText).unwrap();
            prop_assert_eq!(&tokenizer.decode(&ids, true), &text);
        }
    }
}

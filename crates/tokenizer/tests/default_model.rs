//! The default model's tokenizer against what llama.cpp makes of the same file.
//!
//! `smollm2_tokenizer_refs.json` and `smollm2_chat_refs.json` come from llama.cpp 0c1e57098 on
//! SmolLM2-135M-Instruct.Q4_1.gguf.

mod common;

use std::sync::{Arc, LazyLock};

use inflight_tokenizer::{
    ChatInput, DecodeOptions, Special, TextPosition, Tokenizer, TokenizerError,
};
use proptest::prelude::*;
use serde_json::{Value, json};

static TOKENIZER: LazyLock<Arc<Tokenizer>> = LazyLock::new(|| Arc::new(common::default_model()));

#[test]
#[ignore = "needs the default model: make test"]
fn every_reference_string_has_the_reference_ids() {
    let refs = common::data("smollm2_tokenizer_refs.json");
    let strings = refs["strings"].as_array().unwrap();
    assert_eq!(strings.len(), 261);
    for entry in strings {
        let text = entry["text"].as_str().unwrap();
        let ids = common::ids(&entry["ids"]);
        assert_eq!(TOKENIZER.encode(text, Special::AsText).unwrap(), ids, "{text:?}");
        let parsed = entry.get("ids_parse_special").map_or(ids.clone(), common::ids);
        assert_eq!(TOKENIZER.encode(text, Special::Parse).unwrap(), parsed, "{text:?}");
        assert_eq!(TOKENIZER.encode_prompt(text, Special::AsText).unwrap(), ids, "no BOS here");
        let decoded = entry.get("detokenized").and_then(Value::as_str).unwrap_or(text);
        assert_eq!(TOKENIZER.decode(&ids, false), decoded);
        assert_eq!(TOKENIZER.decode(&parsed, false), decoded);
    }
}

#[test]
#[ignore = "needs the default model: make test"]
fn chats_render_and_encode_as_the_reference() {
    let refs = common::data("smollm2_chat_refs.json");
    let chats = refs["prompts"].as_array().unwrap();
    assert_eq!(chats.len(), 6);
    for chat in chats {
        let input = ChatInput {
            messages: &chat["messages"],
            tools: None,
            add_generation_prompt: true,
            extra: None,
        };
        let rendered = TOKENIZER.render_chat(&input).unwrap();
        assert_eq!(rendered, chat["rendered"].as_str().unwrap());
        let ids = TOKENIZER.encode_prompt(&rendered, Special::Parse).unwrap();
        assert_eq!(ids, common::ids(&chat["prompt_ids"]));
    }
}

#[test]
#[ignore = "needs the default model: make test"]
fn roles_of_special_tokens() {
    assert_eq!(TOKENIZER.vocab_size(), 49152);
    assert_eq!(TOKENIZER.bos(), Some(1));
    assert_eq!(TOKENIZER.eos_ids(), [2, 0], "<|im_end|>, then <|endoftext|>");
    assert_eq!(TOKENIZER.token_text(2).text, "<|im_end|>");
    assert_eq!(TOKENIZER.token_bytes(49152), b"");
    assert_eq!(TOKENIZER.decode(&[2, 504, 49152, 0], true), "The");
    let typed = TOKENIZER.encode("<|im_end|><|im_start|>", Special::AsText).unwrap();
    assert!(!typed.contains(&2) && !typed.contains(&1));
    assert_eq!(TOKENIZER.encode("<|im_end|>", Special::Parse).unwrap(), [2]);
}

#[test]
#[ignore = "needs the default model: make test"]
fn a_model_without_a_template_says_so() {
    let path = std::env::var("INFLIGHT_TEST_MODEL").unwrap();
    let mut vocab = common::gguf::read_vocab(path.as_ref());
    vocab.chat_template = None;
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let input =
        ChatInput { messages: &messages, tools: None, add_generation_prompt: true, extra: None };
    let error = Tokenizer::from_gguf(vocab).unwrap().render_chat(&input).unwrap_err();
    assert!(matches!(error, TokenizerError::NoChatTemplate));
}

#[test]
#[ignore = "needs the default model: make test"]
fn long_hostile_texts_encode_whole() {
    for unit in [" ", "A", "é", "\n", "<|im_start|>", "7", "\u{301}", "🦙"] {
        let text = unit.repeat(200_000 / unit.len());
        let ids = TOKENIZER.encode(&text, Special::AsText).unwrap();
        assert_eq!(TOKENIZER.decode(&ids, true), text, "{unit:?}");
    }
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![
        any::<String>(),
        "[ -~\n\t]{0,80}",
        "([a-zA-Z]{1,8}[ ,.'\n]{1,3}){0,12}",
        "(<\\|im_(start|end)\\|>|[ \u{3000}\u{a0}é日🦙0-9']){0,20}",
    ]
}

proptest! {
    #[test]
    #[ignore = "needs the default model: make test"]
    fn decoding_inverts_encoding(text in any_text()) {
        for special in [Special::AsText, Special::Parse] {
            let ids = TOKENIZER.encode(&text, special).unwrap();
            prop_assert_eq!(&TOKENIZER.decode(&ids, false), &text);
        }
    }

    #[test]
    #[ignore = "needs the default model: make test"]
    fn streaming_equals_decoding_at_once(
        ids in prop::collection::vec(0u32..49_200, 0..60),
        skip_special_tokens in any::<bool>(),
    ) {
        let options = DecodeOptions { skip_special_tokens, position: TextPosition::Start };
        let mut stream = TOKENIZER.decode_stream(options);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text += &stream.finish();
        let shown = ids.iter().filter(|id| !(skip_special_tokens && **id < 17));
        let bytes: Vec<u8> = shown.flat_map(|&id| TOKENIZER.token_bytes(id)).copied().collect();
        prop_assert_eq!(&text, &String::from_utf8_lossy(&bytes));
        prop_assert_eq!(text, TOKENIZER.decode(&ids, skip_special_tokens));
    }
}

//! Hugging Face folders.

#![allow(clippy::unwrap_used, reason = "a test's helper may fail like the test")]

mod common;

use std::fs;
use std::path::PathBuf;

use inflight_tokenizer::{ChatInput, GgufVocab, Special, TokenKind, Tokenizer, TokenizerError};
use proptest::prelude::*;
use serde_json::{Value, json};

/// A folder of its own for a test, removed at its end.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str, files: &[(&str, &Value)]) -> Self {
        let path = std::env::temp_dir().join(format!("inflight-{name}-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        for (file, json) in files {
            let text = json.as_str().map_or_else(|| json.to_string(), str::to_string);
            fs::write(path.join(file), text).unwrap();
        }
        Self(path)
    }

    fn read(&self) -> Result<Tokenizer, TokenizerError> {
        Tokenizer::from_folder(&self.0)
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

fn tokenizer_json() -> Value {
    common::data("tiny_tokenizer.json")
}

fn render(tokenizer: &Tokenizer, tools: Option<&Value>) -> String {
    let messages = json!([{"role": "user", "content": "a b"}]);
    let input = ChatInput { messages: &messages, tools, add_generation_prompt: true, extra: None };
    tokenizer.render_chat(&input).unwrap()
}

#[test]
fn tokenizer_json_alone_is_enough() {
    let tokenizer = Folder::new("alone", &[("tokenizer.json", &tokenizer_json())]).read().unwrap();
    // By hand: pieces "a", "Ġb", "Ġab" after the merges "a b", "Ġ ab", "Ġ b"; Ċ is a newline.
    let check = |text: &str, special, ids: &[u32]| {
        assert_eq!(tokenizer.encode(text, special).unwrap(), ids, "{text:?}");
        assert_eq!(tokenizer.decode(ids, false), text);
    };
    check("a b ab\n", Special::Parse, &[0, 7, 6, 4]);
    check("ab", Special::Parse, &[5]);
    check("", Special::Parse, &[]);
    check("<|s|>a", Special::Parse, &[8, 0]);
    check("<tool>b", Special::AsText, &[10, 1]);
    assert_eq!(tokenizer.encode_prompt("a", Special::AsText).unwrap(), [8, 0], "by its template");
    assert_eq!(tokenizer.encode_prompt("<|s|>a", Special::Parse).unwrap(), [8, 0]);
    assert!(!tokenizer.encode("<|s|>", Special::AsText).unwrap().contains(&8));
    assert_eq!(tokenizer.vocab_size(), 11);
    assert_eq!(tokenizer.token_table().kind(8), TokenKind::Control);
    assert_eq!(tokenizer.token_table().kind(10), TokenKind::UserDefined);
    assert_eq!(tokenizer.decode(&[8, 0, 9, 10], true), "a<tool>");
    assert_eq!((tokenizer.bos(), tokenizer.eos_ids()), (None, [].as_slice()));
    assert!(matches!(tokenizer.chat_template(), Err(TokenizerError::NoChatTemplate)));
}

#[test]
fn configs_name_special_tokens_in_every_form() {
    let config = json!({
        "bos_token": {"__type": "AddedToken", "content": "<|s|>", "lstrip": false},
        "eos_token": null,
        "chat_template": "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}",
    });
    let map = json!({"eos_token": "<|e|>", "bos_token": "b"});
    let generation = json!({"eos_token_id": [9, 10]});
    let folder = Folder::new(
        "configs",
        &[
            ("tokenizer.json", &tokenizer_json()),
            ("tokenizer_config.json", &config),
            ("special_tokens_map.json", &map),
            ("generation_config.json", &generation),
            ("config.json", &json!({"eos_token_id": 3})),
        ],
    );
    let tokenizer = folder.read().unwrap();
    assert_eq!(tokenizer.bos(), Some(8));
    assert_eq!(tokenizer.eos_ids(), [9, 10]);
    assert_eq!(render(&tokenizer, None), "<|s|>a b<|e|>");

    fs::remove_file(folder.0.join("generation_config.json")).unwrap();
    assert_eq!(folder.read().unwrap().eos_ids(), [9, 3], "the model's config is next");
}

#[test]
fn the_config_overrules_the_post_processor() {
    let config = json!({
        "bos_token": "<|s|>", "eos_token": "<|e|>", "add_bos_token": false, "add_eos_token": true
    });
    let files = [("tokenizer.json", &tokenizer_json()), ("tokenizer_config.json", &config)];
    let tokenizer = Folder::new("overrules", &files).read().unwrap();
    assert_eq!(tokenizer.encode_prompt("a", Special::AsText).unwrap(), [0, 9]);
    assert_eq!(tokenizer.encode_prompt("a<|e|>", Special::Parse).unwrap(), [0, 9]);
}

#[test]
fn templates_come_from_a_file_or_a_list() {
    let config = json!({"chat_template": [
        {"name": "default", "template": "plain {{ messages[0].content }}"},
        {"name": "tool_use", "template": "tools {{ tools | length }}"},
    ]});
    let files = [("tokenizer.json", &tokenizer_json()), ("tokenizer_config.json", &config)];
    let folder = Folder::new("templates", &files);
    let tokenizer = folder.read().unwrap();
    assert_eq!(render(&tokenizer, None), "plain a b");
    assert_eq!(render(&tokenizer, Some(&json!([{}, {}]))), "tools 2");

    fs::write(folder.0.join("chat_template.json"), r#"{"chat_template": "older file"}"#).unwrap();
    assert_eq!(render(&folder.read().unwrap(), None), "older file");
    fs::write(folder.0.join("chat_template.jinja"), "own file\n").unwrap();
    assert_eq!(render(&folder.read().unwrap(), None), "own file");
}

#[test]
fn bad_folders_are_errors_that_name_the_file() {
    let check = |name: &str, files: &[(&str, &Value)], expected: &str| {
        let message = Folder::new(name, files).read().unwrap_err().to_string();
        assert!(message.contains(expected), "{name}: {message}");
    };
    let good = tokenizer_json();
    check("missing", &[], "tokenizer.json");
    check("no-json", &[("tokenizer.json", &json!("{"))], "tokenizer.json");
    check("no-model", &[("tokenizer.json", &json!({"decoder": {"type": "Fuse"}}))], "model");
    let mut word_piece = good.clone();
    word_piece["decoder"] = json!({"type": "WordPiece", "prefix": "##", "cleanup": true});
    check("word-piece", &[("tokenizer.json", &word_piece)], "WordPiece");
    let mut far = good.clone();
    far["model"]["vocab"]["far"] = json!(4_000_000_000u32);
    check("far", &[("tokenizer.json", &far)], "4000000000");
    let mut past = good.clone();
    past["post_processor"]["special_tokens"]["<|s|>"]["ids"] = json!([11]);
    check("past", &[("tokenizer.json", &past)], "token 11");
    let bad = json!({"eos_token_id": "two"});
    check(
        "bad-config",
        &[("tokenizer.json", &good), ("generation_config.json", &bad)],
        "generation_config.json",
    );
    let bad = json!({"chat_template": "{% for %}"});
    check(
        "bad-template",
        &[("tokenizer.json", &good), ("tokenizer_config.json", &bad)],
        "chat template",
    );
}

/// Every value of a JSON tree, by its path.
fn paths(json: &Value, path: &str, all: &mut Vec<String>) {
    all.push(path.to_string());
    match json {
        Value::Array(items) => {
            for (index, item) in items.iter().enumerate() {
                paths(item, &format!("{path}/{index}"), all);
            }
        }
        Value::Object(members) => {
            for (key, member) in members {
                paths(member, &format!("{path}/{key}"), all);
            }
        }
        _ => {}
    }
}

#[test]
fn no_wrong_value_anywhere_makes_a_panic() {
    let good = tokenizer_json();
    let mut all = Vec::new();
    paths(&good, "", &mut all);
    let wrong = [json!(null), json!(-1), json!(7), json!("x"), json!(""), json!([]), json!({})];
    let folder = Folder::new("wrong", &[]);
    for path in &all {
        for value in &wrong {
            let mut json = good.clone();
            *json.pointer_mut(path).unwrap() = value.clone();
            fs::write(folder.0.join("tokenizer.json"), json.to_string()).unwrap();
            if let Ok(tokenizer) = folder.read() {
                let ids = tokenizer.encode_prompt("ab <tool>", Special::Parse).unwrap_or_default();
                tokenizer.decode(&ids, false);
            }
        }
    }
}

/// The same vocabulary as `tiny_tokenizer.json`, as a GGUF file would bring it.
fn same_vocab_as_gguf() -> GgufVocab {
    let json = tokenizer_json();
    let mut tokens = vec![String::new(); 11];
    for (token, id) in json["model"]["vocab"].as_object().unwrap() {
        tokens[id.as_u64().unwrap() as usize] = token.clone();
    }
    let mut token_types = vec![1; 11];
    for added in json["added_tokens"].as_array().unwrap() {
        let id = added["id"].as_u64().unwrap() as usize;
        tokens[id] = added["content"].as_str().unwrap().to_string();
        token_types[id] = if added["special"].as_bool().unwrap() { 3 } else { 4 };
    }
    let merges = json["model"]["merges"].as_array().unwrap();
    let merge =
        |pair: &Value| format!("{} {}", pair[0].as_str().unwrap(), pair[1].as_str().unwrap());
    GgufVocab {
        model: "gpt2".to_string(),
        pre: Some("gpt-2".to_string()),
        merges: merges.iter().map(merge).collect(),
        bos: Some(8),
        add_bos: Some(true),
        tokens,
        token_types,
        ..GgufVocab::default()
    }
}

proptest! {
    #[test]
    fn a_folder_and_a_gguf_file_of_one_vocabulary_agree(
        text in "([ab \n]{0,6}(<\\|s\\|>|<\\|e\\|>|<tool>|<)?){0,8}"
    ) {
        let files = [("tokenizer.json", &tokenizer_json())];
        let folder = Folder::new("agree", &files).read().unwrap();
        let gguf = Tokenizer::from_gguf(same_vocab_as_gguf()).unwrap();
        for special in [Special::AsText, Special::Parse] {
            let ids = folder.encode_prompt(&text, special).unwrap();
            prop_assert_eq!(&ids, &gguf.encode_prompt(&text, special).unwrap());
            prop_assert_eq!(folder.decode(&ids, true), gguf.decode(&ids, true));
        }
    }
}

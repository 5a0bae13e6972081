//! `/tokenize`, `/detokenize` and the health endpoints.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use std::time::Duration;

use common::{END, HELLO, START, TestServer};
use serde_json::{Value, json};

#[tokio::test]
async fn texts_to_tokens_and_back() {
    let server = TestServer::rich("x");
    let body = json!({"model": "tiny", "prompt": "a<|im_end|>é", "return_token_strs": true});
    let tokenized = server.post("/tokenize", body).await;
    let tokens = json!([97, END, 0xC3, 0xA9]);
    let expected = json!({
        "count": 4, "max_model_len": 4096, "tokens": tokens,
        "token_strs": ["a", "<|im_end|>", "\u{FFFD}", "\u{FFFD}"],
    });
    assert_eq!(tokenized, expected);
    let text = server.post("/detokenize", json!({"tokens": tokens})).await;
    assert_eq!(text, json!({"prompt": "a<|im_end|>é"}));
    let llama = server.post("/detokenize", json!({"tokens": [HELLO]})).await;
    assert_eq!(llama, json!({"prompt": "Hello"}));
}

#[tokio::test]
async fn messages_are_counted_as_chats_count_them() {
    let server = TestServer::rich("x");
    let messages = json!([{"role": "user", "content": "Hi"}]);
    let tool = json!({"type": "function", "function": {"name": "f"}});
    let body = json!({"messages": messages, "tools": [tool]});
    let tokenized = server.post("/tokenize", body.clone()).await;
    let chat = server.post("/v1/chat/completions", body).await;
    assert_eq!(tokenized["count"], chat["usage"]["prompt_tokens"]);
    let body = json!({"messages": messages, "add_generation_prompt": false});
    let tokenized = server.post("/tokenize", body).await;
    let text: Vec<u32> = "user\nHi".bytes().map(u32::from).collect();
    assert_eq!(tokenized["tokens"], json!([&[START][..], &text, &[END]].concat()));
}

#[tokio::test]
async fn what_is_no_text() {
    let server = TestServer::rich("x");
    let check = async |path: &str, body: Value, named: &str| {
        let (status, _, error) = server.post_text(path, &body.to_string()).await;
        assert_eq!(status, 400, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains(named), "{error}");
    };
    check("/tokenize", json!({}), "`prompt` or `messages` is required").await;
    check("/tokenize", json!({"prompt": "a", "messages": []}), "messages").await;
    check("/tokenize", json!({"messages": []}), "messages").await;
    check("/detokenize", json!({}), "tokens").await;
    check("/detokenize", json!({"tokens": [100_000]}), "token id 100000").await;
    check("/detokenize", json!({"tokens": [-1]}), "tokens[0]").await;
}

#[tokio::test]
async fn readiness_is_about_getting_on() {
    let server = TestServer::rich("x");
    let check = async |path: &str, expected: u16| {
        assert_eq!(server.get(path).await.0.as_u16(), expected, "{path}");
    };
    check("/health/live", 200).await;
    check("/health/ready", 200).await;
    server.engine.stall(Duration::from_secs(61));
    check("/health/live", 200).await;
    check("/health/ready", 503).await;
    assert_eq!(server.get("/health/ready").await.1["error"]["code"], "stalled");
    server.engine.stall(Duration::from_secs(59));
    check("/health/ready", 200).await;
    server.engine.die();
    check("/health/live", 503).await;
    check("/health/ready", 503).await;
}

#[tokio::test]
async fn an_embedding_is_as_long_as_it_is_asked_to_be() {
    // The engine's state is [3, 4].
    let server = TestServer::saying("x");
    for (dimensions, expected) in [(json!(null), json!([0.6, 0.8])), (json!(1), json!([1.0]))] {
        let body = json!({"input": "a", "dimensions": dimensions});
        let told = server.post("/v1/embeddings", body).await["data"][0]["embedding"].clone();
        let told: Vec<f64> = serde_json::from_value(told).unwrap();
        let expected: Vec<f64> = serde_json::from_value(expected).unwrap();
        assert_eq!(told.len(), expected.len());
        assert!(told.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-6), "{told:?}");
    }
    for dimensions in [0, 3] {
        let body = json!({"input": "a", "dimensions": dimensions}).to_string();
        let (status, _, error) = server.post_text("/v1/embeddings", &body).await;
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!("dimensions")));
    }
}

//! `POST /v1/chat/completions`, whole and streamed.

mod common;

use common::{END, FakeEngine, START, TestServer, bytes, chunks, says, steady};
use inflight_engine::{FinishReason, TokenUpdate, Update};
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";

fn hi() -> Value {
    json!([{"role": "user", "content": "Hi"}])
}

#[tokio::test]
async fn a_whole_chat_completion() {
    let server = TestServer::saying("Hello!");
    let response = server.post(PATH, json!({"model": "org/tiny", "messages": hi()})).await;
    assert!(response["id"].as_str().unwrap().starts_with("chatcmpl-"));
    let message = json!({"role": "assistant", "content": "Hello!", "refusal": null});
    let expected = json!({
        "object": "chat.completion",
        "model": "org/tiny",
        "choices": [
            {"index": 0, "message": message, "logprobs": null, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 20, "completion_tokens": 7, "total_tokens": 27,
            "prompt_tokens_details": {"cached_tokens": 0}},
    });
    assert_eq!(steady(response), expected);

    let mut prompt = vec![START];
    prompt.extend(bytes("user\nHi"));
    prompt.extend([END, START]);
    prompt.extend(bytes("assistant\n"));
    let rest_of_context = 256 - prompt.len();
    assert_eq!(server.engine.requests(), [(prompt, rest_of_context)]);
}

#[tokio::test]
async fn a_streamed_chat_completion() {
    let server = TestServer::saying("ab");
    let body = json!({"messages": hi(), "stream_options": {"include_usage": true}});
    let chunk = |choices: Value, usage: Value| {
        json!({
            "object": "chat.completion.chunk", "model": "tiny", "choices": choices, "usage": usage,
        })
    };
    let delta = |delta: Value, reason: Value| {
        let choice = json!([
            {"index": 0, "delta": delta, "logprobs": null, "finish_reason": reason},
        ]);
        chunk(choice, json!(null))
    };
    let expected = [
        delta(json!({"role": "assistant", "content": ""}), json!(null)),
        delta(json!({"content": "a"}), json!(null)),
        delta(json!({"content": "b"}), json!(null)),
        delta(json!({}), json!("stop")),
        chunk(
            json!([]),
            json!({"prompt_tokens": 20, "completion_tokens": 3, "total_tokens": 23,
                "prompt_tokens_details": {"cached_tokens": 0}}),
        ),
    ];
    assert_eq!(chunks(&server.stream(PATH, body).await), expected);
}

#[tokio::test]
async fn several_answers_each_have_role_and_end() {
    let server = TestServer::new(FakeEngine::new(|_, number| says(&format!("{number}"))));
    let stream = chunks(&server.stream(PATH, json!({"messages": hi(), "n": 3})).await);
    for index in 0..3 {
        let choices = stream.iter().map(|chunk| &chunk["choices"][0]);
        let own: Vec<_> = choices.filter(|choice| choice["index"] == index).collect();
        assert_eq!(own.len(), 3, "role, text, end");
        assert_eq!(own[0]["delta"]["role"], "assistant");
        assert_eq!(own[1]["delta"], json!({"content": format!("{index}")}));
        assert_eq!(own[2]["finish_reason"], "stop");
    }
}

#[tokio::test]
async fn lengths_by_either_name() {
    let server = TestServer::saying("x");
    let check = async |fields: Value, expected: usize| {
        let mut body = json!({"messages": hi()});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        server.post(PATH, body).await;
        assert_eq!(server.engine.requests().last().unwrap().1, expected, "{fields}");
    };
    check(json!({"max_tokens": 7}), 7).await;
    check(json!({"max_completion_tokens": 8}), 8).await;
    check(json!({"max_completion_tokens": 9, "max_tokens": 9}), 9).await;
}

#[tokio::test]
async fn template_options_reach_the_template() {
    let server = TestServer::saying("x");
    let body = json!({
        "messages": hi(), "add_generation_prompt": false,
        "chat_template_kwargs": {"suffix": "!"},
    });
    server.post(PATH, body).await;
    let mut prompt = vec![START];
    prompt.extend(bytes("user\nHi"));
    prompt.extend([END, u32::from(b'!')]);
    assert_eq!(server.engine.requests()[0].0, prompt);
}

#[tokio::test]
async fn long_messages_are_encoded_off_thread() {
    let server = TestServer::saying("x");
    let text = "<|im_start|>".repeat(2000);
    let body = json!({"messages": [{"role": "user", "content": text}]});
    let (status, _, error) = server.post_text(PATH, &body.to_string()).await;
    assert_eq!(status, 400);
    assert_eq!(error["error"]["param"], "messages");
    assert_eq!(error["error"]["code"], "context_length_exceeded");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("2018 tokens"), "{message}");
}

#[tokio::test]
async fn logprobs_carry_bytes() {
    let token = |token, logprob, top: &[(u32, f32)]| {
        let top_logprobs = top.to_vec();
        Update::Token(TokenUpdate {
            token,
            logprob: Some(logprob),
            top_logprobs,
            ..TokenUpdate::default()
        })
    };
    let updates = vec![
        token(97, -0.5, &[(98, -0.25)]),
        token(0xC3, -1.0, &[(0xC3, -1.0)]),
        Update::Finished(FinishReason::Length),
    ];
    let server = TestServer::new(FakeEngine::new(move |_, _| updates.clone()));
    let body = json!({"messages": hi(), "logprobs": true, "top_logprobs": 1});
    let one = |token: &str, logprob: f32, bytes: &[u8]| {
        json!({
            "token": token, "logprob": logprob, "bytes": bytes,
        })
    };
    let mut first = one("a", -0.5, &[97]);
    first["top_logprobs"] = json!([one("b", -0.25, &[98])]);
    let mut second = one("\u{FFFD}", -1.0, &[0xC3]);
    second["top_logprobs"] = json!([one("\u{FFFD}", -1.0, &[0xC3])]);
    let response = server.post(PATH, body.clone()).await;
    assert_eq!(response["choices"][0]["message"]["content"], "a\u{FFFD}");
    let expected = json!({"content": [first, second], "refusal": null});
    assert_eq!(response["choices"][0]["logprobs"], expected);

    let mut streamed = Vec::new();
    for chunk in chunks(&server.stream(PATH, body).await) {
        let content = chunk["choices"][0]["logprobs"]["content"].clone();
        streamed.extend(content.as_array().cloned().unwrap_or_default());
    }
    assert_eq!(json!(streamed), expected["content"]);
}

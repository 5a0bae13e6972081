//! `POST /v1/messages` and `/v1/messages/count_tokens`.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use common::{END, END_THINK, FakeEngine, THINK, TestServer, bytes, script};
use inflight_engine::FinishReason;
use serde_json::{Value, json};

const PATH: &str = "/v1/messages";
const TEXT: &str = "<think>Hm.</think>I add.\n\
    <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>";

fn ask(fields: Value) -> Value {
    let mut body = json!({
        "model": "tiny", "max_tokens": 500, "system": "Be brief.",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": [{"name": "add", "description": "Adds", "input_schema": {"type": "object"}}],
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

#[tokio::test]
async fn a_whole_message() {
    let server = TestServer::rich(TEXT);
    let mut message = server.post(PATH, ask(json!({}))).await;
    let prompt = server.last_prompt();
    assert!(prompt.contains("|system\nBe brief.||user\nHi||assistant\n"), "{prompt}");
    let fields = message.as_object_mut().unwrap();
    assert!(fields.shift_remove("id").unwrap().as_str().unwrap().starts_with("msg_"));
    let call = fields["content"][2].as_object_mut().unwrap();
    assert!(call.shift_remove("id").unwrap().as_str().unwrap().starts_with("toolu_"));
    let expected = json!({
        "type": "message", "role": "assistant", "model": "tiny",
        "content": [
            {"type": "thinking", "thinking": "Hm.", "signature": ""},
            {"type": "text", "text": "I add."},
            {"type": "tool_use", "name": "add", "input": {"a": 1}},
        ],
        "stop_reason": "tool_use", "stop_sequence": null,
        "usage": {
            "input_tokens": prompt.len(), "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0, "output_tokens": TEXT.len() + 1,
        },
    });
    assert_eq!(message, expected);
    let mut body = ask(json!({}));
    body.as_object_mut().unwrap().remove("max_tokens");
    let count = server.post("/v1/messages/count_tokens", body).await;
    assert_eq!(count, json!({"input_tokens": prompt.len()}));
}

#[tokio::test]
async fn events_in_anthropics_order() {
    let server = TestServer::rich(TEXT);
    let events = server.stream_named(PATH, ask(json!({}))).await;
    let mut kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let block = ["content_block_start", "content_block_delta", "content_block_stop"];
    let expected = [
        &["message_start", "ping"][..],
        &block,
        &block,
        &block,
        &["message_delta", "message_stop"],
    ];
    assert_eq!(kinds, expected.concat());
    assert_eq!(events[0]["message"]["content"], json!([]));
    assert_eq!(events[0]["message"]["stop_reason"], Value::Null);

    let deltas = |field: &str| {
        let text = |event: &Value| event["delta"][field].as_str().unwrap_or_default().to_owned();
        events.iter().map(text).collect::<String>()
    };
    assert_eq!(deltas("thinking"), "Hm.");
    assert_eq!(deltas("text"), "I add.");
    assert_eq!(deltas("partial_json"), "{\"a\": 1}");
    let end = &events[events.len() - 2];
    assert_eq!(end["delta"], json!({"stop_reason": "tool_use", "stop_sequence": null}));
    assert_eq!(end["usage"]["output_tokens"], TEXT.len() + 1);
}

#[tokio::test]
async fn endings() {
    let check = async |server: &TestServer, fields: Value, reason: &str, stop: Value| {
        let message = server.post(PATH, ask(fields.clone())).await;
        assert_eq!((&message["stop_reason"], &message["stop_sequence"]), (&json!(reason), &stop));
        let events = server.stream_named(PATH, ask(fields)).await;
        let expected = json!({"stop_reason": reason, "stop_sequence": stop});
        assert_eq!(events[events.len() - 2]["delta"], expected);
    };
    let server = TestServer::rich("Hello");
    check(&server, json!({}), "end_turn", Value::Null).await;
    check(&server, json!({"stop_sequences": ["x", "ll"]}), "stop_sequence", json!("ll")).await;
    let cut = TestServer::rich_with(|_, _| {
        script(&bytes("<tool_call>{\"name\": \"add\", \"arguments\": {\"a"), FinishReason::Length)
    });
    check(&cut, json!({}), "max_tokens", Value::Null).await;
    let message = cut.post(PATH, ask(json!({}))).await;
    assert_eq!(message["content"][0]["input"], json!({}), "a call that was cut has no input");
}

#[tokio::test]
async fn an_answer_that_was_begun_goes_on() {
    let server = TestServer::rich("4.");
    let messages = json!([
        {"role": "user", "content": "2 + 2?"}, {"role": "assistant", "content": "It is"},
    ]);
    server.post(PATH, ask(json!({"messages": messages}))).await;
    assert!(server.last_prompt().ends_with("|assistant\nIt is"));
}

#[tokio::test]
async fn thoughts_have_a_budget() {
    let server = TestServer::thinking("Hi");
    server.post(PATH, ask(json!({"thinking": {"type": "enabled", "budget_tokens": 3}}))).await;
    let said = |text: &str, rest: &[u32]| [&[THINK], &bytes(text)[..], rest].concat();
    let allows = |tokens: &[u32]| server.engine.last_allows(tokens);
    assert_eq!(allows(&said("Hm.", &[END_THINK, b'Y'.into(), END])), Ok(()));
    assert_eq!(allows(&said("H", &[END_THINK, b'Y'.into(), END])), Ok(()), "fewer will do");
    assert_eq!(allows(&said("Hm..", &[])), Err(4), "the fourth token is one too many");
    assert_eq!(allows(&bytes("No thoughts at all")), Ok(()));
}

#[tokio::test]
async fn errors_in_anthropics_shape() {
    let server = TestServer::rich("x");
    for (fields, named) in [
        (json!({"max_tokens": null}), "max_tokens"),
        (json!({"messages": null}), "messages"),
        (json!({"messages": [{"role": "bot", "content": "a"}]}), "messages[0].role"),
        (json!({"max_tokens": 100_000}), "max_tokens"),
        (json!({"stop_sequences": [""]}), "stop_sequences"),
        (json!({"tools": [{"name": "a"}]}), "input_schema"),
        (json!({"tools": [{"type": "bash_20250124", "name": "bash"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "tool", "name": "sub"}}), "tool_choice"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 500}}), "thinking.budget_tokens"),
        (json!({"thinking": {"type": "enabled", "budget_tokens": 0}}), "thinking.budget_tokens"),
        // The model's thoughts end with no token that could be forced.
        (json!({"thinking": {"type": "enabled", "budget_tokens": 9}}), "thinking.budget_tokens"),
        (json!({"no_such_field": 1}), "no_such_field"),
        (json!({"mcp_servers": [{}]}), "mcp_servers"),
    ] {
        let (status, _, error) = server.post_text(PATH, &ask(fields.clone()).to_string()).await;
        assert_eq!((status.as_u16(), &error["type"]), (400, &json!("error")), "{error}");
        assert_eq!(error["error"]["type"], "invalid_request_error");
        assert!(error["error"]["message"].as_str().unwrap().contains(named), "{fields}: {error}");
    }
    let (status, _, error) = server.post_text(PATH, &ask(json!({"model": "x"})).to_string()).await;
    assert_eq!((status.as_u16(), &error["error"]["type"]), (404, &json!("not_found_error")));

    let full = TestServer::new(FakeEngine::new(|_, _| vec![]).with_max_running(0));
    let body = json!({
        "model": "tiny", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}],
    });
    let (status, headers, error) = full.post_text(PATH, &body.to_string()).await;
    assert_eq!((status.as_u16(), &error["error"]["type"]), (429, &json!("rate_limit_error")));
    assert!(headers.contains_key("retry-after"));
}

//! `POST /v1/responses`, whole and streamed.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use common::{TestServer, script};
use inflight_engine::{FinishReason, TokenUpdate, Update};
use serde_json::{Value, json};

const PATH: &str = "/v1/responses";
const TEXT: &str = "<think>Hm.</think>I add.\n\
    <tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>";

fn ask(fields: Value) -> Value {
    let tool = json!({"type": "function", "name": "add", "parameters": {"type": "object"}});
    let mut body = json!({"input": "Hi", "instructions": "Be brief.", "tools": [tool]});
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// Takes ids out, which must begin as they should.
fn steady(mut item: Value) -> Value {
    let prefix = match item["type"].as_str().unwrap() {
        "reasoning" => "rs_",
        "message" => "msg_",
        "function_call" => "fc_",
        other => panic!("{other}"),
    };
    let fields = item.as_object_mut().unwrap();
    assert!(fields.shift_remove("id").unwrap().as_str().unwrap().starts_with(prefix));
    if prefix == "fc_" {
        assert!(fields.shift_remove("call_id").unwrap().as_str().unwrap().starts_with("call_"));
    }
    item
}

fn expected_items() -> [Value; 3] {
    [
        json!({
            "type": "reasoning", "summary": [], "status": "completed",
            "content": [{"type": "reasoning_text", "text": "Hm."}],
        }),
        json!({
            "type": "message", "role": "assistant", "status": "completed",
            "content": [
                {"type": "output_text", "text": "I add.", "annotations": [], "logprobs": []},
            ],
        }),
        json!({
            "type": "function_call", "name": "add", "arguments": "{\"a\": 1}",
            "status": "completed",
        }),
    ]
}

#[tokio::test]
async fn a_whole_response() {
    let server = TestServer::rich(TEXT);
    let response = server.post(PATH, ask(json!({"model": "tiny", "temperature": 0.5}))).await;
    assert!(response["id"].as_str().unwrap().starts_with("resp_"));
    for (field, expected) in [
        ("object", json!("response")),
        ("status", json!("completed")),
        ("error", json!(null)),
        ("incomplete_details", json!(null)),
        ("instructions", json!("Be brief.")),
        ("model", json!("tiny")),
        ("store", json!(false)),
        ("temperature", json!(0.5)),
        ("tool_choice", json!("auto")),
        ("parallel_tool_calls", json!(true)),
        ("text", json!({"format": {"type": "text"}})),
    ] {
        assert_eq!(response[field], expected, "{field}");
    }
    let output = response["output"].as_array().unwrap();
    let items: Vec<_> = output.iter().cloned().map(steady).collect();
    assert_eq!(items, expected_items());
    let prompt = server.last_prompt();
    assert!(prompt.contains("|system\nBe brief.||user\nHi||assistant\n"), "{prompt}");
    // Every byte is a token, and the end is one.
    let usage = &response["usage"];
    assert_eq!(usage["input_tokens"], prompt.len());
    assert_eq!(usage["output_tokens"], TEXT.len() + 1);
    assert_eq!(usage["total_tokens"], prompt.len() + TEXT.len() + 1);
    assert_eq!(usage["output_tokens_details"]["reasoning_tokens"], 1 + "Hm.</think>".len());
}

#[tokio::test]
async fn events_in_openais_order() {
    let server = TestServer::rich(TEXT);
    let events = server.stream_named(PATH, ask(json!({}))).await;
    let numbers: Vec<_> = events.iter().map(|event| event["sequence_number"].clone()).collect();
    assert_eq!(json!(numbers), json!((0..events.len()).collect::<Vec<_>>()));
    let mut kinds: Vec<_> = events.iter().map(|event| event["type"].as_str().unwrap()).collect();
    kinds.dedup();
    let text_item = |kind: &'static str| {
        let added = ["response.output_item.added", "response.content_part.added"];
        let done = ["response.content_part.done", "response.output_item.done"];
        let [delta, end] = match kind {
            "reasoning" => ["response.reasoning_text.delta", "response.reasoning_text.done"],
            _ => ["response.output_text.delta", "response.output_text.done"],
        };
        [&added[..], &[delta, end], &done[..]].concat()
    };
    let expected = [
        vec!["response.created", "response.in_progress"],
        text_item("reasoning"),
        text_item("text"),
        vec![
            "response.output_item.added",
            "response.function_call_arguments.delta",
            "response.function_call_arguments.done",
            "response.output_item.done",
            "response.completed",
        ],
    ];
    assert_eq!(kinds, expected.concat());

    let of_kind = |kind: &'static str| events.iter().filter(move |event| event["type"] == kind);
    let done = of_kind("response.output_item.done").map(|event| steady(event["item"].clone()));
    assert_eq!(done.collect::<Vec<_>>(), expected_items());
    let join = |kind| of_kind(kind).map(|e| e["delta"].as_str().unwrap()).collect::<String>();
    assert_eq!(join("response.output_text.delta"), "I add.");
    assert_eq!(join("response.reasoning_text.delta"), "Hm.");
    assert_eq!(join("response.function_call_arguments.delta"), "{\"a\": 1}");
    let last = &events.last().unwrap()["response"];
    assert_eq!(last["usage"]["output_tokens"], TEXT.len() + 1);
    assert_eq!(last["output"].as_array().unwrap().len(), 3);
    for event in &events[2..events.len() - 1] {
        let index = event["output_index"].as_u64().unwrap() as usize;
        let item_id = event.get("item_id").or_else(|| event["item"].get("id"));
        assert_eq!(item_id.unwrap(), &last["output"][index]["id"]);
    }
}

#[tokio::test]
async fn a_response_that_is_cut() {
    let server = TestServer::rich_with(|_, _| script(&common::bytes("Hel"), FinishReason::Length));
    let body = json!({"input": "Hi", "max_output_tokens": 3});
    let response = server.post(PATH, body.clone()).await;
    assert_eq!(response["status"], "incomplete");
    assert_eq!(response["incomplete_details"], json!({"reason": "max_output_tokens"}));
    assert_eq!(response["output"][0]["status"], "incomplete");
    let events = server.stream_named(PATH, body).await;
    assert_eq!(events.last().unwrap()["type"], "response.incomplete");
}

#[tokio::test]
async fn an_empty_response_has_a_message() {
    let server = TestServer::rich("");
    let response = server.post(PATH, json!({"input": "Hi"})).await;
    assert_eq!(response["output"][0]["content"][0]["text"], "");
    let events = server.stream_named(PATH, json!({"input": "Hi"})).await;
    assert_eq!(events.last().unwrap()["response"]["output"][0]["type"], "message");
}

#[tokio::test]
async fn a_response_that_fails() {
    let server = TestServer::rich_with(|_, _| {
        script(&common::bytes("H"), FinishReason::Failed("the device is lost".to_owned()))
    });
    let events = server.stream_named(PATH, json!({"input": "Hi"})).await;
    let last = events.last().unwrap();
    assert_eq!(last["type"], "response.failed");
    assert_eq!(last["response"]["error"]["code"], "server_error");
}

#[tokio::test]
async fn logprobs_of_the_text() {
    let token = |token: u32| {
        Update::Token(TokenUpdate {
            token,
            logprob: Some(-0.5),
            top_logprobs: vec![(98, -0.25)],
            ..TokenUpdate::default()
        })
    };
    let updates = vec![token(97), token(98), Update::Finished(FinishReason::Length)];
    let server = TestServer::rich_with(move |_, _| updates.clone());
    let body = json!({
        "input": "Hi", "top_logprobs": 1, "include": ["message.output_text.logprobs"],
    });
    let response = server.post(PATH, body.clone()).await;
    let logprobs = &response["output"][0]["content"][0]["logprobs"];
    assert_eq!(logprobs[1]["token"], "b");
    assert_eq!(logprobs[1]["top_logprobs"][0]["logprob"], -0.25);
    let events = server.stream_named(PATH, body).await;
    let told = events.iter().filter(|event| event["type"] == "response.output_text.delta");
    let told: Vec<_> = told.flat_map(|e| e["logprobs"].as_array().unwrap().clone()).collect();
    assert_eq!(&json!(told), logprobs);
}

#[tokio::test]
async fn what_is_refused() {
    let server = TestServer::rich("x");
    for (fields, param) in [
        (json!({"input": null}), "input"),
        (json!({"store": true}), "store"),
        (json!({"previous_response_id": "resp_1"}), "previous_response_id"),
        (json!({"background": true}), "background"),
        (json!({"truncation": "auto"}), "truncation"),
        (json!({"include": ["file_search_call.results"]}), "include"),
        (json!({"tools": [{"type": "web_search"}]}), "tools[0].type"),
        (json!({"tool_choice": {"type": "function", "name": "sub"}}), "tool_choice"),
        (json!({"reasoning": {"summary": "auto"}}), "reasoning.summary"),
        (json!({"reasoning": {"effort": "high"}}), "reasoning.effort"),
        (json!({"max_output_tokens": 100_000}), "max_output_tokens"),
        (json!({"n": 2}), "n"),
        (json!({"input": [{"type": "input_image"}]}), "input[0]"),
    ] {
        let (status, _, error) = server.post_text(PATH, &ask(fields.clone()).to_string()).await;
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!(param)), "{fields}");
    }
}

#[tokio::test]
async fn text_is_held_to_its_format() {
    let server = TestServer::thinking("Hi");
    let schema = json!({
        "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
        "additionalProperties": false,
    });
    let asked = json!({
        "format": {"type": "json_schema", "name": "it", "schema": schema, "strict": true},
    });
    let fields = json!({"text": asked, "tools": []});
    let response = server.post(PATH, ask(fields)).await;
    assert_eq!(response["text"]["format"]["schema"], schema);
    assert_eq!(response["text"]["format"]["name"], "it");
    let allows = |text: &str| server.engine.last_allows(&common::bytes(text));
    assert_eq!(allows("{\"a\": 12}"), Ok(()));
    assert_eq!(allows("{\"a\": \"12\"}"), Err(6));
    let fields = json!({"text": {"format": {"type": "json_object"}}, "tools": []});
    server.post(PATH, ask(fields)).await;
    assert_eq!(allows("{\"b\": [true]}"), Ok(()));
    assert_eq!(allows("[1]"), Err(0));
    for (text, named) in [
        (json!({"format": {"type": "xml"}}), "text"),
        (json!({"format": {"type": 0}}), "text"),
        (json!({"verbosity": "high"}), "text.verbosity"),
        (
            json!({"format": {"type": "json_schema", "name": "it", "schema": {"not": {}}}}),
            "text.format.schema",
        ),
    ] {
        let body = ask(json!({"text": text})).to_string();
        let (status, _, error) = server.post_text(PATH, &body).await;
        assert_eq!(status.as_u16(), 400, "{error}");
        assert!(error["error"]["param"].as_str().unwrap().starts_with(named), "{error}");
    }
}

//! Tool calls and thoughts in chat completions, whole and streamed.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use common::{END_THINK, FakeEngine, THINK, TestServer, chunks, says, script};
use inflight_engine::FinishReason;
use serde_json::{Value, json};

const PATH: &str = "/v1/chat/completions";
fn ask(fields: Value) -> Value {
    let tool = json!({"type": "function", "function": {
        "name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}},
    }});
    let mut body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "tools": [tool], "max_tokens": 500,
    });
    body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
    body
}

/// What a client makes of a stream.
#[derive(Default)]
struct Sum {
    content: String,
    thoughts: String,
    /// Ids, names and arguments by index.
    calls: Vec<(String, String, String)>,
    endings: Vec<String>,
}

fn add_up(chunks: &[Value]) -> Sum {
    let Sum { mut content, mut thoughts, mut calls, mut endings } = Sum::default();
    for choice in chunks.iter().flat_map(|chunk| chunk["choices"].as_array().unwrap()) {
        let delta = &choice["delta"];
        content += delta["content"].as_str().unwrap_or_default();
        thoughts += delta["reasoning_content"].as_str().unwrap_or_default();
        for call in delta["tool_calls"].as_array().unwrap_or(&vec![]) {
            let index = call["index"].as_u64().unwrap() as usize;
            let function = &call["function"];
            if index == calls.len() {
                let text = |value: &Value| value.as_str().unwrap().to_owned();
                assert_eq!(call["type"], "function");
                calls.push((text(&call["id"]), text(&function["name"]), String::new()));
            }
            assert_eq!(index + 1, calls.len(), "calls come one after the other");
            calls[index].2 += function["arguments"].as_str().unwrap();
        }
        endings.extend(choice["finish_reason"].as_str().map(str::to_owned));
    }
    Sum { content, thoughts, calls, endings }
}

#[tokio::test]
async fn calls_whole_and_streamed() {
    let text = "Well.\n<tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": 1}}\n</tool_call>\n\
                <tool_call>\n{\"name\": \"add\", \"arguments\": {\"a\": \"é\\\"\"}}\n</tool_call>";
    let server = TestServer::rich(text);
    let answer = server.post(PATH, ask(json!({}))).await;
    let choice = &answer["choices"][0];
    assert_eq!(choice["finish_reason"], "tool_calls");
    assert_eq!(choice["message"]["content"], "Well.");
    let calls = choice["message"]["tool_calls"].as_array().unwrap();
    let arguments: Vec<_> = calls.iter().map(|call| &call["function"]["arguments"]).collect();
    assert_eq!(arguments, ["{\"a\": 1}", "{\"a\": \"é\\\"\"}"]);
    assert_ne!(calls[0]["id"], calls[1]["id"]);
    assert!(server.last_prompt().starts_with("<tools>{\"type\": \"function\""));

    let sum = add_up(&chunks(&server.stream(PATH, ask(json!({}))).await));
    assert_eq!(sum.content, "Well.");
    assert_eq!(sum.endings, ["tool_calls"]);
    assert_eq!(sum.calls.iter().map(|call| call.2.as_str()).collect::<Vec<_>>(), arguments);

    let one = server.post(PATH, ask(json!({"parallel_tool_calls": false}))).await;
    assert_eq!(one["choices"][0]["message"]["tool_calls"].as_array().unwrap().len(), 1);

    let none = server.post(PATH, ask(json!({"tool_choice": "none"}))).await;
    assert_eq!(none["choices"][0]["message"]["content"], text, "without tools there are no calls");
    assert!(!server.last_prompt().contains("<tools>"));
}

/// A model that may call tools or not is held to their schemas once it begins a call.
#[tokio::test]
async fn calls_of_strict_tools_are_held_to_their_schemas() {
    let tool = |name: &str, is_strict: bool| {
        let parameters = json!({
            "type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"],
            "additionalProperties": false,
        });
        let function = json!({"name": name, "parameters": parameters, "strict": is_strict});
        json!({"type": "function", "function": function})
    };
    let server = TestServer::thinking("Hi");
    let tools = json!([tool("strict", true), tool("free", false)]);
    server.post(PATH, ask(json!({"tools": tools}))).await;
    let call = |name: &str, arguments: &str| {
        format!("<tool_call>\n{{\"name\": \"{name}\", \"arguments\": {arguments}}}\n</tool_call>")
    };
    let allows = |text: &str| server.engine.last_allows(&common::bytes(text)).is_ok();
    assert!(allows("No { call < <tool at all"));
    assert!(allows(&format!("Well: {}", call("strict", "{\"a\": 1}"))));
    assert!(!allows(&call("strict", "{\"a\": \"1\"}")));
    assert!(!allows(&call("strict", "{}")));
    assert!(!allows(&call("unknown", "{}")));
    assert!(allows(&call("free", "{\"a\": \"1\"}")), "it did not ask to be strict");
    let both = call("free", "{}") + "\n" + &call("strict", "{\"a\": true}");
    assert!(!allows(&both));
}

/// What is asked of the answer comes after thoughts, however few they may be.
#[tokio::test]
async fn thoughts_have_a_budget() {
    let server = TestServer::thinking("Hi");
    let said = |thoughts: &str, rest: &str| {
        let (thoughts, rest) = (common::bytes(thoughts), common::bytes(rest));
        [&[THINK], &thoughts[..], &[END_THINK], &rest[..]].concat()
    };
    let allows = |tokens: &[u32]| server.engine.last_allows(tokens);
    server.post(PATH, ask(json!({"thinking_token_budget": 2}))).await;
    assert_eq!(allows(&said("Hm", "Yes")), Ok(()));
    assert_eq!(allows(&said("Hmm", "Yes")), Err(3));
    server.post(PATH, ask(json!({"thinking_token_budget": 0, "guided_choice": ["Yes"]}))).await;
    assert_eq!(allows(&said("", "Yes")), Ok(()));
    assert_eq!(allows(&said("", "No")), Err(2));
    assert_eq!(allows(&said("H", "Yes")), Err(1));
    let plain = TestServer::rich("Hi");
    let refused =
        plain.post_text(PATH, &ask(json!({"thinking_token_budget": 1})).to_string()).await;
    let message = refused.2["error"]["message"].as_str().unwrap();
    assert!(message.contains("`thinking_token_budget`"), "nothing ends these thoughts: {message}");
}

#[tokio::test]
async fn a_call_that_is_cut_is_no_error() {
    let tokens = common::bytes("<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": [1, ");
    let cut = script(&tokens, FinishReason::Length);
    let server = TestServer::rich_with(move |_, _| cut.clone());
    let answer = server.post(PATH, ask(json!({}))).await;
    assert_eq!(answer["choices"][0]["finish_reason"], "length");
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], Value::Null);
    assert_eq!(message["tool_calls"][0]["function"]["arguments"], "{\"a\": [1, ");
    let sum = add_up(&chunks(&server.stream(PATH, ask(json!({}))).await));
    assert_eq!((sum.content.as_str(), sum.calls[0].2.as_str()), ("", "{\"a\": [1, "));
    assert_eq!(sum.endings, ["length"]);
}

#[tokio::test]
async fn results_go_back_into_the_prompt() {
    let server = TestServer::rich("3");
    let call = json!({"id": "c1", "type": "function", "function": {
        "name": "add", "arguments": "{\"a\": 1}",
    }});
    let messages = json!([
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c1", "content": "3"},
    ]);
    server.post(PATH, ask(json!({"messages": messages}))).await;
    let call = "<tool_call>{\"name\": \"add\", \"arguments\": {\"a\": 1}}</tool_call>";
    assert!(server.last_prompt().contains(&format!("|assistant\n{call}||tool\n3|")));
}

#[tokio::test]
async fn models_whose_template_knows_no_tools_are_told() {
    let text = "<tool_call>[{\"name\": \"add\", \"arguments\": {\"a\": 1}}]</tool_call>";
    let server = TestServer::new(FakeEngine::new(|_, _| says(text)).with_context(4096));
    let answer = server.post(PATH, ask(json!({}))).await;
    let call = &answer["choices"][0]["message"]["tool_calls"][0]["function"];
    assert_eq!(call, &json!({"name": "add", "arguments": "{\"a\": 1}"}));
    let prompt = server.last_prompt();
    assert!(prompt.starts_with("|system\nYou can call functions."), "{prompt}");
    assert!(prompt.contains("\"name\":\"add\""), "{prompt}");
}

#[tokio::test]
async fn thoughts_are_told_apart() {
    let server = TestServer::rich("<think>\nHm.\n</think>\n\nYes.");
    let ask = |fields: Value| {
        let mut body = ask(fields);
        body.as_object_mut().unwrap().remove("tools");
        body
    };
    let answer = server.post(PATH, ask(json!({}))).await;
    let message = &answer["choices"][0]["message"];
    assert_eq!(message["content"], "Yes.");
    assert_eq!(message["reasoning_content"], "Hm.");
    // Every byte is a token: "<think>" ends with its own last one, "</think>" too.
    let details = &answer["usage"]["completion_tokens_details"];
    assert_eq!(details["reasoning_tokens"], 1 + "\nHm.\n</think>".len());

    let sum = add_up(&chunks(&server.stream(PATH, ask(json!({}))).await));
    assert_eq!((sum.content.as_str(), sum.thoughts.as_str()), ("Yes.", "Hm."));
    assert_eq!(sum.endings, ["stop"]);

    let answer = server.post(PATH, ask(json!({"include_reasoning": false}))).await;
    assert_eq!(answer["choices"][0]["message"].get("reasoning_content"), None);

    for off in [json!({"enable_thinking": false}), json!({"reasoning_effort": "none"})] {
        server.post(PATH, ask(off)).await;
        assert!(server.last_prompt().ends_with("|assistant\n<think></think>"));
    }
    server.post(PATH, ask(json!({"chat_template_kwargs": {"enable_thinking": false}}))).await;
    assert!(server.last_prompt().ends_with("<think></think>"));
}

#[tokio::test]
async fn the_last_message_is_continued() {
    let server = TestServer::rich(" world");
    let messages = json!([
        {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello "},
    ]);
    let body = json!({
        "messages": messages, "continue_final_message": true, "add_generation_prompt": false,
    });
    server.post(PATH, body).await;
    assert!(server.last_prompt().ends_with("|assistant\nHello "));
}

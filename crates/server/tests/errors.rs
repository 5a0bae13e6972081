//! What is wrong gets a 4xx that names it, and the server goes on.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use axum::body::Body;
use axum::http::{Request, StatusCode};
use common::{TestServer, json_request, read};
use serde_json::{Value, json};

/// Posts a body and compares status, `param` and `code` of the error.
async fn check(server: &TestServer, path: &str, body: &str, expected: (u16, Value, &str)) {
    let (status, _, value) = server.post_text(path, body).await;
    let error = &value["error"];
    let shown = &body[..body.len().min(100)];
    assert_eq!(status, expected.0, "{shown}: {value}");
    assert_eq!(error["param"], expected.1, "{shown}: {value}");
    assert_eq!(error["code"], expected.2, "{shown}: {value}");
    assert_eq!(error["type"], "invalid_request_error", "{shown}: {value}");
    assert!(!error["message"].as_str().unwrap().is_empty(), "{shown}");
    assert_eq!(error.as_object().unwrap().len(), 4, "{value}");
}

#[tokio::test]
async fn fields_of_completions() {
    let server = TestServer::saying("x");
    let cases = [
        (json!({}), "prompt", "missing_required_parameter"),
        (json!({"prompt": null}), "prompt", "missing_required_parameter"),
        (json!({"prompt": ""}), "prompt", "invalid_value"),
        (json!({"prompt": []}), "prompt", "invalid_value"),
        (json!({"prompt": [[]]}), "prompt", "invalid_value"),
        (json!({"prompt": 5}), "prompt", "invalid_value"),
        (json!({"prompt": ["a", 1]}), "prompt", "invalid_value"),
        (json!({"prompt": [-1]}), "prompt[0]", "invalid_value"),
        (json!({"prompt": [261]}), "prompt", "invalid_value"),
        (json!({"prompt": vec![1; 256]}), "prompt", "context_length_exceeded"),
        (json!({"prompt": vec![1; 257]}), "prompt", "context_length_exceeded"),
        (json!({"prompt": vec![1; 250], "max_tokens": 7}), "max_tokens", "context_length_exceeded"),
        (json!({"prompt": "a", "max_tokens": 0}), "max_tokens", "invalid_value"),
        (json!({"prompt": "a", "max_tokens": -1}), "max_tokens", "invalid_value"),
        (json!({"prompt": "a", "max_tokens": 1.5}), "max_tokens", "invalid_value"),
        (json!({"prompt": "a", "max_tokens": u64::MAX}), "max_tokens", "context_length_exceeded"),
        (json!({"prompt": "a", "temperature": "hot"}), "temperature", "invalid_value"),
        (json!({"prompt": "a", "temperature": -1}), "temperature", "invalid_value"),
        (json!({"prompt": "a", "temperature": 1e39}), "temperature", "invalid_value"),
        (json!({"prompt": "a", "top_p": 0}), "top_p", "invalid_value"),
        (json!({"prompt": "a", "top_p": 1.1}), "top_p", "invalid_value"),
        (json!({"prompt": "a", "top_k": -2}), "top_k", "invalid_value"),
        (json!({"prompt": "a", "min_p": 2}), "min_p", "invalid_value"),
        (json!({"prompt": "a", "repetition_penalty": 0}), "repetition_penalty", "invalid_value"),
        (json!({"prompt": "a", "presence_penalty": 3}), "presence_penalty", "invalid_value"),
        (json!({"prompt": "a", "frequency_penalty": -3}), "frequency_penalty", "invalid_value"),
        (json!({"prompt": "a", "logit_bias": {"999": 1}}), "logit_bias", "invalid_value"),
        (json!({"prompt": "a", "logit_bias": {"1": "x"}}), "logit_bias.1", "invalid_value"),
        (json!({"prompt": "a", "logit_bias": [1]}), "logit_bias", "invalid_value"),
        (json!({"prompt": "a", "seed": 1.5}), "seed", "invalid_value"),
        (json!({"prompt": "a", "n": 0}), "n", "invalid_value"),
        (json!({"prompt": "a", "n": 129}), "n", "invalid_value"),
        (json!({"prompt": vec!["a"; 9], "n": 128}), "n", "invalid_value"),
        (json!({"prompt": "a", "stop": ""}), "stop", "invalid_value"),
        (json!({"prompt": "a", "stop": [1]}), "stop[0]", "invalid_value"),
        (json!({"prompt": "a", "stop": 1}), "stop", "invalid_value"),
        (json!({"prompt": "a", "stop_token_ids": [999]}), "stop_token_ids", "invalid_value"),
        (json!({"prompt": "a", "stop_token_ids": [-1]}), "stop_token_ids[0]", "invalid_value"),
        (json!({"prompt": "a", "min_tokens": 17}), "min_tokens", "invalid_value"),
        (json!({"prompt": "a", "logprobs": 21}), "logprobs", "invalid_value"),
        (json!({"prompt": "a", "logprobs": true}), "logprobs", "invalid_value"),
        (json!({"prompt": "a", "best_of": 0}), "best_of", "invalid_value"),
        (json!({"prompt": "a", "suffix": "b"}), "suffix", "unsupported_parameter"),
        (
            json!({"prompt": "a", "use_beam_search": true}),
            "use_beam_search",
            "unsupported_parameter",
        ),
        (json!({"prompt": "a", "stream": "yes"}), "stream", "invalid_value"),
        (json!({"prompt": "a", "stream_options": {}}), "stream_options", "invalid_value"),
        (
            json!({"prompt": "a", "stream": true, "stream_options": {"usage": true}}),
            "stream_options.usage",
            "invalid_value",
        ),
        (json!({"prompt": "a", "messages": []}), "messages", "unknown_parameter"),
        (json!({"prompt": "a", "temprature": 1}), "temprature", "unknown_parameter"),
    ];
    for (body, param, code) in cases {
        check(&server, "/v1/completions", &body.to_string(), (400, json!(param), code)).await;
    }
    assert!(server.engine.requests().is_empty(), "nothing wrong reaches the engine");
    server.post("/v1/completions", json!({"prompt": "a"})).await;
}

#[tokio::test]
async fn fields_of_chat_completions() {
    let server = TestServer::saying("x");
    let cases = [
        (json!({"messages": null}), "messages", "missing_required_parameter"),
        (json!({"messages": []}), "messages", "invalid_value"),
        (json!({"messages": "Hi"}), "messages", "invalid_value"),
        (json!({"messages": [{"content": "a"}]}), "messages[0]", "invalid_value"),
        (json!({"messages": [{"role": "user"}]}), "messages[0].content", "invalid_value"),
        (json!({"messages": [{"role": "x", "content": ""}]}), "messages[0].role", "invalid_value"),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages[0].content[0].type",
            "invalid_value",
        ),
        (
            json!({"messages": [
                {"role": "user", "content": "a"}, {"role": "system", "content": "a"},
            ]}),
            "messages",
            "invalid_value",
        ),
        (
            json!({"messages": [{"role": "user", "content": "a".repeat(300)}]}),
            "messages",
            "context_length_exceeded",
        ),
        (json!({"max_tokens": 300}), "max_tokens", "context_length_exceeded"),
        (json!({"max_completion_tokens": 0}), "max_completion_tokens", "invalid_value"),
        (json!({"max_completion_tokens": 1, "max_tokens": 2}), "max_tokens", "invalid_value"),
        (json!({"logprobs": 1}), "logprobs", "invalid_value"),
        (json!({"top_logprobs": 1}), "top_logprobs", "invalid_value"),
        (json!({"logprobs": true, "top_logprobs": 21}), "top_logprobs", "invalid_value"),
        (json!({"tools": [{"type": "function"}]}), "tools[0]", "invalid_value"),
        (json!({"tools": [{"type": "retrieval"}]}), "tools[0].type", "invalid_value"),
        (
            json!({"tools": [{"type": "function", "function": {"name": "a b"}}]}),
            "tools[0].function",
            "invalid_value",
        ),
        (json!({"tool_choice": "required"}), "tool_choice", "invalid_value"),
        (json!({"tool_choice": "perhaps"}), "tool_choice", "invalid_value"),
        (json!({"functions": [{}]}), "functions", "unsupported_parameter"),
        (
            json!({"guided_json": {"type": "array", "uniqueItems": true}}),
            "guided_json",
            "invalid_value",
        ),
        (json!({"guided_regex": "a("}), "guided_regex", "invalid_value"),
        (json!({"guided_choice": []}), "guided_choice", "invalid_value"),
        (json!({"grammar": "root ::= other"}), "grammar", "invalid_value"),
        (json!({"response_format": {"type": "a"}}), "response_format.type", "invalid_value"),
        (json!({"modalities": ["text", "audio"]}), "modalities", "unsupported_parameter"),
        (json!({"store": true}), "store", "unsupported_parameter"),
        (json!({"reasoning_effort": "high"}), "reasoning_effort", "unsupported_parameter"),
        (json!({"enable_thinking": true}), "enable_thinking", "unsupported_parameter"),
        (json!({"service_tier": "flex"}), "service_tier", "unsupported_parameter"),
        (
            json!({"continue_final_message": true, "add_generation_prompt": true}),
            "continue_final_message",
            "invalid_value",
        ),
        (json!({"prompt": "a"}), "prompt", "unknown_parameter"),
    ];
    for (mut body, param, code) in cases {
        let fields = body.as_object_mut().unwrap();
        fields.entry("messages").or_insert(json!([{"role": "user", "content": "Hi"}]));
        check(&server, "/v1/chat/completions", &body.to_string(), (400, json!(param), code)).await;
    }
    assert!(server.engine.requests().is_empty(), "nothing wrong reaches the engine");
}

#[tokio::test]
async fn neutral_fields_are_accepted() {
    let server = TestServer::saying("x");
    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "user": "ann", "metadata": {"a": "b"},
        "store": false, "service_tier": "auto", "parallel_tool_calls": true, "tools": [],
        "tool_choice": "none", "response_format": {"type": "text"}, "modalities": ["text"],
        "safety_identifier": "x", "prompt_cache_key": "y", "logprobs": false, "stop": null,
        "temperature": null, "stream": false, "stream_options": null,
    });
    server.post("/v1/chat/completions", body).await;
}

#[tokio::test]
async fn bodies() {
    let server = TestServer::saying("x");
    let path = "/v1/completions";
    let bad = |_| (400, Value::Null, "invalid_json");
    for body in ["", "{", "[]", "3", "null", "{\"prompt\": \"a\",}", "{\"prompt\": }", "\u{0}"] {
        check(&server, path, body, bad(())).await;
    }
    let nested = format!("{{\"prompt\": {}1{}}}", "[".repeat(20_000), "]".repeat(20_000));
    check(&server, path, &nested, (400, json!("prompt[0][0]"), "invalid_value")).await;
    let large = json!({"prompt": "a".repeat(70_000)}).to_string();
    check(&server, path, &large, (413, Value::Null, "body_too_large")).await;

    for content_type in [None, Some("text/plain")] {
        let mut request = Request::post(path);
        if let Some(content_type) = content_type {
            request = request.header("content-type", content_type);
        }
        let request = request.body(Body::from("{\"prompt\": \"a\"}")).unwrap();
        let (status, _, value) = read(server.send(request).await).await;
        assert_eq!(status, StatusCode::UNSUPPORTED_MEDIA_TYPE, "{value}");
        assert_eq!(value["error"]["code"], "unsupported_content_type");
    }
    let mut request = json_request(path, "{\"prompt\": \"a\"}");
    let content_type = "Application/JSON; charset=utf-8".parse().unwrap();
    request.headers_mut().insert("content-type", content_type);
    assert_eq!(server.send(request).await.status(), StatusCode::OK);
}

#[tokio::test]
async fn models_and_routes() {
    let server = TestServer::saying("x");
    let body = json!({"model": "gpt-9", "prompt": "a"}).to_string();
    check(&server, "/v1/completions", &body, (404, json!("model"), "model_not_found")).await;
    check(&server, "/v1/edits", "{}", (404, Value::Null, "unknown_url")).await;
    check(&server, "/v1/models", "{}", (405, Value::Null, "method_not_allowed")).await;

    let (status, list) = server.get("/v1/models").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(list["object"], "list");
    let names: Vec<_> = list["data"].as_array().unwrap().iter().map(|m| m["id"].clone()).collect();
    assert_eq!(names, ["tiny", "org/tiny"]);
    let (status, model) = server.get("/v1/models/org/tiny").await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(model["id"], "org/tiny");
    assert_eq!(model["object"], "model");
    assert_eq!(model["max_model_len"], 256);
    let (status, error) = server.get("/v1/models/other").await;
    assert_eq!(
        (status, &error["error"]["code"]),
        (StatusCode::NOT_FOUND, &json!("model_not_found"))
    );
    let (status, error) = server.get("/v1/completions").await;
    assert_eq!(status, StatusCode::METHOD_NOT_ALLOWED);
    assert_eq!(error["error"]["type"], "invalid_request_error");
    assert_eq!(server.get("/version").await.1, json!({"version": env!("CARGO_PKG_VERSION")}));
}

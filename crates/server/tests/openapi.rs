//! The API's description and the server hold each other to what they say.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use axum::http::StatusCode;
use common::{END, FakeEngine, TestServer, says, script};
use inflight_engine::FinishReason;
use inflight_server::{ApiKeys, FileStore};
use serde_json::{Map, Value, json};

async fn document(server: &TestServer) -> Value {
    let (status, document) = server.get("/openapi.json").await;
    assert_eq!(status, StatusCode::OK);
    document
}

/// Paths and body schemas of all endpoints that take a body.
fn bodies(document: &Value) -> Vec<(String, Value)> {
    let paths = document["paths"].as_object().unwrap();
    let posts = paths.iter().filter_map(|(path, methods)| Some((path, methods.get("post")?)));
    let body = |post: &Value| post["requestBody"]["content"]["application/json"]["schema"].clone();
    posts.map(|(path, post)| (path.clone(), body(post))).collect()
}

/// A body that an endpoint takes.
fn valid(path: &str) -> Map<String, Value> {
    let messages = json!([{"role": "user", "content": "a"}]);
    let body = match path {
        "/v1/completions" => json!({"prompt": "a"}),
        "/v1/chat/completions" => json!({"messages": messages}),
        "/v1/responses" | "/v1/embeddings" => json!({"input": "a"}),
        "/v1/messages" => json!({"messages": messages, "max_tokens": 4}),
        "/v1/messages/count_tokens" | "/tokenize" => json!({"messages": messages}),
        "/detokenize" => json!({"tokens": [97]}),
        other => panic!("{other} is new here"),
    };
    body.as_object().unwrap().clone()
}

async fn post(server: &TestServer, path: &str, body: &Map<String, Value>) -> (u16, Value) {
    let text = Value::Object(body.clone()).to_string();
    let (status, _, answer) = server.post_text(path, &text).await;
    (status.as_u16(), answer)
}

#[tokio::test]
async fn every_field_is_known_and_no_other() {
    let server = TestServer::saying("x");
    let document = document(&server).await;
    let bodies = bodies(&document);
    assert_eq!(bodies.len(), 8);
    for (path, schema) in &bodies {
        let properties = schema["properties"].as_object().unwrap();
        assert!(!properties.is_empty() && schema["additionalProperties"] == false, "{path}");
        let mut body = valid(path);
        assert!(body.keys().all(|name| properties.contains_key(name)), "{path}");
        for name in properties.keys() {
            // Neither is any field's value; a wrong value is not an unknown field.
            for wrong in [json!({"\u{0}": [[]]}), json!([[[[]]]])] {
                let mut body = body.clone();
                body.insert(name.clone(), wrong);
                let (_, answer) = post(&server, path, &body).await;
                assert!(!answer.to_string().contains("is not a field"), "{path} {name}: {answer}");
            }
        }
        body.insert("no_such_field".to_owned(), json!(1));
        let (status, answer) = post(&server, path, &body).await;
        assert_eq!(status, 400, "{path}");
        assert!(answer.to_string().contains("`no_such_field` is not a field"), "{answer}");
    }
}

#[tokio::test]
async fn required_fields_are_required() {
    let server = TestServer::saying("x");
    for (path, schema) in bodies(&document(&server).await) {
        for name in schema["required"].as_array().unwrap() {
            let name = name.as_str().unwrap();
            let mut body = valid(&path);
            for missing in [None, Some(Value::Null)] {
                body.remove(name);
                body.extend(missing.map(|null| (name.to_owned(), null)));
                let (status, answer) = post(&server, &path, &body).await;
                assert_eq!(status, 400, "{path} {name}: {answer}");
                assert!(answer.to_string().contains(name), "{answer}");
            }
        }
    }
}

/// The page and its parts are for people, and the document need not name itself.
#[tokio::test]
async fn every_route_is_in_the_document() {
    let folder = std::env::temp_dir().join(format!("inflight-openapi-{}", std::process::id()));
    let store = FileStore::open(&folder, 1).unwrap();
    let server = TestServer::set(FakeEngine::new(|_, _| says("x")), |it| it.files = Some(store));
    let document = document(&server).await;
    std::fs::remove_dir_all(folder).unwrap();
    let described: Vec<_> = document["paths"].as_object().unwrap().keys().collect();
    let routes = include_str!("../src/serve.rs").split(".route(\"").skip(1);
    let routes: Vec<_> = routes.map(|rest| rest.split('"').next().unwrap()).collect();
    assert!(routes.len() > 20, "{routes:?}");
    for route in routes {
        let is_page = matches!(route, "/" | "/docs") || route.starts_with("/web/");
        let path = route.replace("{*id}", "{model}");
        assert!(is_page || described.contains(&&path), "{route} is in no document");
    }
}

/// A little beyond a bound: what one more or less is depends on what is counted.
fn beyond(schema: &Value, bound: &str, sign: f64) -> Option<(Value, Value)> {
    let at = schema.get(bound)?.as_f64()?;
    // Others are the types' own bounds, whose neighbours no JSON number tells apart.
    if at.abs() > 1e9 {
        return None;
    }
    let is_integer = schema["type"].to_string().contains("integer");
    let number = |x: f64| if is_integer { json!(x as i64) } else { json!(x) };
    Some((number(at), number(at + sign * if is_integer { 1.0 } else { 0.01 })))
}

#[tokio::test]
async fn ranges_are_what_the_server_takes() {
    let ends = || script(&[END], FinishReason::Stop { token: END });
    let server = TestServer::new(FakeEngine::new(move |_, _| ends()).with_max_running(4096));
    let mut num_bounds = 0;
    for (path, schema) in bodies(&document(&server).await) {
        for (name, property) in schema["properties"].as_object().unwrap() {
            for (bound, sign) in [("minimum", -1.0), ("maximum", 1.0)] {
                let Some((inside, outside)) = beyond(property, bound, sign) else { continue };
                num_bounds += 1;
                let mut body = valid(&path);
                // What goes only together.
                match name.as_str() {
                    "top_logprobs" if path.contains("chat") => {
                        body.insert("logprobs".to_owned(), json!(true));
                    }
                    "dry_base" | "dry_penalty_last_n" => {
                        body.insert("dry_multiplier".to_owned(), json!(1));
                    }
                    _ => {}
                }
                body.insert(name.clone(), outside.clone());
                let (status, answer) = post(&server, &path, &body).await;
                assert_eq!(status, 400, "{path} {name} {outside}: {answer}");
                assert!(answer.to_string().contains(name), "{answer}");
                // The longest output leaves no room for this prompt, which the field's own type
                // cannot tell.
                if !(name.starts_with("max_") && bound == "maximum") {
                    body.insert(name.clone(), inside.clone());
                    let (status, answer) = post(&server, &path, &body).await;
                    assert_eq!(status, 200, "{path} {name} {inside}: {answer}");
                }
            }
        }
    }
    assert!(num_bounds > 50, "{num_bounds}");
}

#[tokio::test]
async fn references_lead_somewhere() {
    fn check(value: &Value, document: &Value) {
        match value {
            Value::Array(items) => items.iter().for_each(|item| check(item, document)),
            Value::Object(fields) => {
                if let Some(Value::String(reference)) = fields.get("$ref") {
                    let pointer = reference.strip_prefix('#').unwrap();
                    assert!(document.pointer(pointer).is_some(), "{reference}");
                }
                fields.values().for_each(|value| check(value, document));
            }
            _ => {}
        }
    }
    let document = document(&TestServer::saying("x")).await;
    assert_eq!(document["openapi"], "3.1.0");
    check(&document, &document);
}

#[tokio::test]
async fn keys_are_described_where_there_are_any() {
    let open = document(&TestServer::saying("x")).await;
    assert!(open.get("security").is_none());
    assert!(open["components"].get("securitySchemes").is_none());
    let server = TestServer::set(FakeEngine::new(|_, _| says("x")), |config| {
        let mut keys = ApiKeys::default();
        keys.add_file("sk-1").unwrap();
        config.keys = keys;
    });
    let guarded = document(&server).await;
    assert_eq!(guarded["security"], json!([{"bearer": []}, {"header": []}]));
    let responses = &guarded["paths"]["/v1/models"]["get"]["responses"];
    assert!(responses.get("401").is_some(), "{responses}");
    assert_eq!(guarded["paths"]["/health"]["get"]["security"], json!([]));
}

#[tokio::test]
async fn the_document_is_this_servers() {
    let document = document(&TestServer::saying("x")).await;
    let chat = &document["paths"]["/v1/chat/completions"]["post"];
    let fields = &chat["requestBody"]["content"]["application/json"]["schema"]["properties"];
    assert_eq!(fields["model"]["enum"], json!(["tiny", "org/tiny", null]));
    assert_eq!(fields["max_tokens"]["maximum"], 255, "the context has 256 tokens");
    assert_eq!(fields["stop_token_ids"]["items"]["maximum"], 260, "the vocabulary has 261");
    assert_eq!(fields["priority"]["maximum"], 0, "priorities are not gone by");
    let contents = chat["responses"]["200"]["content"].as_object().unwrap();
    assert_eq!(contents.keys().collect::<Vec<_>>(), ["application/json", "text/event-stream"]);
}

/// serde takes a variant's number for its tag in some places.
#[tokio::test]
async fn types_are_words() {
    let server = TestServer::saying("x");
    let result = json!([{"role": "user", "content": [
        {"type": "tool_result", "tool_use_id": "t", "content": [{"type": 0, "text": "a"}]},
    ]}]);
    let function = json!({"name": "f"});
    let tools = json!([{"type": "function", "function": function}]);
    for (path, name, value) in [
        ("/v1/messages/count_tokens", "messages", result),
        ("/v1/messages/count_tokens", "system", json!([{"type": 0, "text": "a"}])),
        ("/v1/chat/completions", "tool_choice", json!({"type": 0, "function": function})),
        ("/v1/chat/completions", "response_format", json!({"type": 0})),
        ("/v1/responses", "tool_choice", json!({"type": 0, "name": "f"})),
        (
            "/v1/responses",
            "input",
            json!([{"role": "user", "content": [{"type": 0, "text": "a"}]}]),
        ),
        ("/v1/messages/count_tokens", "thinking", json!({"type": 1})),
    ] {
        let mut body = valid(path);
        if path.contains("chat") {
            body.insert("tools".to_owned(), tools.clone());
        }
        body.insert(name.to_owned(), value.clone());
        let (status, answer) = post(&server, path, &body).await;
        assert_eq!(status, 400, "{path} {value}: {answer}");
    }
}

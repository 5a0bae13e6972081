//! Keys, limits, origins, late bodies, panics.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use std::time::Duration;

use axum::body::Body;
use axum::http::{HeaderMap, Method, Request, StatusCode};
use common::{FakeEngine, TestServer, bytes, read, says, script};
use futures_util::StreamExt;
use inflight_engine::FinishReason;
use inflight_server::{ApiKeys, ServerConfig};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";
const COMPLETIONS: &str = "/v1/completions";
const MESSAGES: &str = "/v1/messages";

fn keys(file: &str) -> impl FnOnce(&mut ServerConfig) {
    let mut keys = ApiKeys::default();
    keys.add_file(file).unwrap();
    |config| config.keys = keys
}

fn guarded(file: &str) -> TestServer {
    TestServer::set(FakeEngine::new(|_, _| says("x")), keys(file))
}

/// A request with these headers; a POST if it has a body.
fn request(path: &str, headers: &[(&str, &str)], body: Option<Value>) -> Request<Body> {
    let method = if body.is_some() { Method::POST } else { Method::GET };
    let mut request = Request::builder().method(method).uri(path);
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    let request = request.header("content-type", "application/json");
    request.body(body.map_or_else(Body::empty, |body| Body::from(body.to_string()))).unwrap()
}

async fn post(server: &TestServer, key: &str, path: &str) -> (StatusCode, HeaderMap, Value) {
    let body = json!({
        "messages": [{"role": "user", "content": "a"}], "max_tokens": 4, "stream": false,
    });
    let body = if path == COMPLETIONS { json!({"prompt": "abcd", "max_tokens": 4}) } else { body };
    let authorization = format!("Bearer {key}");
    read(server.send(request(path, &[("authorization", &authorization)], Some(body))).await).await
}

#[tokio::test]
async fn every_path_but_the_open_ones_needs_a_key() {
    let server = guarded("sk-1 name=ann");
    for path in ["/", "/health", "/health/live", "/health/ready", "/version", "/web/chat.js"] {
        let response = server.send(request(path, &[], None)).await;
        assert_eq!(response.status(), StatusCode::OK, "{path}");
    }
    let closed = ["/v1/models", "/metrics", "/debug/state", "/debug/timeline", "/nothing"];
    for path in closed {
        let (status, headers, error) = read(server.send(request(path, &[], None)).await).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(headers["www-authenticate"], "Bearer");
        assert_eq!(error["error"]["code"], "invalid_api_key", "{path}");
    }
    for path in [CHAT, COMPLETIONS, "/v1/embeddings", "/tokenize", "/v1/responses"] {
        let (status, _, error) = read(server.send(request(path, &[], Some(json!({})))).await).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{path}");
        assert_eq!(error["error"]["type"], "authentication_error", "{path}");
    }
    assert_eq!(server.engine.requests().len(), 0);
}

#[tokio::test]
async fn keys_come_in_either_header_and_errors_in_either_form() {
    let server = guarded("sk-1 name=ann");
    for (header, value) in [("authorization", "Bearer sk-1"), ("x-api-key", "sk-1")] {
        let (status, _, _) =
            read(server.send(request("/v1/models", &[(header, value)], None)).await).await;
        assert_eq!(status, StatusCode::OK, "{header}");
    }
    for (header, value) in [
        ("authorization", "Bearer sk-2"),
        ("authorization", "Basic sk-1"),
        ("authorization", "sk-1"),
        ("x-api-key", ""),
        ("x-api-key", "sk-11"),
    ] {
        let answer = server.send(request(MESSAGES, &[(header, value)], Some(json!({})))).await;
        let (status, _, error) = read(answer).await;
        assert_eq!(status, StatusCode::UNAUTHORIZED, "{header}: {value}");
        assert_eq!(error["type"], "error");
        assert_eq!(error["error"]["type"], "authentication_error");
        assert!(!error.to_string().contains("sk-"), "{error}");
    }
}

#[tokio::test]
async fn only_administrators_see_what_others_do() {
    let server = guarded("sk-1 name=ann\nsk-0 admin");
    for path in ["/metrics", "/debug/state", "/debug/timeline"] {
        let get = async |key| server.send(request(path, &[("x-api-key", key)], None)).await;
        assert_eq!(get("sk-0").await.status(), StatusCode::OK, "{path}");
        let (status, _, error) = read(get("sk-1").await).await;
        assert_eq!(status, StatusCode::FORBIDDEN, "{path}");
        assert_eq!(error["error"]["type"], "permission_error");
    }
}

#[tokio::test]
async fn requests_a_minute() {
    let server = guarded("sk-1 name=ann requests_per_minute=2\nsk-2 name=bob");
    let (status, headers, _) = post(&server, "sk-1", COMPLETIONS).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers["x-ratelimit-limit-requests"], "2");
    assert_eq!(headers["x-ratelimit-remaining-requests"], "1");
    assert!(!headers.contains_key("x-ratelimit-limit-tokens"));
    assert_eq!(post(&server, "sk-1", CHAT).await.0, StatusCode::OK);
    for (path, kind) in [(CHAT, "code"), (MESSAGES, "type")] {
        let (status, headers, error) = post(&server, "sk-1", path).await;
        assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
        let seconds: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
        assert!((1..=30).contains(&seconds), "one comes every 30 s, not in {seconds} s");
        let expected = if kind == "code" { "rate_limit_exceeded" } else { "rate_limit_error" };
        assert_eq!(error["error"][kind], expected, "{error}");
    }
    assert_eq!(post(&server, "sk-2", CHAT).await.0, StatusCode::OK, "others are not limited");
    let models = server.send(request("/v1/models", &[("x-api-key", "sk-1")], None)).await;
    assert_eq!(models.status(), StatusCode::OK, "looking is free");
}

#[tokio::test]
async fn tokens_a_minute_count_prompts_and_outputs() {
    let engine = FakeEngine::new(|_, _| script(&bytes("xyz"), FinishReason::Length));
    let server = TestServer::set(engine, keys("sk-1 name=ann tokens_per_minute=8\nsk-0 admin"));
    // A prompt of 4 tokens and 3 tokens of output leave 1; the next request may overdraw it.
    let (status, headers, _) = post(&server, "sk-1", COMPLETIONS).await;
    assert_eq!(status, StatusCode::OK);
    assert_eq!(headers["x-ratelimit-remaining-tokens"], "1");
    assert_eq!(post(&server, "sk-1", COMPLETIONS).await.0, StatusCode::OK);
    let (status, headers, error) = post(&server, "sk-1", COMPLETIONS).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{error}");
    // 6 are owed and 1 is needed, at 8 a minute: 52.5 s.
    let seconds: u64 = headers["retry-after"].to_str().unwrap().parse().unwrap();
    assert!((51..=53).contains(&seconds), "{seconds}");

    let state = server.send(request("/debug/state", &[("x-api-key", "sk-0")], None)).await;
    let (_, _, state) = read(state).await;
    let expected = json!({
        "name": "ann", "admin": false, "running": 0, "requests": 2, "refused": 1,
        "prompt_tokens": 8, "generated_tokens": 6,
    });
    assert_eq!(state["keys"][0], expected);
}

#[tokio::test]
async fn requests_at_once_end_with_their_streams() {
    let endless = FakeEngine::new(|_, _| {
        let mut updates = script(&bytes("ab"), FinishReason::Length);
        updates.pop();
        updates
    });
    let server = TestServer::set(endless, keys("sk-1 name=ann max_concurrent=1\nsk-2 name=bob"));
    let body = json!({"prompt": "a", "max_tokens": 9, "stream": true});
    let stream =
        server.send(request(COMPLETIONS, &[("x-api-key", "sk-1")], Some(body.clone()))).await;
    assert_eq!(stream.status(), StatusCode::OK);
    let mut stream = stream.into_body().into_data_stream();
    stream.next().await.unwrap().unwrap();
    let (status, headers, error) = post(&server, "sk-1", COMPLETIONS).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS, "{error}");
    assert!(headers.contains_key("retry-after"));
    let other = server.send(request(COMPLETIONS, &[("x-api-key", "sk-2")], Some(body))).await;
    assert_eq!(other.status(), StatusCode::OK);
    drop(other);
    server.engine.finish(&FinishReason::Length);
    while stream.next().await.is_some() {}
    drop(stream);
    let models = json!({"text": 1});
    let answer = server.send(request("/tokenize", &[("x-api-key", "sk-1")], Some(models))).await;
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST, "it was let in");
}

#[tokio::test]
async fn named_keys_are_tenants_whatever_the_user() {
    let server = guarded("sk-1 name=ann\nsk-0 admin");
    for (key, body) in [
        ("sk-1", json!({"prompt": "a", "user": "u"})),
        ("sk-1", json!({"prompt": "a"})),
        ("sk-0", json!({"prompt": "a", "user": "u"})),
        ("sk-0", json!({"prompt": "a"})),
    ] {
        let answer = server.send(request(COMPLETIONS, &[("x-api-key", key)], Some(body))).await;
        assert_eq!(answer.status(), StatusCode::OK);
    }
    let expected = [Some("ann"), Some("ann"), Some("u"), None];
    assert_eq!(server.engine.tenants(), expected.map(|name| name.map(str::to_owned)));
}

#[tokio::test]
async fn pages_of_listed_origins_may_ask() {
    let origin = "https://example.org";
    let server = |origins: &'static [&'static str]| {
        TestServer::set(FakeEngine::new(|_, _| says("x")), move |config| {
            assert!(origins.iter().all(|origin| config.cors_origins.add(origin)));
            keys("sk-1")(config);
        })
    };
    let preflight = |origin: &str| {
        Request::options(CHAT)
            .header("origin", origin)
            .header("access-control-request-method", "POST")
            .header("access-control-request-headers", "authorization,content-type")
            .body(Body::empty())
            .unwrap()
    };
    let listed = server(&["https://example.org", "http://localhost:3000"]);
    let answer = listed.send(preflight(origin)).await;
    assert_eq!(answer.status(), StatusCode::NO_CONTENT, "without a key");
    let headers = answer.headers();
    assert_eq!(headers["access-control-allow-origin"], origin);
    assert_eq!(headers["access-control-allow-headers"], "authorization,content-type");
    assert!(headers["access-control-allow-methods"].to_str().unwrap().contains("POST"));
    assert_eq!(headers["vary"], "origin");

    let foreign = listed.send(preflight("https://evil.example")).await;
    assert!(!foreign.headers().contains_key("access-control-allow-origin"));
    assert_ne!(foreign.status(), StatusCode::NO_CONTENT);

    let get = |origin| request("/v1/models", &[("origin", origin), ("x-api-key", "sk-1")], None);
    let answer = listed.send(get(origin)).await;
    assert_eq!(answer.headers()["access-control-allow-origin"], origin);
    let refused = listed.send(request("/v1/models", &[("origin", origin)], None)).await;
    assert_eq!(refused.status(), StatusCode::UNAUTHORIZED);
    let readable = &refused.headers()["access-control-allow-origin"];
    assert_eq!(readable, origin, "a page may read what is wrong");

    let any = server(&["*"]).send(get("https://evil.example")).await;
    assert_eq!(any.headers()["access-control-allow-origin"], "*");
    let none = server(&[]).send(get(origin)).await;
    assert!(!none.headers().contains_key("access-control-allow-origin"));
    assert_eq!(server(&[]).send(preflight(origin)).await.status(), StatusCode::UNAUTHORIZED);
}

#[tokio::test]
async fn a_body_that_does_not_come_is_given_up() {
    let server = TestServer::set(FakeEngine::new(|_, _| says("x")), |config| {
        config.receive_timeout = Duration::from_millis(20);
    });
    for path in [COMPLETIONS, MESSAGES] {
        let start = futures_util::stream::iter([Ok::<_, std::io::Error>("{\"prompt\"")]);
        let body = Body::from_stream(start.chain(futures_util::stream::pending()));
        let request = Request::post(path).header("content-type", "application/json");
        let (status, _, error) = read(server.send(request.body(body).unwrap()).await).await;
        assert_eq!(status, StatusCode::REQUEST_TIMEOUT, "{error}");
        assert!(error["error"]["message"].as_str().unwrap().contains("did not arrive in time"));
    }
}

#[tokio::test]
async fn the_server_outlives_a_panic_and_tells_nothing_of_it() {
    let engine = FakeEngine::new(|_, number| {
        assert_ne!(number, 0, "a secret at /home/somebody");
        says("x")
    });
    let server = TestServer::new(engine);
    let body = json!({"messages": [{"role": "user", "content": "a"}], "max_tokens": 4});
    let answer = server.send(request(MESSAGES, &[], Some(body))).await;
    let (status, _, error) = read(answer).await;
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(error["error"]["type"], "api_error");
    assert!(!error.to_string().contains("secret"), "{error}");
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
}

#[tokio::test]
async fn errors_of_unknown_paths_have_the_form_of_their_api() {
    let server = TestServer::saying("x");
    let (status, error) = server.get("/v1/messages/batches").await;
    assert_eq!((status, &error["type"]), (StatusCode::NOT_FOUND, &json!("error")));
    let (status, error) = server.get(MESSAGES).await;
    assert_eq!((status, &error["type"]), (StatusCode::METHOD_NOT_ALLOWED, &json!("error")));
    let (status, error) = server.get("/v1/nothing").await;
    assert_eq!((status, &error["type"]), (StatusCode::NOT_FOUND, &Value::Null));
}

#[tokio::test]
async fn the_servers_limit_of_time_reaches_the_engine() {
    let server = TestServer::set(FakeEngine::new(|_, _| says("x")), |config| {
        config.request_timeout = Some(Duration::from_secs(9));
    });
    for body in [
        json!({"prompt": "a"}),
        json!({"prompt": "a", "timeout_ms": 1000}),
        json!({"prompt": "a", "timeout_ms": 60_000}),
    ] {
        server.post(COMPLETIONS, body).await;
    }
    assert_eq!(server.engine.timeouts(), [9, 1, 9].map(|s| Some(Duration::from_secs(s))));
}

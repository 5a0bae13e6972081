//! Metrics, the engine's state, and the page at `/`.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use common::TestServer;
use serde_json::json;

async fn text(server: &TestServer, path: &str) -> (StatusCode, String, String) {
    let response = server.send(Request::get(path).body(Body::empty()).unwrap()).await;
    let (status, headers) = (response.status(), response.headers().clone());
    let body = to_bytes(response.into_body(), usize::MAX).await.unwrap();
    let content_type = headers["content-type"].to_str().unwrap().to_owned();
    (status, content_type, String::from_utf8(body.to_vec()).unwrap())
}

/// The value of the sample whose line starts with `name`.
fn sample(metrics: &str, name: &str) -> f64 {
    let line = metrics.lines().find(|line| line.starts_with(name));
    line.unwrap_or_else(|| panic!("no {name}")).rsplit_once(' ').unwrap().1.parse().unwrap()
}

#[tokio::test]
async fn requests_are_counted_with_their_tokens_and_endings() {
    let server = TestServer::generating(&common::bytes("abc"));
    server.post("/v1/completions", json!({"prompt": "hello", "max_tokens": 3})).await;
    let (status, content_type, metrics) = text(&server, "/metrics").await;
    assert_eq!(
        (status, &*content_type),
        (StatusCode::OK, "text/plain; version=0.0.4; charset=utf-8")
    );
    for (name, expected) in [
        ("inflight_generated_tokens_total{", 3.0),
        ("inflight_requests_total{model_name=\"tiny\",reason=\"length\"}", 1.0),
        ("inflight_time_to_first_token_seconds_count", 1.0),
        ("inflight_kv_cache_leaked_blocks{", 0.0),
        ("inflight_inter_token_latency_seconds_count", 2.0),
        ("vllm:generation_tokens_total{model_name=\"tiny\",engine=\"0\"}", 3.0),
    ] {
        assert_eq!(sample(&metrics, name), expected, "{name}");
    }
    let ended = "vllm:request_success_total{model_name=\"tiny\",engine=\"0\",finished_reason=";
    assert_eq!(sample(&metrics, &format!("{ended}\"length\"}}")), 1.0);
    let help = metrics.lines().filter(|line| line.starts_with("# HELP")).count();
    let types = metrics.lines().filter(|line| line.starts_with("# TYPE")).count();
    assert_eq!(help, types);
}

#[tokio::test]
async fn the_page_is_whole_and_asks_nobody_else() {
    let server = TestServer::generating(&[]);
    let mut size = 0;
    for (path, expected) in [
        ("/", "text/html; charset=utf-8"),
        ("/web/style.css", "text/css; charset=utf-8"),
        ("/web/chat.js", "text/javascript; charset=utf-8"),
        ("/web/dashboard.js", "text/javascript; charset=utf-8"),
    ] {
        let (status, content_type, body) = text(&server, path).await;
        assert_eq!((status, &*content_type), (StatusCode::OK, expected), "{path}");
        let outside = body.replace("http://www.w3.org/2000/svg", "");
        assert!(!outside.contains("http://") && !outside.contains("https://"), "{path}");
        size += body.len();
    }
    assert!(size < 200 << 10, "{size} bytes");
}

#[tokio::test]
async fn a_timeline_has_limits() {
    let server = TestServer::generating(&[]);
    let (status, content_type, body) = text(&server, "/debug/timeline").await;
    assert_eq!((status, &*content_type), (StatusCode::OK, "application/json"));
    assert!(body.starts_with('['), "lanes, and no steps");
    for query in ["seconds=-1", "seconds=1e9", "seconds=x", "format=pdf", "second=1"] {
        let (status, error) = server.get(&format!("/debug/timeline?{query}")).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{query}: {error}");
    }
    let (status, state) = server.get("/debug/state").await;
    assert_eq!((status, &state["models"][0]), (StatusCode::OK, &json!("tiny")));
    assert!(state["engine"].is_null(), "this engine does not tell");
    let (status, error) = server.get("/debug/replay").await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE, "nor does it tell this: {error}");
}

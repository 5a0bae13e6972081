//! Clients that go away, full queues, lost engines, shutting down.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use std::net::SocketAddr;
use std::time::Duration;

use axum::http::StatusCode;
use common::{FakeEngine, TestServer, bytes, says, script};
use inflight_engine::{FinishReason, Lapse, TokenUpdate, Update};
use inflight_server::{ServerConfig, ServerState, serve};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::oneshot;

const PATH: &str = "/v1/completions";

/// An engine whose requests say "ab" and run on.
fn endless() -> FakeEngine {
    FakeEngine::new(|_, _| {
        let mut updates = script(&bytes("ab"), FinishReason::Length);
        updates.pop();
        updates
    })
}

fn token(token: u32) -> Update {
    Update::Token(TokenUpdate { token, ..TokenUpdate::default() })
}

async fn until(mut holds: impl FnMut() -> bool) {
    let wait = async {
        while !holds() {
            tokio::time::sleep(Duration::from_millis(2)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(20), wait).await.expect("it never came to hold");
}

/// A server behind a real socket.
struct Listening {
    address: SocketAddr,
    shutdown: oneshot::Sender<()>,
    ended: tokio::task::JoinHandle<()>,
}

async fn listen(server: &TestServer, shutdown_timeout: Duration) -> Listening {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let (shutdown, told) = oneshot::channel();
    let config = ServerConfig { shutdown_timeout, ..ServerConfig::new("tiny") };
    let state = ServerState::new(server.engine.clone(), common::tokenizer(), config);
    let told = async move { told.await.unwrap() };
    Listening { address, shutdown, ended: tokio::spawn(serve(listener, None, state, told)) }
}

async fn post(address: SocketAddr, body: Value) -> TcpStream {
    let mut stream = TcpStream::connect(address).await.unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
         content-length: {}\r\n\r\n",
        body.len()
    );
    stream.write_all((head + &body).as_bytes()).await.unwrap();
    stream
}

#[tokio::test]
async fn a_client_that_goes_away_aborts_its_sequences() {
    let server = TestServer::new(endless());
    let listening = listen(&server, Duration::ZERO).await;
    for stream in [false, true] {
        let before = server.engine.num_aborted();
        let body = json!({"prompt": "a", "max_tokens": 200, "n": 3, "stream": stream});
        let client = post(listening.address, body).await;
        until(|| server.engine.num_running() == 3).await;
        assert_eq!(server.engine.num_aborted(), before);
        drop(client);
        until(|| server.engine.num_aborted() == before + 3).await;
        assert_eq!(server.engine.num_running(), 0);
    }
}

#[tokio::test]
async fn a_connection_serves_one_request_after_the_other() {
    let server = TestServer::saying("x");
    let listening = listen(&server, Duration::ZERO).await;
    let mut client = post(listening.address, json!({"prompt": "a"})).await;
    for _ in 0..2 {
        let mut answer = String::new();
        while !answer.ends_with('}') {
            let mut buffer = [0; 4096];
            let len = client.read(&mut buffer).await.unwrap();
            assert_ne!(len, 0, "closed after {answer:?}");
            answer += std::str::from_utf8(&buffer[..len]).unwrap();
        }
        assert!(answer.starts_with("HTTP/1.1 200 OK"), "{answer}");
        let again = format!(
            "POST {PATH} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n\
             content-length: 14\r\n\r\n{{\"prompt\":\"b\"}}"
        );
        client.write_all(again.as_bytes()).await.unwrap();
    }
}

#[tokio::test]
async fn a_full_queue_refuses_at_once() {
    let server = TestServer::new(endless().with_max_running(2));
    let body = json!({"prompt": "a", "max_tokens": 200, "n": 3}).to_string();
    let (status, headers, error) = server.post_text(PATH, &body).await;
    assert_eq!(status, StatusCode::TOO_MANY_REQUESTS);
    assert!(headers["retry-after"].to_str().unwrap().parse::<u64>().unwrap() >= 1);
    assert_eq!(error["error"]["type"], "rate_limit_error");
    assert_eq!(error["error"]["code"], "queue_full");
    assert_eq!(server.engine.num_running(), 0, "those that had a place gave it back");
}

#[tokio::test]
async fn whoever_waits_too_long_gets_an_error() {
    let check = async |lapse, status, code: &str| {
        let mut says_when = true;
        for stream in [false, true] {
            let body = json!({"prompt": "a", "timeout_ms": 1000, "stream": stream}).to_string();
            let engine = FakeEngine::new(move |_, _| script(&[], FinishReason::Lapsed(lapse)));
            let (got, headers, error) = TestServer::new(engine).post_text(PATH, &body).await;
            assert_eq!((got, &error["error"]["code"]), (status, &json!(code)));
            says_when &= headers.contains_key("retry-after");
        }
        says_when
    };
    let overloaded = StatusCode::SERVICE_UNAVAILABLE;
    assert!(check(Lapse::QueueTime, overloaded, "queue_timeout").await, "it says when to return");
    check(Lapse::Deadline, StatusCode::GATEWAY_TIMEOUT, "deadline_exceeded").await;
}

#[tokio::test]
async fn priorities_are_refused_where_they_would_change_nothing() {
    let server = TestServer::new(FakeEngine::new(|_, _| says("a")));
    let post = async |priority: i32| {
        let body = json!({"prompt": "a", "priority": priority}).to_string();
        let (status, _, error) = server.post_text(PATH, &body).await;
        (status, error["error"]["param"].clone())
    };
    assert_eq!(post(0).await.0, StatusCode::OK);
    assert_eq!(post(-1).await, (StatusCode::BAD_REQUEST, json!("priority")));
}

#[tokio::test]
async fn a_lost_engine_fails_whole_answers() {
    let server = TestServer::new(endless());
    let body = json!({"prompt": "a", "max_tokens": 200}).to_string();
    let engine = server.engine.clone();
    let lose = async move {
        until(|| engine.num_running() == 1).await;
        engine.die();
    };
    let ((status, _, error), ()) = tokio::join!(server.post_text(PATH, &body), lose);
    assert_eq!(status, StatusCode::INTERNAL_SERVER_ERROR);
    assert_eq!(error["error"]["type"], "server_error");
    let message = error["error"]["message"].as_str().unwrap();
    assert!(message.contains("the engine failed"), "{message}");
    assert!(!message.contains("the device is lost"), "how is for the log: {message}");

    let (status, _, error) = server.post_text(PATH, &body).await;
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(error["error"]["type"], "service_unavailable_error");
    assert_eq!(server.get("/health").await.0, StatusCode::SERVICE_UNAVAILABLE);
}

#[tokio::test]
async fn a_lost_engine_ends_streams_with_an_error() {
    let server = TestServer::new(FakeEngine::new(|_, _| {
        script(&bytes("a"), FinishReason::Failed("no device".to_owned()))
    }));
    assert_eq!(server.get("/health").await.0, StatusCode::OK);
    let stream = server.stream(PATH, json!({"prompt": "a"})).await;
    assert_eq!(stream.len(), 2, "{stream:?}");
    let chunk: Value = serde_json::from_str(&stream[0]).unwrap();
    assert_eq!(chunk["choices"][0]["text"], "a");
    let error: Value = serde_json::from_str(&stream[1]).unwrap();
    assert_eq!(error["error"]["type"], "server_error");
}

#[tokio::test]
async fn shutting_down_lets_running_requests_finish() {
    let server = TestServer::new(endless());
    let listening = listen(&server, Duration::from_secs(60)).await;
    let body = json!({"prompt": "a", "max_tokens": 200, "stream": true});
    let mut client = post(listening.address, body).await;
    until(|| server.engine.num_running() == 1).await;
    listening.shutdown.send(()).unwrap();
    until(|| std::net::TcpStream::connect(listening.address).is_err()).await;
    server.engine.send(&token(99));
    server.engine.finish(&FinishReason::Length);
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("\"text\":\"c\"") && answer.contains("data: [DONE]"), "{answer}");
    listening.ended.await.unwrap();
    assert_eq!(server.engine.num_aborted(), 0);
}

#[tokio::test]
async fn shutting_down_ends_requests_that_take_too_long() {
    let server = TestServer::new(endless());
    let listening = listen(&server, Duration::from_millis(50)).await;
    let body = json!({"prompt": "a", "max_tokens": 200, "stream": true});
    let mut client = post(listening.address, body).await;
    until(|| server.engine.num_running() == 1).await;
    listening.shutdown.send(()).unwrap();
    let mut answer = String::new();
    client.read_to_string(&mut answer).await.unwrap();
    assert!(answer.contains("the server is shutting down"), "{answer}");
    assert!(!answer.contains("[DONE]"), "{answer}");
    listening.ended.await.unwrap();
    assert_eq!(server.engine.num_aborted(), 1);
}

#[tokio::test]
async fn a_stream_reaches_its_client_token_by_token() {
    let server = TestServer::new(endless());
    let listening = listen(&server, Duration::ZERO).await;
    let body = json!({"prompt": "a", "max_tokens": 200, "stream": true});
    let mut client = post(listening.address, body).await;
    let mut answer = String::new();
    let mut read_until = async |end: &str| {
        while !answer.contains(end) {
            let mut buffer = [0; 4096];
            let len = client.read(&mut buffer).await.unwrap();
            assert_ne!(len, 0, "closed after {answer:?}");
            answer += std::str::from_utf8(&buffer[..len]).unwrap();
        }
    };
    read_until("\"text\":\"b\"").await;
    server.engine.send(&token(99));
    read_until("\"text\":\"c\"").await;
    server.engine.finish(&FinishReason::Length);
    read_until("[DONE]").await;
}

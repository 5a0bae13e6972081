//! `/v1/files`: forms as they come, and the room that there is.

#![allow(clippy::unwrap_used, reason = "this is test code")]

mod common;

use std::path::{Path, PathBuf};

use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode};
use common::{FakeEngine, TestServer, read, says};
use inflight_server::{FileStore, FilesError};
use serde_json::{Value, json};

/// A folder of its own for a test.
fn folder(name: &str) -> PathBuf {
    std::env::temp_dir().join(format!("inflight-files-{name}-{}", std::process::id()))
}

fn server(folder: &Path, max_bytes: u64) -> TestServer {
    let store = FileStore::open(folder, max_bytes).unwrap();
    let engine = FakeEngine::new(|_, _| says("x"));
    TestServer::set(engine, |config| config.files = Some(store))
}

/// Fields of a form: name, file's name, text.
type Fields<'a> = &'a [(&'a str, Option<&'a str>, &'a str)];

async fn upload(server: &TestServer, fields: Fields<'_>) -> (StatusCode, Value) {
    let mut form = String::new();
    for (name, file, text) in fields {
        let file = file.map(|name| format!("; filename=\"{name}\"")).unwrap_or_default();
        form += &format!(
            "--cut\r\nContent-Disposition: form-data; name=\"{name}\"{file}\r\n\r\n{text}\r\n"
        );
    }
    form += "--cut--\r\n";
    send(server, "multipart/form-data; boundary=cut", form).await
}

async fn send(server: &TestServer, content_type: &str, body: String) -> (StatusCode, Value) {
    let request = Request::post("/v1/files").header("content-type", content_type);
    let (status, _, answer) =
        read(server.send(request.body(Body::from(body)).unwrap()).await).await;
    (status, answer)
}

#[tokio::test]
async fn a_file_comes_back_as_it_went() {
    let folder = folder("whole");
    let server = server(&folder, 1000);
    let text = "{\"custom_id\": \"é\"}\r\n--cu";
    let (status, file) =
        upload(&server, &[("file", Some("a b.jsonl"), text), ("purpose", None, "batch")]).await;
    assert_eq!(status, StatusCode::OK, "{file}");
    assert_eq!((&file["filename"], &file["bytes"]), (&json!("a b.jsonl"), &json!(text.len())));
    let path = format!("/v1/files/{}/content", file["id"].as_str().unwrap());
    let response = server.send(Request::get(path).body(Body::empty()).unwrap()).await;
    assert_eq!(to_bytes(response.into_body(), usize::MAX).await.unwrap(), text.as_bytes());
    assert_eq!(std::fs::read_dir(folder.join("parts")).unwrap().count(), 0);
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn bad_forms_are_refused_and_leave_nothing() {
    let folder = folder("bad");
    let server = server(&folder, 1000);
    let (batch, file) = (("purpose", None, "batch"), ("file", Some("a"), "a"));
    for (fields, named) in [
        (&[batch][..], "`file` is required"),
        (&[file], "`purpose` is required"),
        (&[batch, file, file], "`file` is not a field"),
        (&[batch, file, ("color", None, "red")], "`color` is not a field"),
        (&[("purpose", None, "vision"), file], "`purpose`"),
        (&[batch, ("file", Some("a"), "")], "is empty"),
        (&[batch, ("file", Some(&"a".repeat(256)), "a")], "255 bytes"),
        (&[batch, ("file", Some("\u{1}"), "a")], "headers"),
    ] {
        let (status, answer) = upload(&server, fields).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{answer}");
        assert!(answer["error"]["message"].as_str().unwrap().contains(named), "{answer}");
    }
    let cut = "--cut\r\nContent-Disposition: form-data; name=\"file\"\r\n\r\nabc";
    for (content_type, body) in [
        ("multipart/form-data; boundary=cut", cut),
        ("multipart/form-data; boundary=cut", ""),
        ("multipart/form-data", cut),
        ("application/json", "{}"),
    ] {
        let (status, answer) = send(&server, content_type, body.to_owned()).await;
        assert_eq!(status, StatusCode::BAD_REQUEST, "{content_type} {body:?}: {answer}");
    }
    for left in ["parts", "data", "files"] {
        assert_eq!(std::fs::read_dir(folder.join(left)).unwrap().count(), 0, "{left}");
    }
    std::fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn there_is_only_so_much_room() {
    let folder = folder("room");
    let server = server(&folder, 100);
    let text = "a".repeat(60);
    let fields = [("purpose", None, "batch"), ("file", Some("a"), text.as_str())];
    let (status, first) = upload(&server, &fields).await;
    assert_eq!(status, StatusCode::OK);
    let (status, answer) = upload(&server, &fields).await;
    assert_eq!(status, StatusCode::PAYLOAD_TOO_LARGE);
    assert!(answer["error"]["message"].as_str().unwrap().contains("100 bytes"), "{answer}");
    let path = format!("/v1/files/{}", first["id"].as_str().unwrap());
    let response = server.send(Request::delete(path).body(Body::empty()).unwrap()).await;
    assert_eq!(response.status(), StatusCode::OK);
    assert_eq!(upload(&server, &fields).await.0, StatusCode::OK, "there is room again");
    std::fs::remove_dir_all(folder).unwrap();
}

#[test]
fn a_folder_is_one_servers() {
    let folder = folder("lock");
    let first = FileStore::open(&folder, 1).unwrap();
    assert!(matches!(FileStore::open(&folder, 1), Err(FilesError::Busy { .. })));
    drop(first);
    FileStore::open(&folder, 1).unwrap();
    std::fs::remove_dir_all(folder).unwrap();
}

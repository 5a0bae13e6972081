//! Batch files: every line answered once, whatever is wrong with some and whenever a run is ended.

#![allow(clippy::unwrap_used, reason = "a failure here fails the test")]

mod common;

use std::collections::BTreeMap;
use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};

use common::{FakeEngine, TestServer, says, script};
use inflight_engine::{FinishReason, Lapse};
use inflight_server::{BatchError, BatchRun};
use serde_json::{Value, json};

/// A folder of its own for a test.
fn folder(name: &str) -> PathBuf {
    let folder = std::env::temp_dir().join(format!("inflight-batch-{name}-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    folder
}

fn line(custom_id: &str, url: &str, body: Value) -> String {
    json!({"custom_id": custom_id, "method": "POST", "url": url, "body": body}).to_string()
}

fn completion(custom_id: &str, prompt: &str) -> String {
    line(custom_id, "/v1/completions", json!({"prompt": prompt}))
}

fn answers(path: &Path) -> Vec<Value> {
    let text = fs::read_to_string(path).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn by_id(answers: &[Value]) -> BTreeMap<&str, &Value> {
    let all: BTreeMap<_, _> =
        answers.iter().map(|answer| (answer["id"].as_str().unwrap(), answer)).collect();
    assert_eq!(all.len(), answers.len(), "no line is answered twice");
    all
}

#[tokio::test]
async fn every_line_has_its_answer_and_bad_ones_stop_nothing() {
    let folder = folder("lines");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let hi = json!([{"role": "user", "content": "Hi"}]);
    let lines = [
        line("chat", "/v1/chat/completions", json!({"messages": hi})),
        completion("text", "Hello"),
        "{\"custom_id\": \"cut\", \"meth".to_owned(),
        String::new(),
        line("bad field", "/v1/completions", json!({"prompt": "a", "heat": 1})),
        line("bad url", "/v1/files", json!({})),
        line("stream", "/v1/completions", json!({"prompt": "a", "stream": true})),
        completion("text", "again"),
        json!({"custom_id": "no body", "method": "POST", "url": "/v1/completions"}).to_string(),
        line("reply", "/v1/responses", json!({"input": "Hi", "store": false})),
        line("get", "/v1/completions", json!({"prompt": "a"})).replace("POST", "GET"),
    ];
    fs::write(&input, lines.join("\n")).unwrap();
    let server = TestServer::new(FakeEngine::new(|_, _| says("!")));
    let run = BatchRun::open(&server.state, &input, &output, 4).unwrap();
    let mut shown = Vec::new();
    let progress = run.run(|progress| shown.push(progress.num_answered)).await.unwrap();
    assert_eq!((progress.num_lines, progress.num_answered, progress.num_failed), (10, 10, 7));
    assert_eq!(shown, (1..=10).collect::<Vec<_>>());

    let answers = answers(&output);
    let answers = by_id(&answers);
    let chat = answers["batch_req_1"];
    assert_eq!(chat["custom_id"], "chat");
    assert_eq!((&chat["response"]["status_code"], &chat["error"]), (&json!(200), &json!(null)));
    assert_eq!(chat["response"]["body"]["choices"][0]["message"]["content"], "!");
    assert_eq!(answers["batch_req_2"]["response"]["body"]["choices"][0]["text"], "!");
    let reply = &answers["batch_req_10"]["response"]["body"];
    assert_eq!(reply["output"][0]["content"][0]["text"], "!");
    for (number, custom_id, code) in [
        (3, json!(null), "invalid_line"),
        (8, json!("text"), "duplicate_custom_id"),
        (9, json!("no body"), "invalid_line"),
    ] {
        let answer = answers[format!("batch_req_{number}").as_str()];
        assert_eq!((&answer["custom_id"], &answer["response"]), (&custom_id, &json!(null)));
        assert_eq!(answer["error"]["code"], code);
    }
    for (number, field) in [(5, "heat"), (6, "url"), (7, "stream"), (11, "method")] {
        let answer = answers[format!("batch_req_{number}").as_str()];
        assert_eq!(answer["response"]["status_code"], 400);
        assert_eq!(answer["response"]["body"]["error"]["param"], field);
    }
    fs::remove_dir_all(folder).unwrap();
}

/// A run may be killed at any byte that it writes.
#[tokio::test]
async fn a_killed_run_goes_on_where_it_was() {
    let folder = folder("killed");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let mut lines: Vec<_> = (0..12).map(|i| completion(&format!("no {i}"), "Hello")).collect();
    lines[5] = "no request".to_owned();
    fs::write(&input, lines.join("\n") + "\n").unwrap();
    let whole = {
        let server = TestServer::saying("!");
        let run = BatchRun::open(&server.state, &input, &output, 3).unwrap();
        run.run(|_| {}).await.unwrap();
        fs::read(&output).unwrap()
    };
    for cut in (0..=whole.len()).step_by(97) {
        fs::write(&output, &whole[..cut]).unwrap();
        let num_kept = whole[..cut].iter().filter(|byte| **byte == b'\n').count();
        let server = TestServer::saying("!");
        let run = BatchRun::open(&server.state, &input, &output, 3).unwrap();
        assert_eq!(run.progress().num_found, num_kept as u64);
        let busy = BatchRun::open(&server.state, &input, &output, 3).map(drop);
        assert!(matches!(busy, Err(BatchError::Busy { .. })), "{busy:?}");
        let progress = run.run(|_| {}).await.unwrap();
        assert_eq!(progress.num_answered, 12);
        let last = whole[..cut].iter().rposition(|byte| *byte == b'\n');
        let kept = &whole[..last.map_or(0, |at| at + 1)];
        assert!(fs::read(&output).unwrap().starts_with(kept));
        let answers = answers(&output);
        assert_eq!(by_id(&answers).len(), 12);
        let asked = server.engine.requests().len();
        assert!([12 - num_kept, 11 - num_kept.min(11)].contains(&asked), "{asked} {num_kept}");
    }
    fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn files_of_something_else_are_left_alone() {
    let folder = folder("foreign");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let server = TestServer::saying("!");
    let missing = BatchRun::open(&server.state, &input, &output, 3).map(drop);
    assert!(matches!(missing, Err(BatchError::File { .. })) && !output.exists());
    fs::write(&input, completion("a", "Hello")).unwrap();
    for text in ["my diary\n", "{}\n", "{\"id\": \"batch_1\", \"custom_id\": \"a\"}\n"] {
        fs::write(&output, text).unwrap();
        let opened = BatchRun::open(&server.state, &input, &output, 3).map(drop);
        assert!(matches!(opened, Err(BatchError::Foreign { line: 1, .. })), "{opened:?}");
        assert_eq!(fs::read_to_string(&output).unwrap(), text);
    }
    // Another input's answers.
    let answered = "{\"id\": \"batch_req_1\", \"custom_id\": \"b\"}\n";
    fs::write(&output, answered).unwrap();
    let run = BatchRun::open(&server.state, &input, &output, 3).unwrap();
    let ended = run.run(|_| {}).await;
    assert!(matches!(ended, Err(BatchError::Foreign { line: 1, .. })), "{ended:?}");
    fs::remove_dir_all(folder).unwrap();
}

/// A server may limit the time in its queue; a batch has time.
#[tokio::test]
async fn who_waited_too_long_waits_again() {
    let folder = folder("queue");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    fs::write(&input, completion("a", "Hello")).unwrap();
    let lapsed = || script(&[], FinishReason::Lapsed(Lapse::QueueTime));
    let engine = FakeEngine::new(move |_, number| if number < 2 { lapsed() } else { says("!") });
    let server = TestServer::new(engine);
    let run = BatchRun::open(&server.state, &input, &output, 3).unwrap();
    let progress = run.run(|_| {}).await.unwrap();
    assert_eq!((progress.num_answered, progress.num_failed), (1, 0));
    assert_eq!(server.engine.requests().len(), 3);
    fs::remove_dir_all(folder).unwrap();
}

#[tokio::test]
async fn lines_that_are_too_long_are_skipped() {
    let folder = folder("long");
    let (input, output) = (folder.join("in.jsonl"), folder.join("out.jsonl"));
    let server = TestServer::saying("!");
    let mut file = fs::File::create(&input).unwrap();
    let long = completion("long", &"x".repeat(1 << 20));
    writeln!(file, "{}\n{long}\n{}", completion("a", "Hello"), completion("b", "Hello")).unwrap();
    let run = BatchRun::open(&server.state, &input, &output, 3).unwrap();
    let progress = run.run(|_| {}).await.unwrap();
    assert_eq!((progress.num_answered, progress.num_failed), (3, 1));
    let answers = answers(&output);
    assert_eq!(by_id(&answers)["batch_req_2"]["error"]["code"], "line_too_long");
    fs::remove_dir_all(folder).unwrap();
}

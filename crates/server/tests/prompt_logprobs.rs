//! How likely prompts were: `prompt_logprobs`, and `echo` with `logprobs`.

mod common;

use common::{FakeEngine, TestServer, chunks};
use inflight_engine::{FinishReason, PromptToken, TokenUpdate, Update};
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

/// Of every prompt: its tokens are as likely as their place, "y" and "z" come before them. Then
/// "x" and the end by length.
fn engine() -> FakeEngine {
    FakeEngine::new(|prompt, _| {
        let place = |(i, &token): (usize, &u32)| PromptToken {
            token,
            logprob: -(i as f32),
            rank: (i < 3).then_some(i as u32),
            top_logprobs: vec![(121, -0.125), (122, -0.25)],
        };
        let scored: Vec<_> = prompt.iter().enumerate().skip(1).map(place).collect();
        let chunks = scored.chunks(2).map(|chunk| Update::Prompt(chunk.to_vec()));
        let x = TokenUpdate {
            token: 120,
            logprob: Some(-0.5),
            top_logprobs: vec![(120, -0.5), (97, -1.5)],
            ..TokenUpdate::default()
        };
        let ending = [Update::Token(x), Update::Finished(FinishReason::Length)];
        chunks.chain(ending).collect()
    })
}

fn expected_logprobs() -> Value {
    json!({
        "tokens": ["a", "bytes:\\xc3", "bytes:\\xa9", "b"],
        "token_logprobs": [null, -1.0, -2.0, -3.0],
        "top_logprobs": [
            null,
            {"y": -0.125, "bytes:\\xc3": -1.0},
            {"y": -0.125, "bytes:\\xa9": -2.0},
            {"y": -0.125, "b": -3.0},
        ],
        "text_offset": [0, 1, 1, 2],
    })
}

#[tokio::test]
async fn an_echoed_prompt_has_its_logprobs() {
    let server = TestServer::new(engine());
    let body = json!({"prompt": "aéb", "echo": true, "logprobs": 1, "max_tokens": 0});
    let response = server.post(PATH, body).await;
    let choice = &response["choices"][0];
    assert_eq!((&choice["text"], &choice["finish_reason"]), (&json!("aéb"), &json!("length")));
    assert_eq!(choice["logprobs"], expected_logprobs());
    let usage = &response["usage"];
    assert_eq!((&usage["prompt_tokens"], &usage["completion_tokens"]), (&json!(4), &json!(0)));

    let body =
        json!({"prompt": ["aéb", "a"], "echo": true, "logprobs": 1, "max_tokens": 1, "n": 2});
    let response = server.post(PATH, body.clone()).await;
    let mut expected = expected_logprobs();
    for (field, value) in [
        ("tokens", json!("x")),
        ("token_logprobs", json!(-0.5)),
        ("top_logprobs", json!({"x": -0.5, "a": -1.5})),
        ("text_offset", json!(3)),
    ] {
        expected[field].as_array_mut().unwrap().push(value);
    }
    for choice in &response["choices"].as_array().unwrap()[..2] {
        assert_eq!((&choice["text"], &choice["logprobs"]), (&json!("aébx"), &expected));
    }
    let single = &response["choices"][3];
    assert_eq!(single["text"], "ax");
    assert_eq!(single["logprobs"]["token_logprobs"], json!([null, -0.5]));
    assert_eq!(single["logprobs"]["text_offset"], json!([0, 1]));

    let mut streamed = vec![json!({}); 4];
    for chunk in chunks(&server.stream(PATH, body).await) {
        let choice = &chunk["choices"][0];
        let whole = &mut streamed[choice["index"].as_u64().unwrap() as usize];
        for (name, list) in choice["logprobs"].as_object().into_iter().flatten() {
            let more = list.as_array().unwrap().clone();
            match &mut whole[name] {
                Value::Array(list) => list.extend(more),
                empty => *empty = json!(more),
            }
        }
    }
    assert_eq!(streamed[0], expected);
    assert_eq!(streamed[1], expected);
    assert_eq!(streamed[3], single["logprobs"]);
}

#[tokio::test]
async fn prompt_logprobs_in_the_form_of_vllm() {
    let server = TestServer::new(engine());
    let named = |logprob: f32, rank: Value, text: &str| {
        json!({
            "logprob": logprob, "rank": rank, "decoded_token": text,
        })
    };
    let expected = json!([
        null,
        {"98": named(-1.0, json!(1), "b"), "121": named(-0.125, json!(1), "y")},
        {"99": named(-2.0, json!(2), "c"), "121": named(-0.125, json!(1), "y")},
        {"122": named(-3.0, json!(null), "z"), "121": named(-0.125, json!(1), "y")},
    ]);
    let body = json!({"prompt": "abcz", "prompt_logprobs": 1, "max_tokens": 0});
    let choice = server.post(PATH, body).await["choices"][0].clone();
    assert_eq!(choice["prompt_logprobs"], expected);
    assert_eq!((&choice["text"], &choice["logprobs"]), (&json!(""), &json!(null)));
    let body = json!({"prompt": "a", "prompt_logprobs": 0});
    let choice = server.post(PATH, body).await["choices"][0].clone();
    assert_eq!(choice["prompt_logprobs"], json!([null]));

    let body = json!({
        "messages": [{"role": "user", "content": "Hi"}], "prompt_logprobs": 0, "n": 2,
    });
    let response = server.post("/v1/chat/completions", body).await;
    let list = response["prompt_logprobs"].as_array().unwrap();
    assert_eq!(json!(list.len()), response["usage"]["prompt_tokens"]);
    assert_eq!((&list[0], list[1].as_object().unwrap().len()), (&json!(null), 1));
}

#[tokio::test]
async fn what_cannot_be_told_is_refused() {
    let server = TestServer::new(engine());
    for (fields, field) in [
        (json!({"prompt_logprobs": 21}), "prompt_logprobs"),
        (json!({"prompt_logprobs": -1}), "prompt_logprobs"),
        (json!({"prompt_logprobs": 1, "stream": true}), "prompt_logprobs"),
        (json!({"max_tokens": 0}), "max_tokens"),
        (json!({"max_tokens": 0, "logprobs": 1}), "max_tokens"),
    ] {
        let mut body = json!({"prompt": "ab"});
        body.as_object_mut().unwrap().extend(fields.as_object().unwrap().clone());
        let (status, _, error) = server.post_text(PATH, &body.to_string()).await;
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!(field)), "{fields}");
    }
}

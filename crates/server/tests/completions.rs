//! `POST /v1/completions`, whole and streamed.

mod common;

use common::{
    END, FakeEngine, HELLO, LLAMA_HEAD, LLAMA_TAIL, TestServer, bytes, chunks, says, script, steady,
};
use inflight_engine::{FinishReason, TokenUpdate, Update};
use proptest::prelude::*;
use serde_json::{Value, json};

const PATH: &str = "/v1/completions";

#[tokio::test]
async fn a_whole_completion() {
    let server = TestServer::saying(" world");
    let response = server.post(PATH, json!({"model": "tiny", "prompt": "Hello"})).await;
    assert!(response["id"].as_str().unwrap().starts_with("cmpl-"));
    let expected = json!({
        "object": "text_completion",
        "model": "tiny",
        "choices": [
            {"index": 0, "text": " world", "logprobs": null, "finish_reason": "stop"},
        ],
        "usage": {"prompt_tokens": 5, "completion_tokens": 7, "total_tokens": 12,
            "prompt_tokens_details": {"cached_tokens": 0}},
    });
    assert_eq!(steady(response), expected);
    assert_eq!(server.engine.requests(), [(bytes("Hello"), 16)]);
    assert_eq!(server.engine.num_aborted(), 0);
}

#[tokio::test]
async fn a_streamed_completion() {
    let server = TestServer::generating(&[u32::from(b' '), LLAMA_HEAD, LLAMA_TAIL]);
    let body = json!({
        "prompt": "Hi", "max_tokens": 3, "stream_options": {"include_usage": true},
    });
    let chunk = |choices: Value, usage: Value| {
        json!({
            "object": "text_completion", "model": "tiny", "choices": choices, "usage": usage,
        })
    };
    let choice = |text: &str, reason: Value| {
        json!([{
            "index": 0, "text": text, "logprobs": null, "finish_reason": reason,
        }])
    };
    let expected = [
        chunk(choice(" ", json!(null)), json!(null)),
        chunk(choice("🦙", json!(null)), json!(null)),
        chunk(choice("", json!("length")), json!(null)),
        chunk(
            json!([]),
            json!({"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5,
                "prompt_tokens_details": {"cached_tokens": 0}}),
        ),
    ];
    assert_eq!(chunks(&server.stream(PATH, body).await), expected);
}

#[tokio::test]
async fn usage_in_every_chunk_or_in_none() {
    let server = TestServer::saying("ab");
    let options = json!({"include_usage": true, "continuous_usage_stats": true});
    let stream = server.stream(PATH, json!({"prompt": "Hi", "stream_options": options})).await;
    let counts: Vec<_> =
        chunks(&stream).iter().map(|chunk| chunk["usage"]["completion_tokens"].clone()).collect();
    assert_eq!(counts, [1, 2, 3, 3]);
    let stream = server.stream(PATH, json!({"prompt": "Hi"})).await;
    assert!(chunks(&stream).iter().all(|chunk| chunk.get("usage").is_none()));
}

#[tokio::test]
async fn every_form_of_prompt() {
    let check = async |prompt: Value, expected: &[&[u32]]| {
        let server = TestServer::saying("x");
        let response = server.post(PATH, json!({"prompt": prompt})).await;
        let prompts: Vec<_> = server.engine.requests().into_iter().map(|(ids, _)| ids).collect();
        assert_eq!(prompts, expected);
        let indices: Vec<_> = (0..expected.len()).map(|index| json!(index)).collect();
        let choices = response["choices"].as_array().unwrap();
        assert_eq!(choices.iter().map(|c| c["index"].clone()).collect::<Vec<_>>(), indices);
    };
    check(json!("ab"), &[&[97, 98]]).await;
    check(json!(["ab", "c"]), &[&[97, 98], &[99]]).await;
    check(json!([1, 260]), &[&[1, 260]]).await;
    check(json!([[1], [2, 3]]), &[&[1], &[2, 3]]).await;
    check(json!("<|im_end|>a"), &[&[END, 97]]).await;
}

#[tokio::test]
async fn several_outputs_per_prompt_are_told_apart() {
    let engine = FakeEngine::new(|prompt, number| says(&format!("{}{number}", prompt[0])));
    let server = TestServer::new(engine);
    let body = json!({"prompt": [[1, 1], [2]], "n": 2, "best_of": 2});
    let response = server.post(PATH, body.clone()).await;
    let texts: Vec<_> =
        response["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
    assert_eq!(texts, ["10", "11", "22", "23"]);
    let usage = json!({"prompt_tokens": 3, "completion_tokens": 12, "total_tokens": 15,
        "prompt_tokens_details": {"cached_tokens": 0}});
    assert_eq!(response["usage"], usage, "a prompt counts once, every output counts");

    let mut texts = vec![String::new(); 4];
    for chunk in chunks(&server.stream(PATH, body).await) {
        let choice = &chunk["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize] += choice["text"].as_str().unwrap();
    }
    assert_eq!(texts, ["14", "15", "26", "27"]);
}

#[tokio::test]
async fn absent_max_tokens_ends_with_the_context() {
    let server = TestServer::generating(&[120]);
    for (prompt_len, max_tokens) in [(10, 16), (240, 16), (250, 6), (255, 1)] {
        server.post(PATH, json!({"prompt": vec![1; prompt_len]})).await;
        assert_eq!(server.engine.requests().last().unwrap().1, max_tokens, "{prompt_len}");
    }
}

#[tokio::test]
async fn a_stop_string_ends_text_and_request() {
    let ends = |include: bool, text: &str| {
        let text = text.to_owned();
        async move {
            // Without an end: the engine would go on.
            let mut updates = script(&bytes("one, two, three"), FinishReason::Length);
            updates.pop();
            let server = TestServer::new(FakeEngine::new(move |_, _| updates.clone()));
            let body = json!({
                "prompt": "a", "stop": ["x", ", t"], "include_stop_str_in_output": include,
            });
            let response = server.post(PATH, body).await;
            let choice = json!({
                "index": 0, "text": text, "logprobs": null,
                "finish_reason": "stop", "stop_reason": ", t",
            });
            assert_eq!(response["choices"], json!([choice]));
            assert_eq!(response["usage"]["completion_tokens"], 6);
            assert_eq!(server.engine.num_aborted(), 1);
            assert_eq!(server.engine.num_running(), 0);
        }
    };
    ends(false, "one").await;
    ends(true, "one, t").await;
}

#[tokio::test]
async fn min_tokens_puts_stop_strings_off() {
    let server = TestServer::saying("abcabc");
    let response = server.post(PATH, json!({"prompt": "a", "stop": "b", "min_tokens": 2})).await;
    assert_eq!(response["choices"][0]["text"], "abca");
}

#[tokio::test]
async fn a_stop_token_shows_only_if_asked() {
    let updates = script(&bytes("ab"), FinishReason::Stop { token: 98 });
    let server = TestServer::new(FakeEngine::new(move |_, _| updates.clone()));
    let mut body = json!({"prompt": "a", "stop_token_ids": [98]});
    let choice = server.post(PATH, body.clone()).await["choices"][0].clone();
    assert_eq!(choice["text"], "a");
    assert_eq!(choice["stop_reason"], 98);
    body["include_stop_str_in_output"] = json!(true);
    assert_eq!(server.post(PATH, body).await["choices"][0]["text"], "ab");
}

#[tokio::test]
async fn control_tokens_show_only_if_asked() {
    let server = TestServer::generating(&[END, 97]);
    let mut body = json!({"prompt": "a", "ignore_eos": true});
    assert_eq!(server.post(PATH, body.clone()).await["choices"][0]["text"], "a");
    body["skip_special_tokens"] = json!(false);
    assert_eq!(server.post(PATH, body).await["choices"][0]["text"], "<|im_end|>a");
}

#[tokio::test]
async fn echo_repeats_the_prompt() {
    let server = TestServer::saying("!");
    let body = json!({"prompt": ["Hi", "Ho"], "echo": true, "n": 2});
    let response = server.post(PATH, body.clone()).await;
    let texts: Vec<_> =
        response["choices"].as_array().unwrap().iter().map(|c| c["text"].clone()).collect();
    assert_eq!(texts, ["Hi!", "Hi!", "Ho!", "Ho!"]);
    let stream = chunks(&server.stream(PATH, body).await);
    let first: String = stream
        .iter()
        .filter(|chunk| chunk["choices"][0]["index"] == 0)
        .map(|chunk| chunk["choices"][0]["text"].as_str().unwrap())
        .collect();
    assert_eq!(first, "Hi!");
    let tokens = server.post(PATH, json!({"prompt": [HELLO, 33], "echo": true})).await;
    assert_eq!(tokens["choices"][0]["text"], "Hello!!");
}

/// "é" over two tokens, then "x", then the end.
fn scored() -> Vec<Update> {
    let token = |token, logprob, top: &[(u32, f32)]| {
        let top_logprobs = top.to_vec();
        Update::Token(TokenUpdate {
            token,
            logprob: Some(logprob),
            top_logprobs,
            ..TokenUpdate::default()
        })
    };
    vec![
        token(0xC3, -0.5, &[(0xC3, -0.5), (97, -1.5)]),
        token(0xA9, -0.25, &[(97, -0.125), (98, f32::NEG_INFINITY)]),
        token(120, -1.0, &[(120, -1.0), (97, -2.0)]),
        token(END, -0.75, &[(END, -0.75), (97, -3.0)]),
        Update::Finished(FinishReason::Stop { token: END }),
    ]
}

#[tokio::test]
async fn logprobs_line_up() {
    let server = TestServer::new(FakeEngine::new(|_, _| scored()));
    let body = json!({"prompt": "a", "logprobs": 2});
    let response = server.post(PATH, body.clone()).await;
    let expected = json!({
        "tokens": ["bytes:\\xc3", "bytes:\\xa9", "x", "<|im_end|>"],
        "token_logprobs": [-0.5, -0.25, -1.0, -0.75],
        "top_logprobs": [
            {"bytes:\\xc3": -0.5, "a": -1.5},
            {"a": -0.125, "b": -9999.0, "bytes:\\xa9": -0.25},
            {"x": -1.0, "a": -2.0},
            {"<|im_end|>": -0.75, "a": -3.0},
        ],
        "text_offset": [0, 0, 1, 2],
    });
    assert_eq!(response["choices"][0]["text"], "éx");
    assert_eq!(response["choices"][0]["logprobs"], expected);

    let mut streamed = Vec::new();
    for chunk in chunks(&server.stream(PATH, body).await) {
        let tokens = chunk["choices"][0]["logprobs"]["tokens"].clone();
        streamed.extend(tokens.as_array().cloned().unwrap_or_default());
    }
    assert_eq!(json!(streamed), expected["tokens"]);
}

/// A text that a model could generate: whole characters, broken ones, control tokens.
fn generated() -> impl Strategy<Value = Vec<u32>> {
    let token = prop_oneof![
        4 => 97..101_u32,
        2 => 0..256_u32,
        1 => Just(LLAMA_HEAD),
        1 => Just(LLAMA_TAIL),
        1 => Just(HELLO),
        1 => Just(END),
    ];
    prop::collection::vec(token, 0..15)
}

proptest! {
    #![proptest_config(ProptestConfig {
        cases: 200, failure_persistence: None, ..ProptestConfig::default()
    })]

    /// Whatever the model generates and whatever stops it, both ways give the same.
    #[test]
    fn streamed_text_equals_whole_text(
        tokens in generated(),
        stops in prop::collection::vec("[abc🦙]{1,3}", 0..3),
        include in any::<bool>(),
        skip in any::<bool>(),
        min_tokens in 0..4_usize,
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build().unwrap();
        runtime.block_on(async {
            let server = TestServer::generating(&tokens);
            let body = json!({
                "prompt": "a", "stop": stops, "include_stop_str_in_output": include,
                "skip_special_tokens": skip, "min_tokens": min_tokens, "ignore_eos": true,
                "stream_options": null,
            });
            let whole = server.post(PATH, body.clone()).await["choices"][0].clone();
            let mut text = String::new();
            let mut ending = json!(null);
            for chunk in chunks(&server.stream(PATH, body).await) {
                let choice = &chunk["choices"][0];
                assert_eq!(ending, json!(null), "the last chunk, and only it, has the reason");
                text += choice["text"].as_str().unwrap();
                ending = choice["finish_reason"].clone();
            }
            assert_eq!(text, whole["text"].as_str().unwrap());
            assert_eq!(ending, whole["finish_reason"]);
        });
    }
}

#[tokio::test]
async fn the_likeliest_of_several() {
    // The output of number i says i and has the logprobs of its row.
    let logprobs = [[-2.0, -2.0], [-0.5, -0.5], [-1.0, -3.0], [-1.0, -1.0]];
    let server = TestServer::new(FakeEngine::new(move |_, number| {
        let row = logprobs[number % 4];
        let token = |logprob| TokenUpdate {
            token: u32::from(b'0') + (number % 4) as u32,
            logprob: Some(logprob),
            ..TokenUpdate::default()
        };
        let tokens = row.map(|logprob| Update::Token(token(logprob)));
        tokens.into_iter().chain([Update::Finished(FinishReason::Length)]).collect()
    }));
    let body = json!({"prompt": ["a", "b"], "n": 2, "best_of": 4, "echo": true});
    let response = server.post(PATH, body).await;
    let choices = response["choices"].as_array().unwrap();
    let texts: Vec<_> = choices.iter().map(|choice| choice["text"].as_str().unwrap()).collect();
    assert_eq!(texts, ["a11", "a33", "b11", "b33"]);
    assert_eq!(choices[0]["logprobs"], Value::Null, "nobody asked for them");
    assert_eq!(response["usage"]["completion_tokens"], 16, "all that was generated");
    for wrong in [json!({"n": 3, "best_of": 2}), json!({"best_of": 2, "stream": true})] {
        let mut body = json!({"prompt": "a"});
        body.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        let (status, _, error) = server.post_text(PATH, &body.to_string()).await;
        assert_eq!((status.as_u16(), &error["error"]["param"]), (400, &json!("best_of")));
    }
}

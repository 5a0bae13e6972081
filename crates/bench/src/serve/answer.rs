//! A streamed answer, read as it comes.

use std::borrow::Cow;
use std::time::Duration;

use serde::Deserialize;
use serde_json::Value;

use crate::client::{EventReader, excerpt};

/// What one request's client saw. Times are since the run began.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Served {
    /// When it was due, or sent if nothing says so.
    pub(super) due: Duration,
    /// When it was sent.
    pub(super) sent: Duration,
    /// When each piece of text came.
    pub(super) times: Vec<Duration>,
    /// When nothing more came.
    pub(super) ended: Duration,
    /// Tokens of the output: as the server counts, or else pieces of text.
    pub(super) num_output: usize,
    /// Tokens of the prompt, as the server counts.
    pub(super) num_input: Option<usize>,
    /// Tokens of the prompt that the server did not compute, as it says.
    pub(super) num_cached: usize,
    /// Whether the server counted.
    pub(super) has_usage: bool,
    /// What went wrong: a kind in one word, and more about it.
    pub(super) failure: Option<(Cow<'static, str>, String)>,
}

/// Reads an answer's events.
#[derive(Default)]
pub(super) struct AnswerReader {
    events: EventReader,
    answer: Answer,
}

#[derive(Default)]
struct Answer {
    times: Vec<Duration>,
    usage: Option<Usage>,
    has_finished: bool,
    is_done: bool,
    failure: Option<(&'static str, String)>,
}

/// What of OpenAI's chunks matters here, of either endpoint.
#[derive(Deserialize)]
struct Chunk<'a> {
    #[serde(default, borrow)]
    choices: Vec<Choice<'a>>,
    usage: Option<Usage>,
    error: Option<Value>,
}

#[derive(Deserialize)]
struct Choice<'a> {
    #[serde(borrow)]
    text: Option<Cow<'a, str>>,
    #[serde(borrow)]
    delta: Option<Delta<'a>>,
    #[serde(borrow)]
    finish_reason: Option<Cow<'a, str>>,
}

/// Thoughts are text as well, under the name that DeepSeek gave them or a newer one.
#[derive(Deserialize)]
struct Delta<'a> {
    #[serde(borrow)]
    content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning_content: Option<Cow<'a, str>>,
    #[serde(borrow)]
    reasoning: Option<Cow<'a, str>>,
}

#[derive(Clone, Copy, Deserialize)]
struct Usage {
    prompt_tokens: Option<usize>,
    completion_tokens: Option<usize>,
    prompt_tokens_details: Option<PromptDetails>,
}

#[derive(Clone, Copy, Deserialize)]
struct PromptDetails {
    cached_tokens: Option<usize>,
}

impl Choice<'_> {
    fn has_text(&self) -> bool {
        let delta = self.delta.iter();
        let parts = delta.flat_map(|d| [&d.content, &d.reasoning_content, &d.reasoning]);
        parts.chain([&self.text]).flatten().any(|text| !text.is_empty())
    }
}

impl AnswerReader {
    /// Bytes came `at`.
    pub(super) fn push(&mut self, bytes: &[u8], at: Duration) {
        let Self { events, answer } = self;
        events.push(bytes, |data| answer.event(data, at));
    }

    /// Pieces of text so far.
    pub(super) fn num_pieces(&self) -> usize {
        self.answer.times.len()
    }

    /// The answer has ended, of at most `output_len` tokens, or exactly so many.
    pub(super) fn finish(self, output_len: usize, is_exact: bool) -> Served {
        let Self { events, answer } = self;
        let usage = answer.usage;
        let counted = usage.and_then(|usage| usage.completion_tokens);
        let num_output = counted.unwrap_or(answer.times.len());
        let failure = answer.failure.or_else(|| {
            let kind = match () {
                () if events.is_torn() => "half_event_at_end",
                () if !answer.has_finished => "no_finish_reason",
                () if !answer.is_done => "no_done",
                () if num_output > output_len => "too_many_tokens",
                () if is_exact && counted.is_some_and(|n| n < output_len) => "too_few_tokens",
                () if answer.times.is_empty() => "no_text",
                () => return None,
            };
            Some((kind, format!("{num_output} of {output_len} tokens")))
        });
        Served {
            num_output,
            num_input: usage.and_then(|usage| usage.prompt_tokens),
            num_cached: usage
                .and_then(|usage| usage.prompt_tokens_details?.cached_tokens)
                .unwrap_or(0),
            has_usage: counted.is_some(),
            failure: failure.map(|(kind, detail)| (kind.into(), detail)),
            times: answer.times,
            ..Served::default()
        }
    }
}

impl Answer {
    fn event(&mut self, data: &[u8], at: Duration) {
        if data == b"[DONE]" {
            self.is_done = true;
            return;
        }
        let chunk: Chunk<'_> = match serde_json::from_slice(data) {
            Ok(chunk) => chunk,
            Err(error) => return self.fail("bad_json", format!("{error}: {}", excerpt(data))),
        };
        if let Some(error) = chunk.error {
            return self.fail("error_event", excerpt(error.to_string().as_bytes()));
        }
        if self.is_done {
            self.fail("data_after_done", excerpt(data));
        }
        self.usage = chunk.usage.or(self.usage);
        for choice in &chunk.choices {
            if choice.has_text() {
                if self.has_finished {
                    self.fail("text_after_finish", excerpt(data));
                }
                self.times.push(at);
            }
            self.has_finished |= choice.finish_reason.is_some();
        }
    }

    /// The first failure is what the others come from.
    fn fail(&mut self, kind: &'static str, detail: String) {
        self.failure.get_or_insert((kind, detail));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(events: &[&str]) -> Served {
        let mut reader = AnswerReader::default();
        for (i, event) in events.iter().enumerate() {
            let at = Duration::from_millis(10 * (i as u64 + 1));
            reader.push(format!("data: {event}\n\n").as_bytes(), at);
        }
        reader.finish(2, true)
    }

    const A: &str = r#"{"choices":[{"index":0,"text":"a\n","finish_reason":null}],"usage":null}"#;
    const END: &str = r#"{"choices":[{"index":0,"text":"","finish_reason":"length"}]}"#;
    const USAGE: &str = r#"{"choices":[],"usage":{"prompt_tokens":7,"completion_tokens":2,
        "prompt_tokens_details":{"cached_tokens":4}}}"#;

    #[test]
    fn times_are_those_of_texts_and_tokens_those_of_usage() {
        let usage = USAGE.replace('\n', "");
        let served = read(&[A, A, END, &usage, "[DONE]"]);
        assert_eq!(served.failure, None);
        assert_eq!(served.times, [10, 20].map(Duration::from_millis));
        assert_eq!((served.num_output, served.num_input, served.num_cached), (2, Some(7), 4));
        assert!(served.has_usage);
        let chat = r#"{"choices":[{"delta":{"role":"assistant","content":""}}]}"#;
        let thought = r#"{"choices":[{"delta":{"reasoning_content":"é"}}]}"#;
        let served = read(&[chat, thought, END, "[DONE]"]);
        assert_eq!((served.num_output, served.has_usage), (1, false), "pieces are counted");
    }

    #[test]
    fn what_is_wrong_is_named() {
        let check = |events: &[&str], kind: &str| {
            assert_eq!(read(events).failure.expect(kind).0, kind);
        };
        let usage = USAGE.replace('\n', "");
        check(&[A, END], "no_done");
        check(&[A, "[DONE]"], "no_finish_reason");
        check(&[A, END, &usage.replace(":2,", ":1,"), "[DONE]"], "too_few_tokens");
        check(&[A, A, A, END, "[DONE]"], "too_many_tokens");
        check(&["{", END, "[DONE]"], "bad_json");
        check(&[A, r#"{"error":{"message":"boom"}}"#], "error_event");
        check(&[A, END, A, "[DONE]"], "text_after_finish");
        check(&[A, END, "[DONE]", A], "data_after_done");
        check(&[END, "[DONE]"], "no_text");
        let mut reader = AnswerReader::default();
        reader.push(b"data: {", Duration::ZERO);
        assert_eq!(reader.finish(1, false).failure.unwrap().0, "half_event_at_end");
    }
}

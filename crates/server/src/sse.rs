//! A response as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use crate::generation::{Delta, Deltas};
use crate::openai::{ApiError, ChunkWriter, ResponseHead, StreamUsage, Usage};

/// How often a stream that has nothing to say shows that it lives, and finds out whether its
/// client does.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Streams all sequences, interleaved as they come.
pub(crate) fn respond<W: ChunkWriter>(
    deltas: Deltas,
    writer: W,
    head: ResponseHead,
    stream_usage: StreamUsage,
    usage: Usage,
) -> Response {
    let chunks =
        Chunks { deltas: Some(deltas), writer, head, stream_usage, usage, ready: VecDeque::new() };
    let events = stream::unfold(chunks, |mut chunks| async move {
        let data = chunks.next().await?;
        Some((Ok::<_, Infallible>(Event::default().data(data)), chunks))
    });
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Proxies such as nginx would collect the stream before passing it on.
    let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response.headers_mut().extend([unbuffered]);
    response
}

/// The chunks of a stream, each as JSON.
struct Chunks<W> {
    /// `None` once all was read; what was not is aborted then.
    deltas: Option<Deltas>,
    writer: W,
    head: ResponseHead,
    stream_usage: StreamUsage,
    usage: Usage,
    ready: VecDeque<String>,
}

impl<W: ChunkWriter> Chunks<W> {
    async fn next(&mut self) -> Option<String> {
        while self.ready.is_empty() {
            match self.deltas.as_mut()?.next().await {
                Some((index, Ok(delta))) => self.push_delta(index, delta),
                Some((_, Err(error))) => {
                    self.deltas = None;
                    self.ready.push_back(to_json(&ApiError::from(error).body()));
                }
                None => self.push_end(),
            }
        }
        self.ready.pop_front()
    }

    fn push_delta(&mut self, index: usize, delta: Delta) {
        self.usage.add(&delta);
        let usage = match self.stream_usage {
            StreamUsage::Never => None,
            StreamUsage::AtEnd => Some(None),
            StreamUsage::Always => Some(Some(self.usage)),
        };
        for choice in self.writer.choices(index, delta) {
            let chunk = self.head.envelope(W::OBJECT, vec![choice], usage);
            self.ready.push_back(to_json(&chunk));
        }
    }

    fn push_end(&mut self) {
        self.deltas = None;
        if self.stream_usage != StreamUsage::Never {
            let no_choices = Vec::<W::Choice>::new();
            let chunk = self.head.envelope(W::OBJECT, no_choices, Some(Some(self.usage)));
            self.ready.push_back(to_json(&chunk));
        }
        self.ready.push_back("[DONE]".to_owned());
    }
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("these types have string keys and finite numbers only")
}

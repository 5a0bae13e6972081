//! A response as server-sent events.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::http::{HeaderName, HeaderValue};
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::{StreamExt, stream};
use serde::Serialize;

use crate::error::ApiError;
use crate::generation::{Delta, Deltas};

/// How often a stream that has nothing to say shows that it lives, and finds out whether its
/// client does.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// Turns a request's deltas into the events of one API.
pub(crate) trait EventWriter: Send + 'static {
    /// Comes before all deltas.
    fn start(&mut self, _events: &mut Events) {}

    /// Takes what one sequence said.
    fn delta(&mut self, index: usize, delta: Delta, events: &mut Events);

    /// Comes after the last delta of the last sequence.
    fn end(&mut self, events: &mut Events);

    /// Comes instead of the end if there is none.
    fn error(&mut self, error: &ApiError, events: &mut Events);
}

/// Events that wait to be sent.
#[derive(Default)]
pub(crate) struct Events(VecDeque<Event>);

impl Events {
    /// An event without a name.
    pub(crate) fn push(&mut self, data: &impl Serialize) {
        self.push_raw(&to_json(data));
    }

    /// An event of a name.
    pub(crate) fn push_named(&mut self, name: &str, data: &impl Serialize) {
        self.0.push_back(Event::default().event(name).data(to_json(data)));
    }

    /// An event whose data is not JSON.
    pub(crate) fn push_raw(&mut self, data: &str) {
        self.0.push_back(Event::default().data(data));
    }
}

/// Streams all sequences, interleaved as they come.
pub(crate) fn respond(deltas: Deltas, writer: impl EventWriter) -> Response {
    let mut ready = Events::default();
    let mut source = Source { deltas: Some(deltas), writer };
    source.writer.start(&mut ready);
    let events = stream::unfold((source, ready), |(mut source, mut ready)| async move {
        while ready.0.is_empty() {
            source.next(&mut ready).await?;
        }
        let event = ready.0.pop_front()?;
        Some((Ok::<_, Infallible>(event), (source, ready)))
    });
    let mut response =
        Sse::new(events).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response();
    // Proxies such as nginx would collect the stream before passing it on.
    let unbuffered = (HeaderName::from_static("x-accel-buffering"), HeaderValue::from_static("no"));
    response.headers_mut().extend([unbuffered]);
    response
}

/// Where a stream's events come from.
struct Source<W> {
    /// `None` once all was read; what was not is aborted then.
    deltas: Option<Deltas>,
    writer: W,
}

impl<W: EventWriter> Source<W> {
    /// Waits for the next delta and writes it. `None` after the end.
    async fn next(&mut self, events: &mut Events) -> Option<()> {
        match self.deltas.as_mut()?.next().await {
            Some((index, Ok(delta))) => self.writer.delta(index, delta, events),
            Some((_, Err(error))) => {
                self.deltas = None;
                self.writer.error(&ApiError::from(error), events);
            }
            None => {
                self.deltas = None;
                self.writer.end(events);
            }
        }
        Some(())
    }
}

fn to_json(value: &impl Serialize) -> String {
    serde_json::to_string(value).expect("these types have string keys and finite numbers only")
}

//! A streamed response as OpenAI's chunks.

use serde::Serialize;

use super::response::{ResponseHead, StreamUsage, Usage};
use crate::error::ApiError;
use crate::generation::Delta;
use crate::sse::{EventWriter, Events};

/// Turns deltas into the choices of one endpoint's chunks.
pub(crate) trait ChunkWriter: Send + 'static {
    /// A member of a chunk's `choices`.
    type Choice: Serialize;
    /// A chunk's `object`.
    const OBJECT: &'static str;

    /// One choice for each chunk that the delta is worth.
    fn choices(&mut self, index: usize, delta: Delta) -> Vec<Self::Choice>;
}

/// The chunks of a stream, ending with `[DONE]`.
pub(crate) struct ChunkEvents<W> {
    writer: W,
    head: ResponseHead,
    stream_usage: StreamUsage,
    usage: Usage,
}

impl<W> ChunkEvents<W> {
    /// `usage`: what the prompts cost.
    pub(crate) fn new(
        writer: W,
        head: ResponseHead,
        stream_usage: StreamUsage,
        usage: Usage,
    ) -> Self {
        Self { writer, head, stream_usage, usage }
    }
}

impl<W: ChunkWriter> EventWriter for ChunkEvents<W> {
    fn delta(&mut self, index: usize, delta: Delta, events: &mut Events) {
        self.usage.add(&delta);
        let usage = match self.stream_usage {
            StreamUsage::Never => None,
            StreamUsage::AtEnd => Some(None),
            StreamUsage::Always => Some(Some(self.usage)),
        };
        for choice in self.writer.choices(index, delta) {
            events.push(&self.head.envelope(W::OBJECT, vec![choice], usage));
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.stream_usage != StreamUsage::Never {
            let no_choices = Vec::<W::Choice>::new();
            events.push(&self.head.envelope(W::OBJECT, no_choices, Some(Some(self.usage))));
        }
        events.push_raw("[DONE]");
    }

    fn error(&mut self, error: &ApiError, events: &mut Events) {
        events.push(&error.body());
    }
}

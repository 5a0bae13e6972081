//! A streamed response as OpenAI's chunks.

use serde::Serialize;

use super::response::{ResponseHead, StreamUsage, Usage};
use crate::error::ApiError;
use crate::generation::Delta;
use crate::sse::{EventWriter, Events};
use crate::usage::TokenCounts;

/// Turns deltas into the choices of one endpoint's chunks.
pub(crate) trait ChunkWriter: Send + 'static {
    /// A member of a chunk's `choices`.
    type Choice: Serialize;
    /// A chunk's `object`.
    const OBJECT: &'static str;

    /// One choice for each chunk that the delta is worth; its tokens are counted.
    fn choices(
        &mut self,
        index: usize,
        delta: Delta,
        counts: &mut TokenCounts,
    ) -> Vec<Self::Choice>;
}

/// The chunks of a stream, ending with `[DONE]`.
pub(crate) struct ChunkEvents<W> {
    writer: W,
    head: ResponseHead,
    stream_usage: StreamUsage,
    counts: TokenCounts,
}

impl<W> ChunkEvents<W> {
    /// `counts`: of the prompts.
    pub(crate) fn new(
        writer: W,
        head: ResponseHead,
        stream_usage: StreamUsage,
        counts: TokenCounts,
    ) -> Self {
        Self { writer, head, stream_usage, counts }
    }
}

impl<W: ChunkWriter> EventWriter for ChunkEvents<W> {
    fn delta(&mut self, index: usize, delta: Delta, events: &mut Events) {
        let choices = self.writer.choices(index, delta, &mut self.counts);
        let usage = match self.stream_usage {
            StreamUsage::Never => None,
            StreamUsage::AtEnd => Some(None),
            StreamUsage::Always => Some(Some(Usage::from(self.counts))),
        };
        for choice in choices {
            events.push(&self.head.envelope(W::OBJECT, vec![choice], usage));
        }
    }

    fn end(&mut self, events: &mut Events) {
        if self.stream_usage != StreamUsage::Never {
            let no_choices = Vec::<W::Choice>::new();
            let usage = Some(Some(Usage::from(self.counts)));
            events.push(&self.head.envelope(W::OBJECT, no_choices, usage));
        }
        events.push_raw("[DONE]");
    }

    fn error(&mut self, error: &ApiError, events: &mut Events) {
        events.push(&error.body());
    }
}

//! One prompt's answer, as it comes.

use std::io;

use anyhow::{Context, Result, bail};
use inflight_engine::{FinishReason, RequestSpec, SamplingParams, SinkClosed, TokenSink, Update};
use inflight_tokenizer::{DecodeOptions, TextPosition};
use tokio::sync::mpsc;

use crate::args::SamplingArgs;
use crate::start::Running;

/// What to answer and how.
pub(crate) struct Question<'a> {
    pub(crate) prompt: Vec<u32>,
    pub(crate) position: TextPosition,
    pub(crate) sampling: &'a SamplingArgs,
    pub(crate) seed: u64,
}

/// What was answered.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Answer {
    pub(crate) text: String,
    pub(crate) num_tokens: usize,
    /// Whether it ended because there was no room for more.
    pub(crate) is_cut: bool,
}

/// Generates until the answer ends or `interrupt` resolves, and gives each piece to `write`.
pub(crate) async fn answer(
    running: &Running,
    question: Question<'_>,
    mut write: impl FnMut(&str) -> io::Result<()>,
    interrupt: impl Future<Output = ()>,
) -> Result<Answer> {
    let limits = running.handle().limits();
    let request = limits.validate(spec(running, &question))?;
    let tokenizer = &running.tokenizer;
    let options = DecodeOptions { position: question.position, ..DecodeOptions::default() };
    let mut decoder = tokenizer.decode_stream(options);
    let (sender, mut updates) = mpsc::channel(request.max_tokens() + 1);
    let id = running.handle().submit(request, Box::new(ChannelSink(sender)))?;

    let mut answer = Answer::default();
    let mut interrupt = std::pin::pin!(interrupt);
    loop {
        let update = tokio::select! {
            update = updates.recv() => update.context("the engine forgot the request")?,
            () = &mut interrupt => {
                running.handle().abort(id);
                break;
            }
        };
        let piece = match update {
            Update::Prompt(_) => String::new(),
            Update::Token(update) => {
                answer.num_tokens += 1;
                decoder.push(update.token)
            }
            Update::Finished(FinishReason::Failed(reason)) => bail!("the engine failed: {reason}"),
            Update::Finished(reason) => {
                answer.is_cut = reason == FinishReason::Length;
                break;
            }
        };
        write(&piece)?;
        answer.text += &piece;
    }
    let rest = decoder.finish();
    write(&rest)?;
    answer.text += &rest;
    Ok(answer)
}

fn spec(running: &Running, question: &Question<'_>) -> RequestSpec {
    let args = question.sampling;
    let vocab_size = running.handle().limits().vocab_size;
    let ends = running.tokenizer.eos_ids().iter().copied();
    RequestSpec {
        prompt: question.prompt.clone(),
        max_tokens: args.max_tokens.map(|max_tokens| max_tokens.get()),
        stop_token_ids: ends.filter(|&id| (id as usize) < vocab_size).collect(),
        sampling: SamplingParams {
            temperature: args.temperature,
            top_p: args.top_p,
            top_k: args.top_k,
            repetition_penalty: args.repetition_penalty,
            seed: question.seed,
            ..SamplingParams::default()
        },
        ..RequestSpec::default()
    }
}

struct ChannelSink(mpsc::Sender<Update>);

impl TokenSink for ChannelSink {
    fn send(&mut self, update: Update) -> Result<(), SinkClosed> {
        self.0.try_send(update).map_err(|_| SinkClosed)
    }
}

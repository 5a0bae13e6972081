//! A conversation's answers as they come.

use std::sync::Arc;

use futures_util::StreamExt;
use inflight_engine::PromptToken;

use super::constraint;
use super::conversation::{Conversation, Prompt};
use crate::error::{ApiError, Rename};
use crate::generation::{self, Delta, Deltas, Finish, ScoredToken};
use crate::off_thread::off_thread;
use crate::output::{OutputParser, Piece};
use crate::request::SequenceTemplate;
use crate::state::ServerState;
use crate::usage::TokenCounts;

/// Answers that are being generated.
pub(crate) struct ChatRun {
    pub(crate) deltas: Deltas,
    pub(crate) reader: ChatReader,
    /// Of the prompt, so far.
    pub(crate) counts: TokenCounts,
    pub(crate) num_outputs: usize,
}

/// What an answer consists of since the delta before.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct ChatDelta {
    /// The prompt's tokens but the first, if their logprobs were asked for.
    pub(crate) prompt: Vec<PromptToken>,
    pub(crate) pieces: Vec<Piece>,
    /// The tokens of this delta, if logprobs were asked for.
    pub(crate) tokens: Vec<ScoredToken>,
    /// So many of `tokens`, the first ones, are thoughts.
    pub(crate) num_thought_tokens: usize,
    /// Set in the last delta of an answer, and only there.
    pub(crate) finish: Option<Finish>,
}

/// Takes answers apart.
pub(crate) struct ChatReader {
    parsers: Vec<OutputParser>,
}

impl ChatRun {
    /// Starts `num_outputs` answers. `num_bytes`: about how much there is to encode; `field`: what
    /// the API calls the messages.
    ///
    /// # Errors
    /// The messages cannot be rendered, or a sequence is invalid or refused.
    pub(crate) async fn start(
        state: &ServerState,
        conversation: Conversation,
        template: &SequenceTemplate,
        size: RunSize,
        rename: Rename,
    ) -> Result<Self, ApiError> {
        let asked = constraint::of(&conversation, state)?;
        let budget = conversation.thinking_budget.clone();
        let prompt = encode(state, conversation, size.num_bytes, rename("prompt")).await?;
        let Prompt { tokens, output } = prompt;
        let mut template = template.clone();
        if asked.is_some() || budget.is_some() {
            template.grammar = constraint::compile(asked, budget.as_ref(), &output, state).await?;
        }
        let style = state.style();
        let shown_ids = &mut template.text.shown_ids;
        shown_ids.extend(output.tools.iter().flat_map(|_| &style.tool_mark_ids));
        shown_ids.extend(output.reasoning.iter().flat_map(|_| &style.reasoning_mark_ids));
        let counts = TokenCounts {
            prompt: tokens.len(),
            reasoning: output.reasoning.map(|_| 0),
            ..TokenCounts::default()
        };
        let sequences = template.sequences(&[tokens], size.num_outputs, state.engine().limits())?;
        let deltas = generation::start(state, sequences)
            .await
            .map_err(|error| ApiError::from_start(error, state, rename))?;
        let parsers = (0..size.num_outputs).map(|_| OutputParser::new(&output)).collect();
        let num_outputs = size.num_outputs;
        Ok(Self { deltas, reader: ChatReader { parsers }, counts, num_outputs })
    }

    /// Waits for all answers.
    ///
    /// # Errors
    /// The first sequence that failed.
    pub(crate) async fn whole(mut self) -> Result<(Vec<ChatDelta>, TokenCounts), ApiError> {
        let mut answers = vec![ChatDelta::default(); self.num_outputs];
        while let Some((index, delta)) = self.deltas.next().await {
            let delta = self.reader.read(index, delta?, &mut self.counts);
            let answer = &mut answers[index];
            delta.pieces.into_iter().for_each(|piece| piece.join(&mut answer.pieces));
            answer.prompt.extend(delta.prompt);
            answer.tokens.extend(delta.tokens);
            answer.num_thought_tokens += delta.num_thought_tokens;
            answer.finish = delta.finish;
        }
        Ok((answers, self.counts))
    }
}

/// How much a run has to do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RunSize {
    pub(crate) num_outputs: usize,
    /// About how much there is to encode.
    pub(crate) num_bytes: usize,
}

impl ChatReader {
    /// Takes a delta of the answer at `index` apart and counts its tokens.
    pub(crate) fn read(
        &mut self,
        index: usize,
        delta: Delta,
        counts: &mut TokenCounts,
    ) -> ChatDelta {
        let parser = &mut self.parsers[index];
        counts.add(&delta);
        let was_thinking = parser.is_thinking();
        let pieces = parser.push(delta.text, delta.finish.is_some());
        let is_thought = was_thinking || parser.is_thinking();
        if let Some(reasoning) = counts.reasoning.as_mut().filter(|_| is_thought) {
            *reasoning += delta.num_tokens;
        }
        ChatDelta {
            num_thought_tokens: if is_thought { delta.tokens.len() } else { 0 },
            prompt: delta.prompt,
            pieces,
            tokens: delta.tokens,
            finish: delta.finish,
        }
    }
}

/// Renders and encodes a conversation. `num_bytes`: about how much there is to encode; `field`:
/// what the API calls the messages.
///
/// # Errors
/// The messages cannot be rendered.
pub(crate) async fn encode(
    state: &ServerState,
    conversation: Conversation,
    num_bytes: usize,
    field: &'static str,
) -> Result<Prompt, ApiError> {
    let has_tools = !conversation.tools.is_empty();
    if has_tools && state.style().tool_format.is_none() {
        let reason = "the model's chat template writes calls in a form that is not known; start \
                      the server with --tool-call-parser if you know it";
        return Err(ApiError::unsupported("tools", reason));
    }
    let (tokenizer, style) = (Arc::clone(state.tokenizer()), Arc::clone(state.style()));
    let encoded = off_thread(num_bytes, move || conversation.encode(&tokenizer, &style)).await?;
    encoded.map_err(|error| ApiError::from_tokenizer(&error, field))
}

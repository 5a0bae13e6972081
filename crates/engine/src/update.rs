//! What comes out of the engine.

use inflight_scheduler::Lapse;

/// A token, or the end. An accepted request gets any number of tokens and exactly one `Finished`.
#[derive(Clone, Debug, PartialEq)]
pub enum Update {
    /// How likely the next tokens of the prompt were, if asked for; all of them before any `Token`.
    Prompt(Vec<PromptToken>),
    /// The next token.
    Token(TokenUpdate),
    /// The one final message.
    Finished(FinishReason),
}

/// A generated token. A token that ends the output by being a stop token is delivered too.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct TokenUpdate {
    /// Its id.
    pub token: u32,
    /// Its logprob under the model's own distribution, if asked for.
    pub logprob: Option<f32>,
    /// The likeliest tokens and their logprobs, likeliest first, as many as asked for.
    pub top_logprobs: Vec<(u32, f32)>,
    /// Tokens of the prompt that did not have to be computed, as others had begun with them.
    pub num_cached_tokens: usize,
}

/// A token of the prompt and how likely it was after those before it. The first token, which comes
/// after nothing, has none.
#[derive(Clone, Debug, PartialEq)]
pub struct PromptToken {
    /// Its id.
    pub token: u32,
    /// Its logprob under the model's own distribution.
    pub logprob: f32,
    /// Its place among all tokens by their logprobs, from 1, if it is one of the likeliest 20.
    pub rank: Option<u32>,
    /// The likeliest tokens and their logprobs, likeliest first, as many as asked for.
    pub top_logprobs: Vec<(u32, f32)>,
}

/// Why a request ended.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FinishReason {
    /// A stop token was generated.
    Stop {
        /// Which.
        token: u32,
    },
    /// `max_tokens` or the context length was reached.
    Length,
    /// The caller aborted it, went away or did not keep up.
    Aborted,
    /// Its time was up: its own deadline's, or the queue's limit.
    Lapsed(Lapse),
    /// The engine cannot go on.
    Failed(String),
}

impl From<inflight_scheduler::FinishReason> for FinishReason {
    fn from(reason: inflight_scheduler::FinishReason) -> Self {
        match reason {
            inflight_scheduler::FinishReason::Stop { token } => Self::Stop { token },
            inflight_scheduler::FinishReason::Length => Self::Length,
        }
    }
}

/// Where a request's updates go. Called on the engine's thread: it must never block.
pub trait TokenSink: Send {
    /// The request's first row was launched: it waits in the queue no longer.
    fn started(&mut self) {}

    /// Takes an update, or says that nobody takes updates any more (or not fast enough); the engine
    /// then aborts the request.
    ///
    /// # Errors
    /// [`SinkClosed`], if the update was not taken.
    fn send(&mut self, update: Update) -> Result<(), SinkClosed>;

    /// Takes the state of a request that pools, `[hidden_size]`, as it is before the output
    /// matrix. It comes instead of a token.
    ///
    /// # Errors
    /// [`SinkClosed`], if the state was not taken: nobody asked for one.
    fn send_state(&mut self, state: Vec<f32>) -> Result<(), SinkClosed> {
        drop(state);
        Err(SinkClosed)
    }
}

/// Nobody takes updates any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("nobody takes this request's updates any more")]
pub struct SinkClosed;

//! Follows one output through a compiled grammar.

use std::{
    fmt,
    sync::{Mutex, PoisonError},
};

use inflight_engine::{Allowed, Grammar, Matcher};
use llguidance::api::StopReason;

/// A grammar at its start.
pub(crate) struct CompiledGrammar {
    /// Never moves. A matcher is not shareable, so each output gets a copy.
    start: Mutex<llguidance::Matcher>,
}

impl CompiledGrammar {
    pub(crate) fn new(start: llguidance::Matcher) -> Self {
        Self { start: Mutex::new(start) }
    }
}

impl fmt::Debug for CompiledGrammar {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CompiledGrammar").finish_non_exhaustive()
    }
}

impl Grammar for CompiledGrammar {
    fn start(&self) -> Box<dyn Matcher> {
        let start = self.start.lock().unwrap_or_else(PoisonError::into_inner);
        // Deep, or all outputs would share, and wait for, one lexer.
        Box::new(OutputMatcher { matcher: start.deep_clone(), is_ended: false })
    }
}

struct OutputMatcher {
    matcher: llguidance::Matcher,
    /// The end was written.
    is_ended: bool,
}

impl OutputMatcher {
    fn is_eos(&self, token: u32) -> bool {
        let tokens = self.matcher.tok_env();
        tokens.is_ok_and(|tokens| tokens.tok_trie().eos_tokens().contains(&token))
    }
}

impl Matcher for OutputMatcher {
    fn advance(&mut self, token: u32) -> Result<(), String> {
        // Where only the end can come the matcher stops before it does, and takes nothing more.
        let is_complete = self.matcher.is_stopped() && self.matcher.stop_reason().is_ok();
        if is_complete && !self.is_ended && self.is_eos(token) {
            self.is_ended = true;
            return Ok(());
        }
        self.matcher.consume_token(token).map_err(|error| error.to_string())?;
        self.is_ended = self.matcher.stop_reason() == StopReason::EndOfSentence;
        Ok(())
    }

    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String> {
        if self.is_ended {
            return Ok(Allowed::Nothing);
        }
        let allowed = self.matcher.compute_mask_or_eos().map_err(|error| error.to_string())?;
        // Tokens that the model has and the tokenizer has not are never allowed.
        for (word, allowed) in mask.iter_mut().zip(allowed.as_slice()) {
            *word = *allowed;
        }
        Ok(Allowed::Masked)
    }
}

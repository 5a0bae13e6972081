//! Tokens of a request.

use crate::generation::Delta;

/// Counted as vLLM does: a token that ends an output counts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct TokenCounts {
    /// Each prompt once, however many outputs it has.
    pub(crate) prompt: usize,
    /// Those of `prompt` that did not have to be computed.
    pub(crate) cached: usize,
    pub(crate) completion: usize,
    /// Those of `completion` that are thoughts; `None` if the model does not tell.
    pub(crate) reasoning: Option<usize>,
}

impl TokenCounts {
    /// Counts the tokens of one more delta; what of them are thoughts its reader knows.
    pub(crate) fn add(&mut self, delta: &Delta) {
        self.completion += delta.num_tokens;
        self.cached += delta.num_cached_tokens;
    }
}

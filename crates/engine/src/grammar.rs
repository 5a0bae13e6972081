//! What an output must be, as a matter of tokens: the engine knows no text.

use std::{fmt, sync::Arc};

/// Says which token sequences an output may be. Shared by all sequences of a request.
pub trait Grammar: fmt::Debug + Send + Sync {
    /// A matcher at the start of an output. Called on a thread of its own, as is all that matchers
    /// do: it may take about as long as a forward pass does.
    fn start(&self) -> Box<dyn Matcher>;
}

/// One output's place in its grammar.
pub trait Matcher: Send {
    /// Takes the output's next token.
    ///
    /// # Errors
    /// Why the grammar does not allow it; the request then fails.
    fn advance(&mut self, token: u32) -> Result<(), String>;

    /// Which tokens may come next. Bit `i % 32` of word `i / 32` of `mask`, all of whose bits are
    /// clear, is to be set for each token `i` that may, if it is not all of them.
    ///
    /// # Errors
    /// Why it cannot be said; the request then fails.
    fn allowed(&mut self, mask: &mut [u32]) -> Result<Allowed, String>;
}

/// Which tokens may come next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Allowed {
    /// Any.
    All,
    /// Those in the mask, end-of-sequence tokens too.
    Masked,
    /// None: the output is complete, and ends whatever the request's stop tokens are.
    Nothing,
}

/// A handle to a grammar. Equal to itself and its clones alone.
#[derive(Clone, Debug)]
pub struct SharedGrammar(pub Arc<dyn Grammar>);

impl PartialEq for SharedGrammar {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

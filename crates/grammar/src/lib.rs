//! What an output must be (a JSON schema, a regular expression, a grammar, a choice) as sets of
//! tokens that may come next.
//!
//! Reading order: [`Constraint`] is what callers ask for, [`GrammarCompiler`] turns it into an
//! engine's grammar, `matcher` follows one output, `vocabulary` is a tokenizer's tokens as they are
//! needed for it. [`gbnf`] translates llama.cpp's grammars, [`tools`] makes constraints of tool
//! calls, [`thinking`] lets a model think first.
//!
//! Invariant: fails closed. What cannot be enforced is refused when it is compiled, and the refusal
//! names it; nothing is relaxed in silence.
//! Invariant: compiling ends within limits of memory and work, whatever is asked for.
//! Invariant: an output ends only where its grammar is complete, or by length.

mod cache;
mod compiler;
mod constraint;
mod error;
pub mod gbnf;
mod lark;
mod matcher;
pub mod thinking;
pub mod tools;
mod vocabulary;

pub use compiler::GrammarCompiler;
pub use constraint::Constraint;
pub use error::GrammarError;
pub use thinking::Thinking;

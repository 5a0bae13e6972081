//! A vocabulary of all bytes and a few words, and outputs spelt in it.

#![allow(dead_code, unreachable_pub, reason = "each test uses some of it")]
#![allow(clippy::unwrap_used, reason = "a test's helpers fail as tests do")]

use std::sync::LazyLock;

use inflight_engine::{Allowed, Matcher, SharedGrammar};
use inflight_grammar::{Constraint, GrammarCompiler};
use inflight_tokenizer::{GgufVocab, Tokenizer};

/// Tokens beside the bytes, whose ids are their values. None but `</s>` is one with which some
/// model ends its turn.
const WORDS: [(&str, i32); 7] = [
    ("</s>", 3),
    ("<think>", 3),
    ("</think>", 3),
    ("<|tool|>", 3),
    ("{\"", 1),
    ("true", 1),
    ("abc", 1),
];
pub const EOS: u32 = 256;
pub const CALL: u32 = 259;
/// The model's own vocabulary is padded.
pub const VOCAB_SIZE: usize = 300;

pub static TOKENIZER: LazyLock<Tokenizer> = LazyLock::new(|| {
    let bytes = (0..=255).map(|byte| (format!("<0x{byte:02X}>"), 6));
    let words = WORDS.iter().map(|(word, kind)| ((*word).to_owned(), *kind));
    let (tokens, token_types): (Vec<String>, Vec<i32>) = bytes.chain(words).unzip();
    let scores = vec![0.0; tokens.len()];
    let vocab = GgufVocab {
        model: "llama".to_owned(),
        tokens,
        token_types,
        scores,
        eos: Some(EOS),
        ..GgufVocab::default()
    };
    Tokenizer::from_gguf(vocab).unwrap()
});

pub static COMPILER: LazyLock<GrammarCompiler> =
    LazyLock::new(|| GrammarCompiler::new(&TOKENIZER, VOCAB_SIZE).unwrap());

pub fn compile(constraint: &Constraint) -> Result<SharedGrammar, String> {
    COMPILER.compile(constraint).map_err(|error| error.to_string())
}

/// What may come next; `None` at the end.
pub fn allowed(matcher: &mut dyn Matcher) -> Option<Vec<u32>> {
    let mut mask = vec![0; VOCAB_SIZE.div_ceil(32)];
    let allowed = matcher.allowed(&mut mask).unwrap();
    let has = |id: &u32| mask[*id as usize / 32] >> (id % 32) & 1 == 1;
    match allowed {
        Allowed::Nothing => None,
        Allowed::All => Some((0..VOCAB_SIZE as u32).collect()),
        Allowed::Masked => Some((0..VOCAB_SIZE as u32).filter(has).collect()),
    }
}

/// Whether all of `tokens` may come, and then the end; if not, after how many it stops.
pub fn follow(grammar: &SharedGrammar, tokens: &[u32]) -> Result<(), usize> {
    let mut matcher = grammar.0.start();
    for (i, token) in tokens.iter().chain([&EOS]).enumerate() {
        if allowed(&mut *matcher).is_none_or(|allowed| !allowed.contains(token)) {
            return Err(i);
        }
        matcher.advance(*token).unwrap();
    }
    assert_eq!(allowed(&mut *matcher), None);
    Ok(())
}

/// Whether a text, byte by byte, is a whole output.
pub fn accepts(grammar: &SharedGrammar, text: &str) -> Result<(), usize> {
    follow(grammar, &text.bytes().map(u32::from).collect::<Vec<_>>())
}

/// Checks which texts a constraint accepts and which it does not.
pub fn check(constraint: &Constraint, good: &[&str], bad: &[&str]) {
    let grammar = compile(constraint).unwrap_or_else(|error| panic!("{constraint:?}: {error}"));
    for text in good {
        assert_eq!(accepts(&grammar, text), Ok(()), "{constraint:?}: {text}");
    }
    for text in bad {
        assert!(accepts(&grammar, text).is_err(), "{constraint:?}: {text}");
    }
}

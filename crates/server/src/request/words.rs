//! Texts that sampling knows as tokens: bad words, and what ends a repetition.

use std::collections::HashMap;
use std::sync::Arc;

use inflight_engine::DryBreakers;
use inflight_tokenizer::{Special, TokenKind, Tokenizer};

use crate::error::ApiError;

/// llama.cpp's.
const USUAL_BREAKERS: [&str; 4] = ["\n", ":", "\"", "*"];
const MAX_BREAKERS: usize = 32;
const MAX_BREAKER_BYTES: usize = 40;
/// Tokens of a breaker after its first one; what is longer never breaks anything anyway.
const MAX_TAIL: usize = 20;

/// Tokens of words that must not come, each with a space before it and without, as vLLM bans them.
///
/// # Errors
/// An empty word, or one that cannot be expressed.
pub(super) fn bad_words(
    words: &[String],
    tokenizer: &Tokenizer,
) -> Result<Vec<Vec<u32>>, ApiError> {
    let mut all = Vec::new();
    for word in words {
        let word = word.trim_start_matches(' ');
        if word.is_empty() {
            return Err(ApiError::invalid("bad_words", "has an empty word"));
        }
        for text in [word.to_owned(), format!(" {word}")] {
            let encoded = tokenizer.encode(&text, Special::AsText);
            let tokens = encoded.map_err(|e| ApiError::from_tokenizer(&e, "bad_words"))?;
            if !all.contains(&tokens) {
                all.push(tokens);
            }
        }
    }
    Ok(all)
}

/// Token sequences whose text holds a breaker: a token that holds it, or tokens over which it
/// spreads.
///
/// # Errors
/// Too many breakers, or one that is empty or too long.
pub(super) fn dry_breakers(
    breakers: Option<Vec<String>>,
    tokenizer: &Tokenizer,
) -> Result<Arc<DryBreakers>, ApiError> {
    let breakers = breakers.unwrap_or_else(|| USUAL_BREAKERS.map(str::to_owned).to_vec());
    if breakers.len() > MAX_BREAKERS {
        let reason = format!("has {} texts; at most {MAX_BREAKERS} are allowed", breakers.len());
        return Err(ApiError::invalid("dry_sequence_breakers", reason));
    }
    let mut heads: HashMap<u32, Vec<Vec<u32>>> = HashMap::new();
    for breaker in &breakers {
        if !(1..=MAX_BREAKER_BYTES).contains(&breaker.len()) {
            let reason = format!("{breaker:?} has not 1 to {MAX_BREAKER_BYTES} bytes");
            return Err(ApiError::invalid("dry_sequence_breakers", reason));
        }
        add_breaker(breaker, tokenizer, &mut heads)?;
    }
    Ok(Arc::new(DryBreakers(heads)))
}

fn add_breaker(
    breaker: &str,
    tokenizer: &Tokenizer,
    heads: &mut HashMap<u32, Vec<Vec<u32>>>,
) -> Result<(), ApiError> {
    let table = tokenizer.token_table();
    let wanted = breaker.as_bytes();
    for id in 0..u32::try_from(table.len()).unwrap_or(u32::MAX) {
        let bytes = table.bytes(id);
        if bytes.is_empty() || table.kind(id) == TokenKind::Unused {
            continue;
        }
        if bytes.windows(wanted.len()).any(|window| window == wanted) {
            heads.entry(id).or_default().push(Vec::new());
            continue;
        }
        // The token ends with the breaker's begin.
        let most = wanted.len().min(bytes.len() + 1);
        for len in (1..most).filter(|len| bytes.ends_with(&wanted[..*len])) {
            let Some(rest) = breaker.get(len..) else { continue };
            let encoded = tokenizer.encode(rest, Special::AsText);
            let mut tail =
                encoded.map_err(|e| ApiError::from_tokenizer(&e, "dry_sequence_breakers"))?;
            tail.truncate(MAX_TAIL);
            heads.entry(id).or_default().push(tail);
        }
    }
    Ok(())
}

//! A tokenizer's tokens as `llguidance` reads them.

use std::sync::Arc;

use inflight_tokenizer::{TokenKind, Tokenizer};
use llguidance::toktrie::{TokEnv, TokRxInfo, TokTrie, TokenId, TokenizerEnv};

use crate::GrammarError;

/// Tokens as a trie of their bytes.
struct Vocabulary {
    trie: TokTrie,
}

impl TokenizerEnv for Vocabulary {
    fn tok_trie(&self) -> &TokTrie {
        &self.trie
    }

    fn tokenize_bytes(&self, bytes: &[u8]) -> Vec<TokenId> {
        self.trie.greedy_tokenize(bytes)
    }

    /// How a text is cut into tokens is left to the model.
    fn tokenize_is_canonical(&self) -> bool {
        false
    }
}

/// The tokens that both the tokenizer and a model of `vocab_size` tokens know.
///
/// Control tokens are no text: grammars meet them only where they name them.
pub(crate) fn vocabulary(tokenizer: &Tokenizer, vocab_size: usize) -> Result<TokEnv, GrammarError> {
    let table = tokenizer.token_table();
    let num_tokens = vocab_size.min(table.len());
    let num_ids = u32::try_from(num_tokens).expect("token ids have 32 bits");
    let is_known = |id: &&u32| **id < num_ids;
    let eos_ids: Vec<u32> = tokenizer.eos_ids().iter().filter(is_known).copied().collect();
    let Some(&first) = eos_ids.first() else {
        return Err(GrammarError::Vocabulary("it has no token that ends an output".to_owned()));
    };
    let words: Vec<Vec<u8>> = (0..num_ids)
        .map(|id| match table.kind(id) {
            TokenKind::Unused => Vec::new(),
            TokenKind::Normal | TokenKind::UserDefined => table.bytes(id).to_vec(),
            TokenKind::Control => [&[TokTrie::SPECIAL_TOKEN_MARKER], table.bytes(id)].concat(),
        })
        .collect();
    let trie = TokTrie::from(&TokRxInfo::new(num_ids, first), &words).with_eos_tokens(&eos_ids);
    Ok(Arc::new(Vocabulary { trie }))
}

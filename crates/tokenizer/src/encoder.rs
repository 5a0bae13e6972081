//! Text to ids, whichever file the vocabulary came from.

use crate::TokenizerError;
use crate::bpe::ByteBpe;
use crate::hf::HfPipeline;
use crate::specials::{Segment, Special, SpecialFinder};
use crate::spm::Spm;

/// Encodes text.
#[derive(Debug)]
pub(crate) enum Encoder {
    /// A vocabulary from GGUF metadata.
    Gguf {
        /// Cuts out the tokens that are matched whole.
        specials: SpecialFinder,
        /// Encodes what lies between.
        words: Words,
    },
    /// A `tokenizer.json`, whose parts are as free as the `tokenizers` library.
    Folder(Box<HfPipeline>),
}

/// Encodes text that holds no token matched whole.
#[derive(Debug)]
pub(crate) enum Words {
    /// The `gpt2` family.
    Bpe(Box<ByteBpe>),
    /// The `llama` family.
    Spm(Box<Spm>),
}

impl Encoder {
    pub(crate) fn encode(&self, text: &str, special: Special) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::Gguf { specials, words } => encode_segments(specials, words, text, special),
            Self::Folder(pipeline) => pipeline.encode(text, special),
        }
    }
}

impl Words {
    /// Whether every text gets a space in front that the user did not type.
    pub(crate) fn adds_space_prefix(&self) -> bool {
        matches!(self, Self::Spm(spm) if spm.adds_space_prefix)
    }
}

fn encode_segments(
    specials: &SpecialFinder,
    words: &Words,
    text: &str,
    special: Special,
) -> Result<Vec<u32>, TokenizerError> {
    let mut ids = Vec::with_capacity(text.len() / 3);
    let mut after_token = true;
    for segment in specials.split(text, special) {
        match (segment, words) {
            (Segment::Token(id), _) => ids.push(id),
            (Segment::Text(text), Words::Bpe(bpe)) => bpe.encode(text, &mut ids)?,
            (Segment::Text(text), Words::Spm(spm)) => spm.encode(text, after_token, &mut ids)?,
        }
        after_token = matches!(segment, Segment::Token(_));
    }
    Ok(ids)
}

//! A model's tokenizer, wherever its files keep it.

use std::path::Path;

use anyhow::{Context, Result, bail};
use inflight_model::{GgufFile, GgufTokenizer, ModelFiles, Weights};
use inflight_tokenizer::{GgufVocab, Tokenizer};

/// Builds the tokenizer of a model. A dummy model without one gets one of plain bytes.
pub(crate) fn load_tokenizer(files: &ModelFiles) -> Result<Tokenizer> {
    if let Some(file) = files.gguf() {
        return tokenizer_of_gguf(file);
    }
    let folder = files.folder.as_ref().context("the model has neither file nor folder")?;
    if folder.join("tokenizer.json").exists() {
        let tokenizer = Tokenizer::from_folder(folder);
        return tokenizer.with_context(|| format!("the tokenizer of {}", folder.display()));
    }
    if !matches!(files.weights, Weights::Dummy(_)) {
        bail!("{}: there is no tokenizer.json, which turns text into tokens", folder.display());
    }
    tracing::warn!("there is no tokenizer.json: every byte of a text is a token");
    Tokenizer::from_gguf(byte_vocab(files.config.vocab_size)).context("the tokenizer of bytes")
}

/// Builds the tokenizer of a model whose weights do not matter and need not be there.
pub(crate) fn load_tokenizer_alone(model: &Path) -> Result<Tokenizer> {
    if model.is_dir() {
        let tokenizer = Tokenizer::from_folder(model);
        return tokenizer.with_context(|| format!("the tokenizer of {}", model.display()));
    }
    tokenizer_of_gguf(&GgufFile::open(model)?)
}

fn tokenizer_of_gguf(file: &GgufFile) -> Result<Tokenizer> {
    let tokenizer = Tokenizer::from_gguf(vocab_of(file.tokenizer()?));
    tokenizer.with_context(|| format!("the tokenizer of {}", file.path()))
}

fn vocab_of(file: GgufTokenizer) -> GgufVocab {
    GgufVocab {
        model: file.model,
        pre: file.pre,
        tokens: file.tokens,
        scores: file.scores,
        token_types: file.token_types,
        merges: file.merges,
        bos: file.bos_token_id,
        eos: file.eos_token_id,
        unk: file.unknown_token_id,
        pad: file.padding_token_id,
        add_bos: file.add_bos_token,
        add_eos: file.add_eos_token,
        add_space_prefix: file.add_space_prefix,
        chat_template: file.chat_template,
        extra_eog: file.eot_token_id.into_iter().collect(),
    }
}

/// Token ids 0 to 255 are bytes: any text can be sent to a model of which only sizes are known. The
/// others are shown as their number; no text becomes one, since no two bytes make a token.
fn byte_vocab(vocab_size: usize) -> GgufVocab {
    // Values of `tokenizer.ggml.token_type`.
    const NORMAL: i32 = 1;
    const BYTE: i32 = 6;
    let mut tokens: Vec<_> = (0..256).map(|byte| format!("<0x{byte:02X}>")).collect();
    tokens.extend((256..vocab_size).map(|id| format!("\u{2581}{id}")));
    let mut token_types = vec![BYTE; 256];
    token_types.resize(tokens.len(), NORMAL);
    // This family writes a space as another character, which must be a token to be found.
    tokens[usize::from(b' ')] = "\u{2581}".to_owned();
    token_types[usize::from(b' ')] = NORMAL;
    GgufVocab {
        model: "llama".to_owned(),
        scores: vec![0.0; tokens.len()],
        tokens,
        token_types,
        add_bos: Some(false),
        add_space_prefix: Some(false),
        chat_template: Some("{% for m in messages %}{{ m.content }}\n{% endfor %}".to_owned()),
        ..GgufVocab::default()
    }
}

#[cfg(test)]
mod tests {
    use inflight_tokenizer::Special;

    use super::*;

    #[test]
    fn bytes_are_tokens() {
        let tokenizer = Tokenizer::from_gguf(byte_vocab(400)).unwrap();
        let text = "Hi, é\n <0x41> 300";
        let ids = tokenizer.encode_prompt(text, Special::Parse).unwrap();
        assert_eq!(ids, text.bytes().map(u32::from).collect::<Vec<_>>());
        assert_eq!(tokenizer.decode(&ids, true), text);
        assert_eq!(tokenizer.decode(&[72, 300, 399], true), "H 300 399");
    }
}

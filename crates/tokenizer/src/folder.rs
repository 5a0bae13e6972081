//! Tokenizers from Hugging Face folders.

use std::fs;
use std::io::ErrorKind;
use std::path::Path;

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

use crate::encoder::Encoder;
use crate::hf::HfPipeline;
use crate::hf_decoder::DecoderShape;
use crate::hf_frame::Frame;
use crate::tokenizer::Parts;
use crate::{ChatTemplate, TemplateTokens, TokenizerError};

/// The largest file that is read: the largest known `tokenizer.json` has 33 MB.
const MAX_FILE_BYTES: u64 = 512 << 20;

/// The members of `tokenizer.json` that the library does not let us read.
#[derive(Deserialize)]
struct TokenizerJson {
    #[serde(default)]
    pre_tokenizer: Value,
    #[serde(default)]
    post_processor: Value,
    #[serde(default)]
    decoder: Value,
}

/// `tokenizer_config.json` and `special_tokens_map.json`, as far as they matter here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct TokenizerConfig {
    bos_token: Option<TokenName>,
    eos_token: Option<TokenName>,
    unk_token: Option<TokenName>,
    pad_token: Option<TokenName>,
    add_bos_token: Option<bool>,
    add_eos_token: Option<bool>,
    chat_template: Option<Templates>,
}

/// A token's name, alone or among its properties.
#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum TokenName {
    Plain(String),
    Added { content: String },
}

/// A model's chat template, alone or one of several.
#[derive(Deserialize)]
#[serde(untagged)]
enum Templates {
    One(String),
    Named(Vec<NamedTemplate>),
}

#[derive(Deserialize)]
struct NamedTemplate {
    name: String,
    template: String,
}

/// `generation_config.json` and `config.json`, as far as they matter here.
#[derive(Default, Deserialize)]
#[serde(default)]
struct GenerationConfig {
    eos_token_id: Option<TokenIds>,
}

#[derive(Deserialize)]
#[serde(untagged)]
enum TokenIds {
    One(u32),
    Several(Vec<u32>),
}

/// Reads the files of a folder into what a tokenizer consists of.
pub(crate) fn read(folder: &Path) -> Result<Parts, TokenizerError> {
    let path = folder.join("tokenizer.json");
    let bytes = read_file(&path)?.ok_or_else(|| TokenizerError::Read {
        path: path.clone(),
        source: ErrorKind::NotFound.into(),
    })?;
    let bad_file = |reason| TokenizerError::BadFile { path: path.clone(), reason };
    let json: TokenizerJson =
        serde_json::from_slice(&bytes).map_err(|error| bad_file(error.to_string()))?;
    let decoder = DecoderShape::parse(&json.decoder).map_err(bad_file)?;
    let Frame { mut prefix, mut suffix } = Frame::parse(&json.post_processor).map_err(bad_file)?;
    let tokenizer =
        tokenizers::Tokenizer::from_bytes(&bytes).map_err(|error| bad_file(error.to_string()))?;
    let pipeline = HfPipeline::new(tokenizer, &json.pre_tokenizer);

    let config = read_config(folder)?;
    let id = |name: &Option<TokenName>| pipeline.token_to_id(name.as_ref()?.text());
    let (bos, eos) = (id(&config.bos_token), id(&config.eos_token));
    frame_by_config(&mut prefix, bos, config.add_bos_token);
    frame_by_config(&mut suffix, eos, config.add_eos_token);
    let table = pipeline.table(&decoder)?;
    if let Some(id) = prefix.iter().chain(&suffix).find(|&&id| id as usize >= table.len()) {
        return Err(bad_file(format!("its post-processor adds token {id}, past the vocabulary")));
    }
    Ok(Parts {
        table,
        encoder: Encoder::Folder(Box::new(pipeline)),
        bos,
        eos_ids: read_eos_ids(folder, eos)?,
        prefix,
        suffix,
        chat_template: read_chat_template(folder, &config)?,
    })
}

/// What the config says about BOS or EOS overrules the post-processor, as in `transformers`.
fn frame_by_config(frame: &mut Vec<u32>, token: Option<u32>, is_added: Option<bool>) {
    match (token, is_added) {
        (Some(token), Some(true)) if !frame.contains(&token) => frame.push(token),
        (Some(token), Some(false)) => frame.retain(|&id| id != token),
        _ => {}
    }
}

/// The tokenizer's config; special tokens that it lacks come from the older file beside it.
fn read_config(folder: &Path) -> Result<TokenizerConfig, TokenizerError> {
    let config: TokenizerConfig = read_json(&folder.join("tokenizer_config.json"))?;
    let map: TokenizerConfig = read_json(&folder.join("special_tokens_map.json"))?;
    Ok(TokenizerConfig {
        bos_token: config.bos_token.or(map.bos_token),
        eos_token: config.eos_token.or(map.eos_token),
        unk_token: config.unk_token.or(map.unk_token),
        pad_token: config.pad_token.or(map.pad_token),
        ..config
    })
}

/// All tokens that end a generation: the tokenizer's own, then those of the generation config or,
/// where it names none, of the model's config.
fn read_eos_ids(folder: &Path, eos: Option<u32>) -> Result<Vec<u32>, TokenizerError> {
    let generation: GenerationConfig = read_json(&folder.join("generation_config.json"))?;
    let ids = match generation.eos_token_id {
        Some(ids) => Some(ids),
        None => read_json::<GenerationConfig>(&folder.join("config.json"))?.eos_token_id,
    };
    let mut all: Vec<u32> = eos.into_iter().collect();
    let more = match ids {
        Some(TokenIds::One(id)) => vec![id],
        Some(TokenIds::Several(ids)) => ids,
        None => Vec::new(),
    };
    for id in more {
        if !all.contains(&id) {
            all.push(id);
        }
    }
    Ok(all)
}

fn read_chat_template(
    folder: &Path,
    config: &TokenizerConfig,
) -> Result<Option<ChatTemplate>, TokenizerError> {
    let path = folder.join("chat_template.jinja");
    let own_file = match read_file(&path)? {
        Some(bytes) => Some(String::from_utf8(bytes).map_err(|error| TokenizerError::BadFile {
            path: path.clone(),
            reason: error.to_string(),
        })?),
        None => None,
    };
    let older_file: TokenizerConfig = read_json(&folder.join("chat_template.json"))?;
    let text = |name: &Option<TokenName>| name.as_ref().map(|name| name.text().to_string());
    let tokens = TemplateTokens {
        bos: text(&config.bos_token),
        eos: text(&config.eos_token),
        unk: text(&config.unk_token),
        pad: text(&config.pad_token),
    };
    if let Some(source) = own_file {
        return ChatTemplate::new(&source, tokens).map(Some);
    }
    let templates = older_file.chat_template.as_ref().or(config.chat_template.as_ref());
    templates.and_then(|templates| templates.compile(tokens).transpose()).transpose()
}

impl TokenName {
    fn text(&self) -> &str {
        match self {
            Self::Plain(text) | Self::Added { content: text } => text,
        }
    }
}

impl Templates {
    /// Compiles the default template, and beside it the one for requests with tools. A list
    /// without either counts as no template.
    fn compile(&self, tokens: TemplateTokens) -> Result<Option<ChatTemplate>, TokenizerError> {
        let named = match self {
            Self::One(source) => return ChatTemplate::new(source, tokens).map(Some),
            Self::Named(named) => named,
        };
        let find = |name: &str| named.iter().find(|t| t.name == name).map(|t| t.template.as_str());
        let tool_use = find("tool_use");
        let Some(default) = find("default").or(tool_use) else { return Ok(None) };
        let template = ChatTemplate::new(default, tokens)?;
        match tool_use {
            Some(source) => template.with_tool_use(source).map(Some),
            None => Ok(Some(template)),
        }
    }
}

/// Reads a file of bounded size; `None` if it does not exist.
fn read_file(path: &Path) -> Result<Option<Vec<u8>>, TokenizerError> {
    let failed = |source| TokenizerError::Read { path: path.to_path_buf(), source };
    match fs::metadata(path) {
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(failed(error)),
        Ok(metadata) if metadata.len() > MAX_FILE_BYTES => {
            let reason = format!("{} bytes are over {MAX_FILE_BYTES}", metadata.len());
            return Err(TokenizerError::BadFile { path: path.to_path_buf(), reason });
        }
        Ok(_) => {}
    }
    fs::read(path).map(Some).map_err(failed)
}

/// Reads a JSON file; a missing one counts as empty.
fn read_json<T: DeserializeOwned + Default>(path: &Path) -> Result<T, TokenizerError> {
    let Some(bytes) = read_file(path)? else { return Ok(T::default()) };
    serde_json::from_slice(&bytes).map_err(|error| TokenizerError::BadFile {
        path: path.to_path_buf(),
        reason: error.to_string(),
    })
}

//! The prompt of a completion, in its four forms.

use std::borrow::Cow;
use std::fmt;

use inflight_tokenizer::{Special, Tokenizer, TokenizerError};
use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::{Error, SeqAccess, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};

/// Most prompts of one request.
const MAX_PROMPTS: usize = 1024;

/// One prompt.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
}

impl Prompt {
    /// The prompt's tokens. Names of control tokens inside a text mean those tokens, as in vLLM.
    pub(crate) fn encode(
        &self,
        tokenizer: &Tokenizer,
        add_special_tokens: bool,
    ) -> Result<Vec<u32>, TokenizerError> {
        match self {
            Self::Tokens(ids) => Ok(ids.clone()),
            Self::Text(text) if add_special_tokens => tokenizer.encode_prompt(text, Special::Parse),
            Self::Text(text) => tokenizer.encode(text, Special::Parse),
        }
    }

    /// The prompt as text.
    pub(crate) fn text(&self, tokenizer: &Tokenizer, skip_special_tokens: bool) -> String {
        match self {
            Self::Text(text) => text.clone(),
            Self::Tokens(ids) => tokenizer.decode(ids, skip_special_tokens),
        }
    }

    /// How much there is to encode.
    pub(crate) fn num_bytes(&self) -> usize {
        match self {
            Self::Text(text) => text.len(),
            Self::Tokens(ids) => size_of_val(&ids[..]),
        }
    }
}

/// All prompts of a request: a string, a list of strings, a list of token ids, a list of those.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Prompts(pub(crate) Vec<Prompt>);

impl<'de> Deserialize<'de> for Prompts {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(PromptsVisitor)
    }
}

impl JsonSchema for Prompts {
    fn schema_name() -> Cow<'static, str> {
        "Prompts".into()
    }

    fn json_schema(_generator: &mut SchemaGenerator) -> Schema {
        let tokens = json!({
            "type": "array", "minItems": 1, "items": {"type": "integer", "format": "token-id"},
        });
        let many = |items: &Value| {
            let most = MAX_PROMPTS;
            json!({"type": "array", "minItems": 1, "maxItems": most, "items": items})
        };
        json_schema!({
            "description": "A text, texts, a text's tokens, or those of texts.",
            "anyOf": [
                {"type": "string"}, many(&json!({"type": "string"})), tokens, many(&tokens),
            ],
        })
    }
}

/// A member of the list that a prompt may be.
enum Item {
    Text(String),
    Token(u32),
    Tokens(Vec<u32>),
}

impl<'de> Deserialize<'de> for Item {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(ItemVisitor)
    }
}

struct PromptsVisitor;

impl<'de> Visitor<'de> for PromptsVisitor {
    type Value = Prompts;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a list of strings, a list of token ids or a list of such lists")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Prompts, E> {
        Ok(Prompts(vec![Prompt::Text(text.to_owned())]))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Prompts, A::Error> {
        let mut prompts = Vec::new();
        let mut tokens = Vec::new();
        while let Some(item) = items.next_element()? {
            match item {
                Item::Text(text) => prompts.push(Prompt::Text(text)),
                Item::Tokens(ids) => prompts.push(Prompt::Tokens(ids)),
                Item::Token(id) => tokens.push(id),
            }
            if prompts.len() > MAX_PROMPTS {
                return Err(A::Error::custom(format!("has over {MAX_PROMPTS} prompts")));
            }
        }
        match (prompts.is_empty(), tokens.is_empty()) {
            (true, true) => Err(A::Error::custom("is an empty list")),
            (true, false) => Ok(Prompts(vec![Prompt::Tokens(tokens)])),
            (false, true) => Ok(Prompts(prompts)),
            (false, false) => Err(A::Error::custom("mixes token ids with whole prompts")),
        }
    }
}

struct ItemVisitor;

impl<'de> Visitor<'de> for ItemVisitor {
    type Value = Item;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a string, a token id or a list of token ids")
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Item, E> {
        Ok(Item::Text(text.to_owned()))
    }

    fn visit_u64<E: Error>(self, id: u64) -> Result<Item, E> {
        let too_large = |_| E::custom(format!("{id} is not a token id"));
        u32::try_from(id).map(Item::Token).map_err(too_large)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Item, A::Error> {
        let mut ids = Vec::new();
        while let Some(id) = items.next_element()? {
            ids.push(id);
        }
        Ok(Item::Tokens(ids))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_forms() {
        let check = |json: &str, expected: Result<&[Prompt], &str>| {
            let read = serde_json::from_str::<Prompts>(json).map(|prompts| prompts.0);
            match (read, expected) {
                (Ok(read), Ok(expected)) => assert_eq!(read, expected, "{json}"),
                (Err(error), Err(expected)) => {
                    assert!(error.to_string().contains(expected), "{json}: {error}");
                }
                (read, _) => panic!("{json}: {read:?}"),
            }
        };
        let text = |text: &str| Prompt::Text(text.to_owned());
        check(r#""a\n""#, Ok(&[text("a\n")]));
        check(r#"["a", ""]"#, Ok(&[text("a"), text("")]));
        check("[1, 2]", Ok(&[Prompt::Tokens(vec![1, 2])]));
        check(
            "[[1, 2], [3], []]",
            Ok(&[Prompt::Tokens(vec![1, 2]), Prompt::Tokens(vec![3]), Prompt::Tokens(vec![])]),
        );
        check("[]", Err("is an empty list"));
        check(r#"["a", 1]"#, Err("mixes"));
        check("3", Err("expected a string, a list of strings"));
        check("[-1]", Err("expected a string, a token id"));
        check("[4294967296]", Err("4294967296 is not a token id"));
        check("[[1, 2.5]]", Err("2.5"));
        check("[{}]", Err("expected a string, a token id"));
    }
}

//! The post-processor of a `tokenizer.json`: what goes around a text.
//!
//! The library applies it too, but panics on a template that names a token it does not define.

use std::collections::HashMap;

use serde::Deserialize;
use serde_json::Value;

/// The tokens before and after a text.
#[derive(Debug, Default, PartialEq, Eq)]
pub(crate) struct Frame {
    pub(crate) prefix: Vec<u32>,
    pub(crate) suffix: Vec<u32>,
}

/// The members of the post-processor's parts that matter here.
#[derive(Deserialize)]
#[serde(tag = "type")]
enum Processor {
    Sequence { processors: Vec<Processor> },
    ByteLevel {},
    TemplateProcessing { single: Vec<Piece>, special_tokens: HashMap<String, SpecialToken> },
    BertProcessing { cls: (String, u32), sep: (String, u32) },
    RobertaProcessing { cls: (String, u32), sep: (String, u32) },
}

/// A part of a template: the text, or a token by its name.
#[derive(Deserialize)]
enum Piece {
    Sequence {},
    SpecialToken { id: String },
}

#[derive(Deserialize)]
struct SpecialToken {
    ids: Vec<u32>,
}

impl Frame {
    /// Reads the `post_processor` member of a `tokenizer.json`.
    ///
    /// # Errors
    /// A processor that is malformed, or names a token that it does not define.
    pub(crate) fn parse(post_processor: &Value) -> Result<Self, String> {
        let mut frame = Self::default();
        if !post_processor.is_null() {
            let processor = Processor::deserialize(post_processor)
                .map_err(|error| format!("its post-processor is malformed: {error}"))?;
            frame.add(processor)?;
        }
        Ok(frame)
    }

    /// Puts a processor's tokens around what the ones before it put.
    fn add(&mut self, processor: Processor) -> Result<(), String> {
        match processor {
            Processor::Sequence { processors } => {
                processors.into_iter().try_for_each(|processor| self.add(processor))
            }
            Processor::ByteLevel {} => Ok(()),
            Processor::TemplateProcessing { single, special_tokens } => {
                self.add_template(&single, &special_tokens)
            }
            Processor::BertProcessing { cls, sep } | Processor::RobertaProcessing { cls, sep } => {
                self.prefix.insert(0, cls.1);
                self.suffix.push(sep.1);
                Ok(())
            }
        }
    }

    fn add_template(
        &mut self,
        template: &[Piece],
        special_tokens: &HashMap<String, SpecialToken>,
    ) -> Result<(), String> {
        let (mut before, mut is_after_text) = (Vec::new(), false);
        for piece in template {
            let Piece::SpecialToken { id } = piece else {
                is_after_text = true;
                continue;
            };
            let token = special_tokens.get(id);
            let token = token.ok_or_else(|| format!("its post-processor lacks token `{id}`"))?;
            let side = if is_after_text { &mut self.suffix } else { &mut before };
            side.extend(&token.ids);
        }
        self.prefix.splice(..0, before);
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn check(post_processor: &Value, prefix: &[u32], suffix: &[u32]) {
        let frame = Frame { prefix: prefix.to_vec(), suffix: suffix.to_vec() };
        assert_eq!(Frame::parse(post_processor), Ok(frame), "{post_processor}");
    }

    fn template(names: &[&str]) -> Value {
        let piece = |name: &&str| match *name {
            "A" => json!({"Sequence": {"id": "A", "type_id": 0}}),
            name => json!({"SpecialToken": {"id": name, "type_id": 0}}),
        };
        json!({
            "type": "TemplateProcessing",
            "single": names.iter().map(piece).collect::<Vec<_>>(),
            "pair": [],
            "special_tokens": {
                "<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]},
                "</s>": {"id": "</s>", "ids": [2], "tokens": ["</s>"]},
            },
        })
    }

    #[test]
    fn frames_of_every_kind() {
        let byte_level = json!({"type": "ByteLevel", "add_prefix_space": true});
        check(&Value::Null, &[], &[]);
        check(&byte_level, &[], &[]);
        check(&template(&["<s>", "A"]), &[1], &[]);
        check(&template(&["<s>", "A", "</s>", "<s>"]), &[1], &[2, 1]);
        let parts = [byte_level, template(&["<s>", "A"])];
        check(&json!({"type": "Sequence", "processors": parts}), &[1], &[]);
        let bert = json!({"type": "BertProcessing", "cls": ["[CLS]", 5], "sep": ["[SEP]", 6]});
        check(&bert, &[5], &[6]);
    }

    #[test]
    fn a_token_without_definition_is_named() {
        assert!(Frame::parse(&template(&["<x>", "A"])).unwrap_err().contains("`<x>`"));
        assert!(Frame::parse(&json!({"type": "Other"})).unwrap_err().contains("Other"));
    }
}

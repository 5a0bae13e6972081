//! What `bench offline --constraint` holds outputs to.

use anyhow::{Context, Result};
use inflight_engine::SharedGrammar;
use inflight_grammar::{Constraint, GrammarCompiler};
use inflight_model::ModelFiles;
use serde_json::json;

use crate::args::{ConstraintChoice, OfflineArgs};
use crate::models::ModelArgument;
use crate::progress::is_watched;
use crate::text::{load_tokenizer, load_tokenizer_alone};

/// The grammar that was asked for, for the model in `files`.
pub(crate) fn grammar(args: &OfflineArgs, files: &ModelFiles) -> Result<Option<SharedGrammar>> {
    let Some(ConstraintChoice::Json) = args.constraint else { return Ok(None) };
    let tokenizer = match &args.tokenizer {
        Some(model) => {
            let show_progress = is_watched(args.engine.no_progress);
            let model = ModelArgument::parse(model)?.fetch(show_progress)?;
            load_tokenizer_alone(&model.path)
        }
        None => load_tokenizer(files),
    };
    let tokenizer = tokenizer.context("--constraint needs a tokenizer; --tokenizer names one")?;
    let compiler = GrammarCompiler::new(&tokenizer, files.config.vocab_size)?;
    compiler.compile(&endless_json()).map(Some).context("--constraint")
}

/// A list that no output reaches the end of.
fn endless_json() -> Constraint {
    Constraint::JsonSchema(json!({
        "type": "array",
        "minItems": 1_000_000,
        "items": {
            "type": "object",
            "properties": {
                "name": { "type": "string", "maxLength": 24 },
                "count": { "type": "integer" },
                "kind": { "enum": ["first", "second", "third"] },
                "notes": { "type": "array", "items": { "type": "string" }, "maxItems": 4 },
            },
            "required": ["name", "count", "kind", "notes"],
            "additionalProperties": false,
        },
    }))
}

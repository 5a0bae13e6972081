//! What stays in the KV cache of a request: the field `kv_cache`.

use inflight_engine::{KvKeep, KvWindow};
use schemars::JsonSchema;
use serde::Deserialize;

use crate::error::ApiError;

/// `{"sinks": 4, "window": 1000}`: the first tokens and the latest; `{"budget": 1000}`: of the
/// prompt what its end attends to most; `{"window": 0}`: everything, whatever the server's usual
/// is.
#[derive(Clone, Copy, Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct KvCacheFields {
    /// Tokens at the start that stay beside `window`.
    sinks: Option<usize>,
    /// The latest tokens that stay; 0: everything does.
    window: Option<usize>,
    /// Tokens of the prompt that stay, those that its end attends to most.
    budget: Option<usize>,
}

impl KvCacheFields {
    /// What the engine is to keep. Whether that can work, it says itself.
    ///
    /// # Errors
    /// Both kinds at once, or neither.
    pub(crate) fn resolve(self) -> Result<KvKeep, ApiError> {
        match self {
            Self { sinks: None, window: None, budget: Some(budget) } => {
                Ok(KvKeep::Attended(budget))
            }
            Self { window: Some(0), budget: None, .. } => Ok(KvKeep::All),
            Self { sinks, window: Some(window), budget: None } => {
                let num_sinks = sinks.unwrap_or(KvWindow::USUAL_SINKS);
                Ok(KvKeep::Latest(KvWindow { num_sinks, window }))
            }
            _ => Err(ApiError::invalid(
                "kv_cache",
                "must have `window`, and maybe `sinks`, or `budget` alone".to_owned(),
            )),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_say_what_is_kept() {
        let parse = |json| serde_json::from_str::<KvCacheFields>(json);
        let check = |json, expected: Option<KvKeep>| {
            assert_eq!(parse(json).unwrap().resolve().ok(), expected, "{json}");
        };
        let latest = |num_sinks, window| Some(KvKeep::Latest(KvWindow { num_sinks, window }));
        check(r#"{"window": 100}"#, latest(4, 100));
        check(r#"{"sinks": 0, "window": 100}"#, latest(0, 100));
        check(r#"{"window": 0}"#, Some(KvKeep::All));
        check(r#"{"budget": 500}"#, Some(KvKeep::Attended(500)));
        check(r#"{"sinks": 4}"#, None);
        check(r#"{}"#, None);
        check(r#"{"budget": 500, "window": 100}"#, None);
        assert!(parse(r#"{"window": 100, "sink": 4}"#).is_err(), "a field that nobody knows");
        assert!(parse(r#"{"window": -1}"#).is_err());
    }
}

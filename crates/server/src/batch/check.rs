//! What is wrong with the lines of a batch, before any of them is asked.

use std::path::Path;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::error::BatchError;
use super::files::{Answered, Input};
use super::line::{InputLine, OutputLine};
use super::run::max_line_bytes;
use crate::state::ServerState;

/// OpenAI's limit.
const MAX_LINES: u64 = 50_000;
/// Flaws that are told; whoever has more has them in all lines.
const MAX_FLAWS: usize = 100;

/// What is wrong with a batch, or a line of it.
#[derive(Clone, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[schemars(rename = "BatchError")]
pub(crate) struct Flaw {
    code: String,
    /// From 1.
    line: Option<u64>,
    message: String,
    param: Option<String>,
}

impl Flaw {
    /// Of no line in particular.
    pub(crate) fn of_batch(code: &str, message: impl Into<String>) -> Self {
        Self { code: code.to_owned(), line: None, message: message.into(), param: None }
    }
}

/// Goes through all lines, which must ask `endpoint`: how many they are, and what is wrong.
///
/// # Errors
/// The file cannot be read.
pub(crate) fn check_lines(
    path: &Path,
    endpoint: &str,
    state: &ServerState,
) -> Result<(u64, Vec<Flaw>), BatchError> {
    let (mut input, num_lines) = Input::open(path, max_line_bytes(state), Answered::new())?;
    let mut flaws = Vec::new();
    if num_lines == 0 {
        flaws.push(Flaw::of_batch("empty_file", "there is no request in the file"));
    }
    if num_lines > MAX_LINES {
        let message = format!("there are {num_lines} requests; at most {MAX_LINES} are allowed");
        flaws.push(Flaw::of_batch("too_many_requests", message));
        return Ok((num_lines, flaws));
    }
    while let Some(numbered) = input.next()? {
        let flaw = match &numbered.line {
            Ok(line) => flaw_of(line, endpoint),
            Err(refused) => refusal(refused),
        };
        flaws.extend(flaw.map(|flaw| Flaw { line: Some(numbered.number), ..flaw }));
        if flaws.len() >= MAX_FLAWS {
            break;
        }
    }
    Ok((num_lines, flaws))
}

fn refusal(refused: &OutputLine) -> Option<Flaw> {
    refused.refusal().map(|(code, message)| Flaw::of_batch(code, message))
}

fn flaw_of(line: &InputLine, endpoint: &str) -> Option<Flaw> {
    if line.url != endpoint {
        let message = format!("is {:?}; the batch is for {endpoint:?}", line.url);
        let param = Some("url".to_owned());
        return Some(Flaw { param, ..Flaw::of_batch("mismatched_url", message) });
    }
    let error = line.check().err()?;
    Some(Flaw::of_batch("invalid_request", error.to_string()))
}

//! One output's text to pieces.

use super::reasoning::ReasoningSplitter;
use super::tool_calls::ToolCallParser;
use super::{Piece, ReasoningTags, ToolCallOptions};

/// What to look for in an output.
#[derive(Clone, Debug, Default)]
pub(crate) struct OutputOptions {
    /// The tags of thoughts, and whether the prompt has opened them.
    pub(crate) reasoning: Option<(ReasoningTags, bool)>,
    pub(crate) tools: Option<ToolCallOptions>,
}

/// Takes one output apart.
#[derive(Debug)]
pub(crate) struct OutputParser {
    reasoning: Option<ReasoningSplitter>,
    tools: Option<ToolCallParser>,
}

impl OutputParser {
    pub(crate) fn new(options: &OutputOptions) -> Self {
        let reasoning = options.reasoning;
        Self {
            reasoning: reasoning.map(|(tags, is_open)| ReasoningSplitter::new(tags, is_open)),
            tools: options.tools.clone().map(ToolCallParser::new),
        }
    }

    /// Whether what comes next is still a thought.
    pub(crate) fn is_thinking(&self) -> bool {
        self.reasoning.as_ref().is_some_and(ReasoningSplitter::is_thinking)
    }

    /// Takes more text; `is_last`: all of it has come, so nothing is held back any more.
    pub(crate) fn push(&mut self, text: String, is_last: bool) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let mut answer = text;
        if let Some(reasoning) = &mut self.reasoning {
            answer = reasoning.push(&answer, &mut pieces);
            if is_last {
                answer += &reasoning.finish(&mut pieces);
            }
        }
        match &mut self.tools {
            Some(tools) => {
                tools.push(&answer, &mut pieces);
                if is_last {
                    tools.finish(&mut pieces);
                }
            }
            None => Piece::Text(answer).join(&mut pieces),
        }
        pieces
    }
}

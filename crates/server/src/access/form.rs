//! Errors as the API spells them to which a path belongs.

use axum::response::{IntoResponse, Response};

use crate::anthropic::AnthropicError;
use crate::error::ApiError;

/// Whose clients ask at a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ErrorForm {
    OpenAi,
    Anthropic,
}

impl ErrorForm {
    pub(crate) fn of(path: &str) -> Self {
        match path.strip_prefix("/v1/messages") {
            Some(rest) if rest.is_empty() || rest.starts_with('/') => Self::Anthropic,
            _ => Self::OpenAi,
        }
    }

    pub(crate) fn response(self, error: ApiError) -> Response {
        match self {
            Self::OpenAi => error.into_response(),
            Self::Anthropic => AnthropicError(error).into_response(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths() {
        for path in ["/v1/messages", "/v1/messages/", "/v1/messages/count_tokens"] {
            assert_eq!(ErrorForm::of(path), ErrorForm::Anthropic, "{path}");
        }
        for path in ["/", "/v1", "/v1/messagesx", "/v1/chat/completions", "/messages"] {
            assert_eq!(ErrorForm::of(path), ErrorForm::OpenAi, "{path}");
        }
    }
}

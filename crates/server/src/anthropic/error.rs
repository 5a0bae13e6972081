//! Errors in Anthropic's shape.

use axum::Json;
use axum::response::{IntoResponse, Response};
use schemars::JsonSchema;
use serde::Serialize;

use crate::error::ApiError;

/// An error as Anthropic's clients understand it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct AnthropicError(pub(crate) ApiError);

impl From<ApiError> for AnthropicError {
    fn from(error: ApiError) -> Self {
        Self(error)
    }
}

/// # Source
/// Anthropic's API reference, "Errors".
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorBody {
    #[serde(rename = "type")]
    kind: &'static str,
    error: ErrorFields,
}

#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AnthropicErrorFields")]
struct ErrorFields {
    #[serde(rename = "type")]
    kind: &'static str,
    message: String,
}

impl AnthropicError {
    /// The body that carries this error, also in the middle of a stream.
    pub(crate) fn body(&self) -> ErrorBody {
        let kind = match self.0.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            404 => "not_found_error",
            413 => "request_too_large",
            429 => "rate_limit_error",
            503 => "overloaded_error",
            500.. => "api_error",
            _ => "invalid_request_error",
        };
        ErrorBody { kind: "error", error: ErrorFields { kind, message: self.0.to_string() } }
    }
}

impl IntoResponse for AnthropicError {
    fn into_response(self) -> Response {
        let body = Json(self.body());
        let (mut parts, old_body) = self.0.into_response().into_parts();
        let (new_parts, new_body) = body.into_response().into_parts();
        drop(old_body);
        // Headers such as Retry-After stay; the body's own are the new one's.
        parts.headers.remove(axum::http::header::CONTENT_LENGTH);
        parts.headers.extend(new_parts.headers);
        Response::from_parts(parts, new_body)
    }
}

//! Errors in OpenAI's shape.

use axum::Json;
use axum::http::{HeaderValue, Method, StatusCode, header};
use axum::response::{IntoResponse, Response};
use inflight_engine::SubmitError;
use inflight_tokenizer::TokenizerError;
use schemars::JsonSchema;
use serde::Serialize;

use crate::generation::{GenerationError, StartError};
use crate::state::ServerState;

/// Why a request gets no answer. The one error of this crate.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ApiError {
    #[error("the body is not a JSON object: {0}")]
    BadBody(String),
    #[error("the body is over the limit of {max_bytes} bytes")]
    BodyTooLarge { max_bytes: usize },
    #[error("the body is not a form: {0}")]
    Form(String),
    #[error("the query cannot be read: {0}")]
    Query(String),
    #[error("the content-type must be application/json, not {0}")]
    ContentType(String),
    #[error("`{param}` is not a field of this endpoint")]
    UnknownField { param: String },
    #[error("`{param}`: {reason}")]
    Invalid { param: String, reason: String },
    #[error("`{param}` is required")]
    Missing { param: &'static str },
    #[error("`{param}` is not supported: {reason}")]
    Unsupported { param: String, reason: String },
    #[error("`{param}`: {reason}")]
    ContextLength { param: String, reason: String },
    #[error("the model `{model}` does not exist; this server serves `{known}`")]
    UnknownModel { model: String, known: String },
    #[error("there is no {kind} `{id}`")]
    NoSuchObject { kind: &'static str, id: String },
    #[error("this server keeps no files and batches; it was started without --files-dir")]
    NoFiles,
    #[error(
        "there is no room for more files: this server keeps {max_files} of them and {max_bytes} \
         bytes at most; delete some"
    )]
    FilesFull { max_bytes: u64, max_files: usize },
    #[error("there is nothing at {method} {path}")]
    UnknownRoute { method: Method, path: String },
    #[error("{path} does not take {method}")]
    MethodNotAllowed { method: Method, path: String },
    #[error(
        "the queue is full: {max_outstanding} requests are running or waiting; try again later"
    )]
    QueueFull { max_outstanding: usize, retry_after_s: u64 },
    #[error("the request waited in the queue for longer than the server allows; try again later")]
    QueueTimeout { retry_after_s: u64 },
    #[error(
        "the time that the request (`timeout_ms`) or the server allows was up before the answer"
    )]
    DeadlineExceeded,
    #[error("too many schemas and grammars are being compiled; try again later")]
    CompilersBusy,
    #[error(
        "no API key was given; send the header `Authorization: Bearer KEY` or `x-api-key: KEY`"
    )]
    KeyMissing,
    #[error("the API key is not one of this server's")]
    KeyUnknown,
    #[error("{path} needs an administrator's API key")]
    AdminsOnly { path: String },
    #[error("the API key's limit of {limit} is reached; try again in {retry_after_s} s")]
    RateLimited { limit: String, retry_after_s: u64 },
    #[error("the request's body did not arrive in time")]
    BodyTimeout,
    #[error("too many connections are open; try again later")]
    TooManyConnections,
    #[error("the server is shutting down")]
    ShuttingDown,
    #[error("the engine has stopped")]
    EngineStopped,
    #[error("requests wait and no step was taken for {seconds} s")]
    Stalled { seconds: u64 },
    #[error("{0}")]
    Internal(String),
}

/// How an endpoint calls a field that the engine knows by another name.
pub(crate) type Rename = fn(&'static str) -> &'static str;

impl ApiError {
    pub(crate) fn invalid(param: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Invalid { param: param.into(), reason: reason.into() }
    }

    /// Our own fault. What it was is for the log, not for clients.
    pub(crate) fn internal() -> Self {
        Self::Internal("the server failed; its log says how".to_owned())
    }

    pub(crate) fn unsupported(param: impl Into<String>, reason: impl Into<String>) -> Self {
        Self::Unsupported { param: param.into(), reason: reason.into() }
    }

    /// What the client hears when its request was not started.
    pub(crate) fn from_start(error: StartError, state: &ServerState, rename: Rename) -> Self {
        match error {
            StartError::Invalid(error) => {
                let (param, reason) = (rename(error.field).to_owned(), error.reason);
                let is_length = reason.contains("maximum context length");
                match is_length {
                    true => Self::ContextLength { param, reason },
                    false => Self::Invalid { param, reason },
                }
            }
            StartError::Refused(SubmitError::QueueFull { max_outstanding }) => {
                let retry_after_s = state.retry_after_s();
                Self::QueueFull { max_outstanding, retry_after_s }
            }
            StartError::Refused(SubmitError::Stopped) => Self::EngineStopped,
            StartError::Ended(error) => Self::from(error),
            StartError::Stops(error) => Self::invalid("stop", error.to_string()),
        }
    }

    /// What the client hears when its prompt cannot be made from `param`.
    pub(crate) fn from_tokenizer(error: &TokenizerError, param: &'static str) -> Self {
        Self::invalid(param, error.to_string())
    }

    pub(crate) fn status(&self) -> StatusCode {
        match self {
            Self::BadBody(_)
            | Self::Form(_)
            | Self::Query(_)
            | Self::UnknownField { .. }
            | Self::Invalid { .. }
            | Self::Missing { .. }
            | Self::Unsupported { .. }
            | Self::ContextLength { .. } => StatusCode::BAD_REQUEST,
            Self::UnknownModel { .. }
            | Self::NoSuchObject { .. }
            | Self::NoFiles
            | Self::UnknownRoute { .. } => StatusCode::NOT_FOUND,
            Self::MethodNotAllowed { .. } => StatusCode::METHOD_NOT_ALLOWED,
            Self::BodyTooLarge { .. } | Self::FilesFull { .. } => StatusCode::PAYLOAD_TOO_LARGE,
            Self::ContentType(_) => StatusCode::UNSUPPORTED_MEDIA_TYPE,
            Self::KeyMissing | Self::KeyUnknown => StatusCode::UNAUTHORIZED,
            Self::AdminsOnly { .. } => StatusCode::FORBIDDEN,
            Self::BodyTimeout => StatusCode::REQUEST_TIMEOUT,
            Self::QueueFull { .. } | Self::CompilersBusy | Self::RateLimited { .. } => {
                StatusCode::TOO_MANY_REQUESTS
            }
            Self::QueueTimeout { .. }
            | Self::TooManyConnections
            | Self::ShuttingDown
            | Self::EngineStopped
            | Self::Stalled { .. } => StatusCode::SERVICE_UNAVAILABLE,
            Self::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
            Self::Internal(_) => StatusCode::INTERNAL_SERVER_ERROR,
        }
    }

    fn kind(&self) -> &'static str {
        match self.status().as_u16() {
            401 => "authentication_error",
            403 => "permission_error",
            408 | 504 => "timeout_error",
            429 => "rate_limit_error",
            503 => "service_unavailable_error",
            500 => "server_error",
            _ => "invalid_request_error",
        }
    }

    fn code(&self) -> Option<&'static str> {
        match self {
            Self::BadBody(_) => Some("invalid_json"),
            Self::Form(_) => Some("invalid_form"),
            Self::Query(_) => Some("invalid_query"),
            Self::NoSuchObject { .. } => Some("not_found"),
            Self::NoFiles => Some("no_files"),
            Self::FilesFull { .. } => Some("files_full"),
            Self::BodyTooLarge { .. } => Some("body_too_large"),
            Self::ContentType(_) => Some("unsupported_content_type"),
            Self::UnknownField { .. } => Some("unknown_parameter"),
            Self::Invalid { .. } => Some("invalid_value"),
            Self::Missing { .. } => Some("missing_required_parameter"),
            Self::Unsupported { .. } => Some("unsupported_parameter"),
            Self::ContextLength { .. } => Some("context_length_exceeded"),
            Self::UnknownModel { .. } => Some("model_not_found"),
            Self::UnknownRoute { .. } => Some("unknown_url"),
            Self::MethodNotAllowed { .. } => Some("method_not_allowed"),
            Self::QueueFull { .. } => Some("queue_full"),
            Self::QueueTimeout { .. } => Some("queue_timeout"),
            Self::DeadlineExceeded => Some("deadline_exceeded"),
            Self::CompilersBusy => Some("compilers_busy"),
            Self::Stalled { .. } => Some("stalled"),
            Self::KeyMissing | Self::KeyUnknown => Some("invalid_api_key"),
            Self::AdminsOnly { .. } => Some("admins_only"),
            Self::RateLimited { .. } => Some("rate_limit_exceeded"),
            Self::BodyTimeout => Some("body_timeout"),
            Self::TooManyConnections => Some("too_many_connections"),
            Self::ShuttingDown | Self::EngineStopped | Self::Internal(_) => None,
        }
    }

    fn param(&self) -> Option<&str> {
        match self {
            Self::UnknownField { param }
            | Self::Invalid { param, .. }
            | Self::Unsupported { param, .. }
            | Self::ContextLength { param, .. } => Some(param),
            Self::Missing { param } => Some(param),
            Self::UnknownModel { .. } => Some("model"),
            Self::DeadlineExceeded => Some("timeout_ms"),
            _ => None,
        }
    }

    /// The body that carries this error, also in the middle of a stream.
    pub(crate) fn body(&self) -> ErrorBody<'_> {
        ErrorBody {
            error: ErrorFields {
                message: self.to_string(),
                kind: self.kind(),
                param: self.param(),
                code: self.code(),
            },
        }
    }
}

/// # Source
/// OpenAI's API reference, "Error codes", and the `error` member of its responses.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ErrorBody<'a> {
    error: ErrorFields<'a>,
}

#[derive(Debug, Serialize, JsonSchema)]
struct ErrorFields<'a> {
    message: String,
    #[serde(rename = "type")]
    kind: &'static str,
    param: Option<&'a str>,
    code: Option<&'static str>,
}

impl From<GenerationError> for ApiError {
    fn from(error: GenerationError) -> Self {
        match error {
            GenerationError::ShuttingDown => Self::ShuttingDown,
            GenerationError::DeadlineExceeded => Self::DeadlineExceeded,
            GenerationError::QueueTimeout { retry_after_s } => Self::QueueTimeout { retry_after_s },
            GenerationError::TooSlow => Self::Internal(error.to_string()),
            GenerationError::Failed(reason) => {
                tracing::error!(reason, "a request failed in the engine");
                Self::Internal("the engine failed; the server's log says how".to_owned())
            }
        }
    }
}

impl IntoResponse for ApiError {
    fn into_response(self) -> Response {
        let mut response = (self.status(), Json(self.body())).into_response();
        let headers = response.headers_mut();
        match self {
            Self::QueueFull { retry_after_s, .. }
            | Self::QueueTimeout { retry_after_s }
            | Self::RateLimited { retry_after_s, .. } => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from(retry_after_s));
            }
            Self::TooManyConnections => {
                headers.insert(header::RETRY_AFTER, HeaderValue::from_static("1"));
            }
            Self::KeyMissing | Self::KeyUnknown => {
                headers.insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
            }
            _ => {}
        }
        response
    }
}

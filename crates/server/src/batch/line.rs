//! One line of a batch: a request, and its answer.
//!
//! # Source
//! OpenAI's API reference, "The request input object" and "The request output object" of batches.

use axum::Router;
use axum::body::{Body, to_bytes};
use axum::http::{Request, StatusCode, header};
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;
use tower::ServiceExt;

use crate::access::Bearer;
use crate::error::{ApiError, ErrorBody};
use crate::random::random_id;
use crate::state::ServerState;

/// What a line may ask for.
pub(crate) const URLS: [&str; 4] =
    ["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"];

/// A line of the input.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct InputLine {
    pub(super) custom_id: String,
    method: String,
    pub(super) url: String,
    body: Box<RawValue>,
}

/// A line of the output.
#[derive(Debug, Serialize)]
pub(super) struct OutputLine {
    /// Names the line of the input.
    id: String,
    custom_id: Option<String>,
    response: Option<LineResponse>,
    error: Option<LineError>,
}

#[derive(Debug, Serialize)]
struct LineResponse {
    status_code: u16,
    request_id: String,
    body: Box<RawValue>,
}

/// Why a line is no request.
#[derive(Debug, Serialize)]
struct LineError {
    code: &'static str,
    message: String,
}

/// What an output line says of itself.
#[derive(Debug, Deserialize)]
pub(super) struct WrittenLine {
    id: String,
    pub(super) custom_id: Option<String>,
}

impl WrittenLine {
    /// The line of the input that it answers.
    pub(super) fn number(&self) -> Option<u64> {
        self.id.strip_prefix(ID_PREFIX)?.parse().ok()
    }
}

const ID_PREFIX: &str = "batch_req_";

/// Who asks, and whom.
#[derive(Clone)]
pub(super) struct Asker {
    pub(super) state: ServerState,
    pub(super) router: Router,
    pub(super) bearer: Bearer,
}

/// What came of a line.
pub(super) enum Answer {
    Written(OutputLine),
    /// There was no room for it; it is worth another try.
    QueueFull,
    EngineEnded,
}

impl OutputLine {
    /// Line `number` of the input is no request.
    pub(super) fn refused(
        number: u64,
        custom_id: Option<String>,
        code: &'static str,
        message: String,
    ) -> Self {
        let id = format!("{ID_PREFIX}{number}");
        Self { id, custom_id, response: None, error: Some(LineError { code, message }) }
    }

    pub(super) fn custom_id(&self) -> Option<&str> {
        self.custom_id.as_deref()
    }

    /// Code and message of what is wrong with a line that is no request.
    pub(super) fn refusal(&self) -> Option<(&'static str, &str)> {
        self.error.as_ref().map(|error| (error.code, error.message.as_str()))
    }

    pub(super) fn is_ok(&self) -> bool {
        self.response.as_ref().is_some_and(|response| response.status_code == 200)
    }

    /// As a line, its end included.
    pub(super) fn to_text(&self) -> String {
        let text = serde_json::to_string(self).expect("a line has nothing that JSON cannot say");
        text + "\n"
    }
}

impl InputLine {
    /// Reads a line.
    ///
    /// # Errors
    /// What its answer says instead.
    pub(super) fn read(number: u64, text: &[u8]) -> Result<Self, Box<OutputLine>> {
        serde_json::from_slice(text).map_err(|error| {
            #[derive(Deserialize)]
            struct Named {
                custom_id: String,
            }
            let named = serde_json::from_slice::<Named>(text).ok().map(|line| line.custom_id);
            Box::new(OutputLine::refused(number, named, "invalid_line", error.to_string()))
        })
    }

    /// Sends the request to the API and waits for its answer.
    pub(super) async fn answer(&self, number: u64, asker: &Asker) -> Answer {
        if let Err(error) = self.check() {
            return Answer::Written(self.answered(number, error.status(), raw(&error.body())));
        }
        let request = Request::post(&self.url)
            .header(header::CONTENT_TYPE, "application/json")
            .extension(asker.bearer.clone())
            .body(Body::from(self.body.get().to_owned()))
            .expect("the URL is one of ours");
        let response = match asker.router.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        let status = response.status();
        match status {
            StatusCode::TOO_MANY_REQUESTS => return Answer::QueueFull,
            StatusCode::SERVICE_UNAVAILABLE if asker.state.is_serving() => {
                return Answer::QueueFull;
            }
            StatusCode::SERVICE_UNAVAILABLE => return Answer::EngineEnded,
            _ => {}
        }
        let body = to_bytes(response.into_body(), usize::MAX).await;
        let body = body.ok().and_then(|bytes| serde_json::from_slice(&bytes).ok());
        Answer::Written(match body {
            Some(body) => self.answered(number, status, body),
            None => {
                let error = ApiError::Internal("the answer broke off".to_owned());
                self.answered(number, error.status(), raw(&error.body()))
            }
        })
    }

    /// # Errors
    /// What is wrong with it that its endpoint cannot tell.
    pub(super) fn check(&self) -> Result<(), ApiError> {
        #[derive(Deserialize)]
        struct Streamed {
            stream: Option<bool>,
        }
        if self.method != "POST" {
            let reason = format!("is {:?}; it must be POST", self.method);
            return Err(ApiError::invalid("method", reason));
        }
        if !URLS.contains(&self.url.as_str()) {
            let reason = format!("is {:?}; it must be one of {}", self.url, URLS.join(", "));
            return Err(ApiError::invalid("url", reason));
        }
        match serde_json::from_str(self.body.get()) {
            Ok(Streamed { stream: Some(true) }) => {
                Err(ApiError::invalid("stream", "the answers of a batch are whole"))
            }
            // What else is wrong with the body its endpoint tells.
            _ => Ok(()),
        }
    }

    fn answered(&self, number: u64, status: StatusCode, body: Box<RawValue>) -> OutputLine {
        let request_id = random_id("req_");
        OutputLine {
            id: format!("{ID_PREFIX}{number}"),
            custom_id: Some(self.custom_id.clone()),
            response: Some(LineResponse { status_code: status.as_u16(), request_id, body }),
            error: None,
        }
    }
}

fn raw(body: &ErrorBody<'_>) -> Box<RawValue> {
    serde_json::value::to_raw_value(body).expect("errors are JSON")
}

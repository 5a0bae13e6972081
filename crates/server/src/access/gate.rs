//! What every request goes through before its handler, and every answer after.

use std::io;
use std::panic::AssertUnwindSafe;
use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::{Request, State};
use axum::http::{HeaderMap, HeaderValue, Method, header};
use axum::middleware::Next;
use axum::response::Response;
use futures_util::{FutureExt, StreamExt, stream};
use tokio::time::Instant;

use super::bearer::Bearer;
use super::caller::{Account, Caller};
use super::form::ErrorForm;
use super::meter::{Exceeded, Left};
use crate::error::ApiError;
use crate::state::ServerState;

/// Whether nobody needs a key for a path: whether the server is well, the page and its parts, which
/// hold nothing but this program, and what its API is.
fn is_open(path: &str) -> bool {
    let exact =
        ["/", "/health", "/health/live", "/health/ready", "/version", "/docs", "/openapi.json"];
    exact.contains(&path) || path.starts_with("/web/")
}

/// Whether a path tells about everybody's requests.
fn is_for_admins(path: &str) -> bool {
    path == "/metrics" || path.starts_with("/debug/")
}

/// Lets a request in that may be served, gives it a deadline for its body, and answers a panic.
pub(crate) async fn pass(
    State(state): State<ServerState>,
    mut request: Request,
    next: Next,
) -> Response {
    let cors = &state.config().cors_origins;
    if let Some(answer) = cors.preflight(&request) {
        return answer;
    }
    let (form, asked) = (ErrorForm::of(request.uri().path()), request.headers().clone());
    let account = authenticate(&state, &request);
    if let Ok(account) = &account {
        request.extensions_mut().insert(Bearer(account.clone()));
    }
    let mut response = match account.clone().and_then(|account| admit(&state, account, &request)) {
        Ok(caller) => serve(&state, request, caller, next, form).await,
        Err(error) => form.response(error),
    };
    if let Ok(Some(account)) = account {
        tell_limits(&account, response.headers_mut());
    }
    cors.mark(&asked, response.headers_mut());
    response
}

/// Whose key a request bears; `None`: it needs none.
fn authenticate(state: &ServerState, request: &Request) -> Result<Option<Arc<Account>>, ApiError> {
    // Nothing from outside brings one.
    if let Some(Bearer(account)) = request.extensions().get() {
        return Ok(account.clone());
    }
    let path = request.uri().path();
    if state.accounts().is_empty() || is_open(path) {
        return Ok(None);
    }
    let secret = secret_of(request.headers()).ok_or(ApiError::KeyMissing)?;
    let index = state.config().keys.find(secret).ok_or(ApiError::KeyUnknown)?;
    let account = &state.accounts()[index];
    if is_for_admins(path) && !account.key().is_admin {
        return Err(ApiError::AdminsOnly { path: path.to_owned() });
    }
    Ok(Some(Arc::clone(account)))
}

/// As OpenAI's clients send it, or as Anthropic's do.
fn secret_of(headers: &HeaderMap) -> Option<&[u8]> {
    let bearer = headers.get(header::AUTHORIZATION).and_then(|value| {
        let (scheme, secret) = value.as_bytes().split_at_checked(7)?;
        scheme.eq_ignore_ascii_case(b"bearer ").then(|| secret.trim_ascii())
    });
    bearer.or_else(|| headers.get("x-api-key").map(|value| value.as_bytes()))
}

/// Only what may cost something counts.
fn admit(
    state: &ServerState,
    account: Option<Arc<Account>>,
    request: &Request,
) -> Result<Caller, ApiError> {
    let Some(account) = account.filter(|_| request.method() == Method::POST) else {
        return Ok(Caller::default());
    };
    let limited = |limit: String, wait: Duration| {
        let retry_after_s = (wait.as_secs_f64().ceil() as u64).max(1);
        ApiError::RateLimited { limit, retry_after_s }
    };
    Caller::enter(&account).map_err(|exceeded| match exceeded {
        Exceeded::Requests(limit, wait) => limited(format!("{limit} requests per minute"), wait),
        Exceeded::Tokens(limit, wait) => limited(format!("{limit} tokens per minute"), wait),
        Exceeded::Concurrent(limit) => {
            let wait = Duration::from_secs(state.retry_after_s());
            limited(format!("{limit} requests at once"), wait)
        }
    })
}

async fn serve(
    state: &ServerState,
    request: Request,
    caller: Caller,
    next: Next,
    form: ErrorForm,
) -> Response {
    let deadline = Instant::now() + state.config().receive_timeout;
    let mut request = request.map(|body| with_deadline(body, deadline));
    request.extensions_mut().insert(caller);
    let path = request.uri().path().to_owned();
    let served = AssertUnwindSafe(next.run(request)).catch_unwind().await;
    served.unwrap_or_else(|_| {
        // What was wrong, the panic itself has printed.
        tracing::error!(path, "a request made its handler panic");
        form.response(ApiError::internal())
    })
}

/// A body that fails if it is not there in time.
fn with_deadline(body: Body, deadline: Instant) -> Body {
    let late = || io::Error::from(io::ErrorKind::TimedOut);
    let chunks = stream::unfold(Some(body.into_data_stream()), move |body| async move {
        let mut body = body?;
        match tokio::time::timeout_at(deadline, body.next()).await {
            Ok(chunk) => Some((chunk?.map_err(io::Error::other), Some(body))),
            Err(_) => Some((Err::<Bytes, _>(late()), None)),
        }
    });
    Body::from_stream(chunks)
}

/// As OpenAI tells what is left.
fn tell_limits(account: &Account, headers: &mut HeaderMap) {
    const NAMES: [[&str; 2]; 2] = [
        ["x-ratelimit-limit-requests", "x-ratelimit-remaining-requests"],
        ["x-ratelimit-limit-tokens", "x-ratelimit-remaining-tokens"],
    ];
    for ([limit_name, remaining_name], left) in NAMES.into_iter().zip(account.left()) {
        let Some(Left { limit, remaining }) = left else { continue };
        headers.insert(limit_name, HeaderValue::from(limit));
        headers.insert(remaining_name, HeaderValue::from(remaining));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_either_api() {
        let check = |headers: &[(&'static str, &str)], expected: Option<&str>| {
            let headers = headers.iter().map(|(name, value)| {
                (header::HeaderName::from_static(name), value.parse().unwrap())
            });
            let headers: HeaderMap = headers.collect();
            assert_eq!(secret_of(&headers), expected.map(str::as_bytes), "{headers:?}");
        };
        check(&[], None);
        check(&[("authorization", "Bearer abc")], Some("abc"));
        check(&[("authorization", "bearer  abc ")], Some("abc"));
        check(&[("authorization", "Basic abc")], None);
        check(&[("authorization", "abc")], None);
        check(&[("x-api-key", "abc")], Some("abc"));
        check(&[("authorization", "Bearer a"), ("x-api-key", "b")], Some("a"));
        check(&[("authorization", "Basic a"), ("x-api-key", "b")], Some("b"));
    }

    #[test]
    fn paths_without_a_key() {
        assert!(["/", "/health", "/web/chat.js", "/version"].into_iter().all(is_open));
        let closed = ["/v1/models", "/metrics", "/debug/state", "/tokenize", "/healthy", "/web"];
        assert!(!closed.into_iter().any(is_open));
    }
}

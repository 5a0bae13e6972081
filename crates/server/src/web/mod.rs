//! The page at `/`: a chat, and a live picture of the engine. Part of the binary, asks nobody else.

use axum::http::HeaderValue;
use axum::http::header::{CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE};
use axum::response::{IntoResponse, Response};

/// The page may talk to this server and to nobody else.
const POLICY: &str = "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; \
                      connect-src 'self'; img-src data:; form-action 'none'; base-uri 'none'";

pub(crate) async fn index() -> Response {
    file("text/html; charset=utf-8", include_str!("index.html"))
}

pub(crate) async fn docs() -> Response {
    file("text/html; charset=utf-8", include_str!("docs.html"))
}

pub(crate) async fn docs_script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("docs.js"))
}

pub(crate) async fn style() -> Response {
    file("text/css; charset=utf-8", include_str!("style.css"))
}

pub(crate) async fn chat_script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("chat.js"))
}

pub(crate) async fn dashboard_script() -> Response {
    file("text/javascript; charset=utf-8", include_str!("dashboard.js"))
}

fn file(content_type: &'static str, text: &'static str) -> Response {
    let headers = [
        (CONTENT_TYPE, HeaderValue::from_static(content_type)),
        (CONTENT_SECURITY_POLICY, HeaderValue::from_static(POLICY)),
        // A new binary may have a new page.
        (CACHE_CONTROL, HeaderValue::from_static("no-cache")),
    ];
    (headers, text).into_response()
}

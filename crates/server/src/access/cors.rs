//! Pages of other origins that may ask.

use axum::body::Body;
use axum::http::header::{
    ACCESS_CONTROL_ALLOW_HEADERS, ACCESS_CONTROL_ALLOW_METHODS, ACCESS_CONTROL_ALLOW_ORIGIN,
    ACCESS_CONTROL_EXPOSE_HEADERS, ACCESS_CONTROL_MAX_AGE, ACCESS_CONTROL_REQUEST_HEADERS,
    ACCESS_CONTROL_REQUEST_METHOD, ORIGIN, VARY,
};
use axum::http::{HeaderMap, HeaderValue, Method, Request, StatusCode};
use axum::response::{IntoResponse, Response};

const METHODS: HeaderValue = HeaderValue::from_static("GET, HEAD, POST");
/// What scripts may read of an answer beside its body.
const EXPOSED: HeaderValue = HeaderValue::from_static(
    "retry-after, x-ratelimit-limit-requests, x-ratelimit-remaining-requests, \
     x-ratelimit-limit-tokens, x-ratelimit-remaining-tokens",
);
/// Seconds for which a browser need not ask again.
const MAX_AGE: HeaderValue = HeaderValue::from_static("600");

/// Origins whose pages may read what this server says. The default is none but its own.
///
/// Keys travel in headers that a page must know, never in cookies, so that `*` lends nobody's
/// rights to a foreign page.
///
/// # Source
/// Fetch Standard, section 3.3 "CORS protocol".
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CorsOrigins {
    any: bool,
    listed: Vec<HeaderValue>,
}

impl CorsOrigins {
    /// Adds an origin as browsers write it, such as `https://example.org:8443`, or `*` for all.
    /// False: it is none.
    #[must_use]
    pub fn add(&mut self, origin: &str) -> bool {
        if origin == "*" {
            self.any = true;
            return true;
        }
        let host = origin.split_once("://").filter(|(scheme, _)| !scheme.is_empty());
        let is_origin = host.is_some_and(|(_, host)| {
            let is_host = |c: char| c.is_ascii_alphanumeric() || "-._:[]".contains(c);
            !host.is_empty() && host.chars().all(is_host)
        });
        let value = HeaderValue::from_str(&origin.to_ascii_lowercase());
        let Some(value) = value.ok().filter(|_| is_origin) else { return false };
        self.listed.push(value);
        true
    }

    /// What to allow the origin that asks; `None`: nothing.
    fn allowed(&self, headers: &HeaderMap) -> Option<HeaderValue> {
        let origin = headers.get(ORIGIN)?;
        match self.any {
            true => Some(HeaderValue::from_static("*")),
            false => self.listed.contains(origin).then(|| origin.clone()),
        }
    }

    /// Answers a browser that asks whether it may ask.
    pub(super) fn preflight(&self, request: &Request<Body>) -> Option<Response> {
        let headers = request.headers();
        if request.method() != Method::OPTIONS
            || !headers.contains_key(ACCESS_CONTROL_REQUEST_METHOD)
        {
            return None;
        }
        self.allowed(headers)?;
        let mut response = StatusCode::NO_CONTENT.into_response();
        let answer = response.headers_mut();
        answer.insert(ACCESS_CONTROL_ALLOW_METHODS, METHODS);
        answer.insert(ACCESS_CONTROL_MAX_AGE, MAX_AGE);
        if let Some(asked) = headers.get(ACCESS_CONTROL_REQUEST_HEADERS) {
            answer.insert(ACCESS_CONTROL_ALLOW_HEADERS, asked.clone());
        }
        self.mark(headers, answer);
        Some(response)
    }

    /// Says in an answer's headers whether the page that asked may read it.
    pub(super) fn mark(&self, asked: &HeaderMap, answer: &mut HeaderMap) {
        if !self.any && self.listed.is_empty() {
            return;
        }
        if !self.any {
            answer.append(VARY, HeaderValue::from_static("origin"));
        }
        if let Some(origin) = self.allowed(asked) {
            answer.insert(ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            answer.insert(ACCESS_CONTROL_EXPOSE_HEADERS, EXPOSED);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn origins() {
        let check = |origin: &str, is_one| {
            assert_eq!(CorsOrigins::default().add(origin), is_one, "{origin}");
        };
        check("*", true);
        check("https://example.org", true);
        check("http://localhost:3000", true);
        check("http://[::1]:3000", true);
        check("chrome-extension://abcdef", true);
        for wrong in ["", "null", "example.org", "https://", "https://a/", "https://a b", "://a"] {
            check(wrong, false);
        }
    }
}

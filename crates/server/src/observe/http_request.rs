//! What belongs to one HTTP request, for those who look: its names, and its place in a trace.

use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Instant, SystemTime, UNIX_EPOCH};

use axum::extract::Request;
use axum::http::{HeaderMap, HeaderName, HeaderValue, Method};
use axum::middleware::Next;
use axum::response::Response;

use super::request_log::RequestEntry;
use crate::random::random_id;

/// By which clients and proxies name requests; the answer bears it, too.
const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
/// Longest name that a client may give.
const MAX_ID_BYTES: usize = 128;

tokio::task_local! {
    /// The request whose handler runs.
    static CURRENT: Arc<HttpRequest>;
}

/// A request that may generate.
#[derive(Debug)]
pub(crate) struct HttpRequest {
    /// What the client called it, or a name of our own.
    pub(super) id: String,
    pub(super) path: String,
    /// What it is a part of, as its client says.
    pub(super) parent: Option<TraceParent>,
    pub(super) arrived: Instant,
    pub(super) arrived_unix_ns: u64,
    /// The ids that its answer bears.
    names: Mutex<Vec<String>>,
    /// Made when its first sequence is accepted.
    pub(super) entry: OnceLock<Arc<RequestEntry>>,
}

impl HttpRequest {
    fn new(path: &str, headers: &HeaderMap) -> Self {
        let text = |name: &str| headers.get(name).and_then(|value| value.to_str().ok());
        let given = text("x-request-id").filter(|id| (1..=MAX_ID_BYTES).contains(&id.len()));
        let since = SystemTime::now().duration_since(UNIX_EPOCH);
        Self {
            id: given.map_or_else(|| random_id("req_"), str::to_owned),
            path: path.to_owned(),
            parent: text("traceparent").and_then(TraceParent::parse),
            arrived: Instant::now(),
            arrived_unix_ns: since.map_or(0, |since| since.as_nanos() as u64),
            names: Mutex::default(),
            entry: OnceLock::new(),
        }
    }

    /// The ids that its answer bears.
    pub(super) fn names(&self) -> Vec<String> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

/// Has the request's handler know whose it is, and its answer bear its name.
pub(crate) async fn follow(request: Request, next: Next) -> Response {
    if request.method() != Method::POST {
        return next.run(request).await;
    }
    let http = Arc::new(HttpRequest::new(request.uri().path(), request.headers()));
    let mut response = CURRENT.scope(Arc::clone(&http), next.run(request)).await;
    if let Ok(id) = HeaderValue::try_from(&http.id) {
        response.headers_mut().entry(REQUEST_ID).or_insert(id);
    }
    response
}

/// The request whose handler calls.
pub(super) fn current() -> Option<Arc<HttpRequest>> {
    CURRENT.try_with(Arc::clone).ok()
}

/// Notes that the answer to the request whose handler calls bears `id`.
pub(crate) fn name_answer(id: &str) {
    if let Some(http) = current() {
        http.names.lock().unwrap_or_else(PoisonError::into_inner).push(id.to_owned());
    }
}

/// Of which trace a request is a part, and below which span.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct TraceParent {
    /// 32 hexadecimal digits.
    pub(super) trace_id: String,
    /// 16 of them.
    pub(super) span_id: String,
    /// Whether the caller keeps this trace.
    pub(super) is_sampled: bool,
}

impl TraceParent {
    /// Reads the header; what is not as it should be counts as not there.
    ///
    /// # Source
    /// W3C, "Trace Context", section 3.2.
    pub(super) fn parse(header: &str) -> Option<Self> {
        let mut parts = header.trim().split('-');
        let (version, trace_id) = (parts.next()?, parts.next()?);
        let (span_id, flags) = (parts.next()?, parts.next()?);
        let is_hex = |text: &str, len: usize| {
            text.len() == len && text.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f'))
        };
        let is_id = |text: &str, len| is_hex(text, len) && text.bytes().any(|b| b != b'0');
        let is_known = is_hex(version, 2) && version != "ff";
        // A later version may say more; this one must not.
        let says_more = version == "00" && parts.next().is_some();
        if !is_known || says_more || !is_id(trace_id, 32) || !is_id(span_id, 16) {
            return None;
        }
        let flags = is_hex(flags, 2).then(|| u8::from_str_radix(flags, 16).ok())??;
        let (trace_id, span_id) = (trace_id.to_owned(), span_id.to_owned());
        Some(Self { trace_id, span_id, is_sampled: flags & 1 == 1 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first is the example of the recommendation.
    #[test]
    fn parents_are_read_as_the_recommendation_has_them() {
        let (trace, span) = ("0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331");
        let told = TraceParent::parse(&format!("00-{trace}-{span}-01")).unwrap();
        assert_eq!((told.trace_id.as_str(), told.span_id.as_str()), (trace, span));
        assert!(told.is_sampled);
        assert!(!TraceParent::parse(&format!("00-{trace}-{span}-00")).unwrap().is_sampled);
        assert!(TraceParent::parse(&format!("01-{trace}-{span}-01-more")).is_some());
        for wrong in [
            String::new(),
            format!("00-{trace}-{span}"),
            format!("00-{trace}-{span}-01-more"),
            format!("ff-{trace}-{span}-01"),
            format!("00-{}-{span}-01", "0".repeat(32)),
            format!("00-{trace}-{}-01", "0".repeat(16)),
            format!("00-{}-{span}-01", trace.to_uppercase()),
        ] {
            assert_eq!(TraceParent::parse(&wrong), None, "{wrong}");
        }
    }
}

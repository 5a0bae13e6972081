//! Requests as traces: OTLP over HTTP, as JSON.
//!
//! Whoever serves a request only hands it over; what cannot be sent in time is dropped and counted.
//!
//! # Source
//! "OTLP Specification", OTLP/HTTP, JSON encoding; OpenTelemetry's semantic conventions for
//! generative AI; vLLM, `docs/examples/observability/opentelemetry` and `vllm/tracing`, for the
//! names that its users know.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::http::Uri;
use http_body_util::Full;
use hyper::body::Bytes;
use hyper::header::{CONTENT_TYPE, HOST};
use hyper::{Method, Request};
use hyper_util::rt::TokioIo;
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::metrics::Ending;
use super::request_log::{RequestEntry, SequenceEntry};
use super::requests::ending_name;
use crate::random::random_u64;
use crate::state::ServerState;

/// Requests that may wait to be sent; further ones are dropped.
const MAX_WAITING: usize = 2048;
/// Most requests of one message.
const MAX_BATCH: usize = 256;
/// How long requests are gathered.
const GATHER: Duration = Duration::from_millis(200);
/// How long a collector may take.
const SEND_TIMEOUT: Duration = Duration::from_secs(5);
/// `SPAN_KIND_INTERNAL` and `SPAN_KIND_SERVER`.
const KINDS: (u32, u32) = (1, 2);
/// `STATUS_CODE_ERROR`.
const STATUS_ERROR: u32 = 2;

/// Hands ended requests to the task that sends them. Never waits.
#[derive(Clone, Debug)]
pub(super) struct SpanSender {
    sender: mpsc::Sender<Message>,
    num_dropped: Arc<AtomicU64>,
}

#[derive(Debug)]
enum Message {
    Ended(Arc<RequestEntry>),
    /// Send what there is, and say so.
    Flush(oneshot::Sender<()>),
}

impl SpanSender {
    pub(super) fn send(&self, entry: &Arc<RequestEntry>) {
        if self.sender.try_send(Message::Ended(Arc::clone(entry))).is_err() {
            self.num_dropped.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Requests that were not sent.
    pub(super) fn num_dropped(&self) -> u64 {
        self.num_dropped.load(Ordering::Relaxed)
    }
}

impl ServerState {
    /// Sends every request that ends to a collector of OpenTelemetry, from now on. Must be called
    /// in a runtime.
    ///
    /// # Errors
    /// What is wrong with `endpoint`: it must be `http://host:port`, perhaps with a path.
    pub fn export_spans(&self, endpoint: &str) -> Result<(), String> {
        let collector = Collector::parse(endpoint)?;
        let (sender, messages) = mpsc::channel(MAX_WAITING);
        let num_dropped = Arc::new(AtomicU64::new(0));
        let spans = SpanSender { sender, num_dropped: Arc::clone(&num_dropped) };
        if self.metrics().requests.spans.set(spans).is_err() {
            return Err("spans are exported already".to_owned());
        }
        let model = self.config().model_names[0].clone();
        tokio::spawn(send_all(messages, collector, model, num_dropped));
        Ok(())
    }

    /// Waits, for a while, until the requests that have ended are sent.
    pub async fn flush_spans(&self) {
        let Some(spans) = self.metrics().requests.spans.get() else { return };
        let (done, is_done) = oneshot::channel();
        let flush = async {
            if spans.sender.send(Message::Flush(done)).await.is_ok() {
                let _ = is_done.await; // nobody left who could send
            }
        };
        let _ = timeout(SEND_TIMEOUT, flush).await; // a collector that hangs is not waited for
    }
}

/// Whether `endpoint` can be a collector's.
///
/// # Errors
/// What is wrong with it.
pub fn check_collector(endpoint: &str) -> Result<(), String> {
    Collector::parse(endpoint).map(|_| ())
}

/// Where spans go.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Collector {
    /// Host and port.
    authority: String,
    path: String,
}

impl Collector {
    fn parse(endpoint: &str) -> Result<Self, String> {
        let uri: Uri = endpoint.parse().map_err(|error| format!("{endpoint}: {error}"))?;
        let is_http = uri.scheme_str() == Some("http");
        let authority = uri.authority().filter(|_| is_http);
        let authority = authority.ok_or_else(|| format!("{endpoint} is not http://host:port"))?;
        let authority = match authority.port() {
            Some(_) => authority.to_string(),
            None => format!("{authority}:4318"),
        };
        let path = match uri.path() {
            "/" => "/v1/traces",
            path => path,
        };
        Ok(Self { authority, path: path.to_owned() })
    }

    /// Sends one message; `false`, if the collector did not take it.
    async fn send(&self, body: Bytes) -> bool {
        let sent = async {
            let stream = TcpStream::connect(&self.authority).await.ok()?;
            let connected = hyper::client::conn::http1::handshake(TokioIo::new(stream)).await;
            let (mut connection, driver) = connected.ok()?;
            tokio::spawn(driver);
            let request = Request::builder()
                .method(Method::POST)
                .uri(&self.path)
                .header(HOST, &self.authority)
                .header(CONTENT_TYPE, "application/json")
                .body(Full::new(body));
            let response = connection.send_request(request.ok()?).await.ok()?;
            response.status().is_success().then_some(())
        };
        timeout(SEND_TIMEOUT, sent).await.ok().flatten().is_some()
    }
}

/// Sends what comes, until nobody is left who could send more.
async fn send_all(
    mut messages: mpsc::Receiver<Message>,
    collector: Collector,
    model: String,
    num_dropped: Arc<AtomicU64>,
) {
    let mut is_down = false;
    while let Some(first) = messages.recv().await {
        let mut all = vec![first];
        let until = tokio::time::Instant::now() + GATHER;
        while all.len() < MAX_BATCH && !matches!(all.last(), Some(Message::Flush(_))) {
            match tokio::time::timeout_at(until, messages.recv()).await {
                Ok(Some(message)) => all.push(message),
                Ok(None) | Err(_) => break,
            }
        }
        let (mut spans, mut num_requests, mut waiting) = (Vec::new(), 0, None);
        for message in all {
            match message {
                Message::Ended(entry) if is_sampled(&entry) => {
                    num_requests += 1;
                    spans.extend(spans_of(&entry, &model));
                }
                Message::Ended(_) => {}
                Message::Flush(done) => waiting = Some(done),
            }
        }
        if !spans.is_empty() {
            let is_sent = collector.send(message(&spans).to_string().into()).await;
            if !is_sent {
                num_dropped.fetch_add(num_requests, Ordering::Relaxed);
            }
            if !is_sent && !is_down {
                tracing::warn!(collector = collector.authority, "traces cannot be sent");
            }
            is_down = !is_sent;
        }
        if let Some(done) = waiting {
            let _ = done.send(()); // whoever waited may have gone
        }
    }
}

/// Callers that keep no trace get none from us, either.
fn is_sampled(entry: &RequestEntry) -> bool {
    entry.http.parent.as_ref().is_none_or(|parent| parent.is_sampled)
}

fn message(spans: &[Value]) -> Value {
    let version = env!("CARGO_PKG_VERSION");
    let resource =
        attributes(&[("service.name", json!("inflight")), ("service.version", json!(version))]);
    json!({"resourceSpans": [{
        "resource": {"attributes": resource},
        "scopeSpans": [{"scope": {"name": "inflight", "version": version}, "spans": spans}],
    }]})
}

/// A span for the request, and below it one for each stage of each of its sequences.
fn spans_of(entry: &RequestEntry, model: &str) -> Vec<Value> {
    let (http, sequences) = (&entry.http, entry.sequences());
    let trace_id = http.parent.as_ref().map(|parent| parent.trace_id.clone());
    let trace_id =
        trace_id.unwrap_or_else(|| format!("{:016x}{:016x}", random_u64(), random_u64()));
    let root_id = span_id();
    let at = |moment: Instant| {
        http.arrived_unix_ns + moment.saturating_duration_since(http.arrived).as_nanos() as u64
    };
    let ended = sequences.iter().filter_map(|s| s.ended.map(|(at, _)| at)).max();
    let mut root = json!({
        "traceId": trace_id,
        "spanId": root_id,
        "name": "llm_request",
        "kind": KINDS.1,
        "startTimeUnixNano": http.arrived_unix_ns.to_string(),
        "endTimeUnixNano": at(ended.unwrap_or(http.arrived)).to_string(),
        "attributes": request_attributes(entry, &sequences, model),
    });
    if let Some(parent) = &http.parent {
        root["parentSpanId"] = json!(parent.span_id);
    }
    if sequences.iter().any(|s| matches!(s.ended, Some((_, Ending::Error)))) {
        root["status"] = json!({"code": STATUS_ERROR});
    }
    let mut spans = vec![root];
    for (index, sequence) in sequences.iter().enumerate() {
        for (name, start, end, tokens) in stages(sequence) {
            let told = attributes(&[
                ("inflight.sequence.index", json!(index)),
                ("inflight.tokens", json!(tokens)),
            ]);
            spans.push(json!({
                "traceId": trace_id,
                "spanId": span_id(),
                "parentSpanId": root_id,
                "name": name,
                "kind": KINDS.0,
                "startTimeUnixNano": at(start).to_string(),
                "endTimeUnixNano": at(end).to_string(),
                "attributes": told,
            }));
        }
    }
    spans
}

fn span_id() -> String {
    // 0 is no id.
    format!("{:016x}", random_u64().max(1))
}

/// Name, begin, end and tokens of what a sequence went through.
fn stages(sequence: &SequenceEntry) -> Vec<(&'static str, Instant, Instant, usize)> {
    let SequenceEntry { accepted, started, first_token, last_token, .. } = *sequence;
    let ended = sequence.ended.map_or(accepted, |(at, _)| at);
    let mut stages = vec![("queue", accepted, started.unwrap_or(ended), 0)];
    if let Some(started) = started {
        let num_computed = sequence.prompt_len.saturating_sub(sequence.num_cached_tokens);
        stages.push(("prefill", started, first_token.unwrap_or(ended), num_computed));
    }
    if let (Some(first), Some(last)) = (first_token, last_token) {
        stages.push(("decode", first, last, sequence.num_tokens));
    }
    stages
}

fn request_attributes(entry: &RequestEntry, sequences: &[SequenceEntry], model: &str) -> Value {
    let names = entry.http.names();
    let id = names.first().unwrap_or(&entry.http.id);
    let operation = match entry.http.path.as_str() {
        "/v1/completions" => "text_completion",
        _ => "chat",
    };
    // Outputs of one prompt share it.
    let num_input = sequences.first().map_or(0, |sequence| sequence.prompt_len);
    let num_output: usize = sequences.iter().map(|sequence| sequence.num_tokens).sum();
    let num_cached = sequences.iter().map(|sequence| sequence.num_cached_tokens).max();
    let reasons = sequences.iter().filter_map(|s| s.ended.map(|(_, ending)| ending_name(ending)));
    let mut all = vec![
        ("gen_ai.operation.name", json!(operation)),
        ("gen_ai.request.model", json!(model)),
        ("gen_ai.response.model", json!(model)),
        ("gen_ai.response.id", json!(id)),
        ("gen_ai.response.finish_reasons", json!(reasons.collect::<Vec<_>>())),
        ("gen_ai.request.id", json!(entry.http.id)),
        ("gen_ai.request.n", json!(sequences.len())),
        ("gen_ai.usage.input_tokens", json!(num_input)),
        ("gen_ai.usage.output_tokens", json!(num_output)),
        ("gen_ai.usage.prompt_tokens", json!(num_input)),
        ("gen_ai.usage.completion_tokens", json!(num_output)),
        ("gen_ai.usage.cache_read.input_tokens", json!(num_cached.unwrap_or(0))),
        ("url.path", json!(entry.http.path)),
    ];
    if let Some(first) = sequences.first() {
        let between = |from: Option<Instant>, to: Option<Instant>| {
            Some(json!(to?.saturating_duration_since(from?).as_secs_f64()))
        };
        let (accepted, started) = (Some(first.accepted), first.started);
        let ended = first.ended.map(|(at, _)| at);
        let latencies = [
            ("gen_ai.latency.time_in_queue", between(accepted, started)),
            ("gen_ai.latency.time_to_first_token", between(accepted, first.first_token)),
            ("gen_ai.latency.e2e", between(accepted, ended)),
            ("gen_ai.latency.time_in_model_prefill", between(started, first.first_token)),
            ("gen_ai.latency.time_in_model_decode", between(first.first_token, first.last_token)),
            ("gen_ai.latency.time_in_model_inference", between(started, first.last_token)),
        ];
        all.extend(latencies.into_iter().filter_map(|(key, value)| Some((key, value?))));
    }
    attributes(&all)
}

/// As OTLP's JSON has them: each value under the name of its type, integers as text.
fn attributes(all: &[(&str, Value)]) -> Value {
    fn typed(value: &Value) -> Value {
        match value {
            Value::Number(number) if number.is_u64() => json!({"intValue": number.to_string()}),
            Value::Number(number) => json!({"doubleValue": number}),
            Value::Array(values) => {
                json!({"arrayValue": {"values": values.iter().map(typed).collect::<Vec<_>>()}})
            }
            other => json!({"stringValue": other}),
        }
    }
    all.iter().map(|(key, value)| json!({"key": key, "value": typed(value)})).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn endpoints_are_those_of_the_specification() {
        let check = |endpoint: &str, authority: &str, path: &str| {
            let (authority, path) = (authority.to_owned(), path.to_owned());
            assert_eq!(Collector::parse(endpoint), Ok(Collector { authority, path }), "{endpoint}");
        };
        check("http://localhost:4318", "localhost:4318", "/v1/traces");
        check("http://a.b/", "a.b:4318", "/v1/traces");
        check("http://h:9/x/v1/traces", "h:9", "/x/v1/traces");
        for wrong in ["", "localhost:4318", "https://h:1", "grpc://h:4317"] {
            assert!(Collector::parse(wrong).is_err(), "{wrong}");
        }
    }

    #[test]
    fn attributes_bear_their_types() {
        let told = attributes(&[("a", json!(7)), ("b", json!(0.5)), ("c", json!(["stop"]))]);
        let expected = json!([
            {"key": "a", "value": {"intValue": "7"}},
            {"key": "b", "value": {"doubleValue": 0.5}},
            {"key": "c", "value": {"arrayValue": {"values": [{"stringValue": "stop"}]}}},
        ]);
        assert_eq!(told, expected);
    }
}

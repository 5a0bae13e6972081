//! `GET /metrics`: our own names, and vLLM's, so that dashboards made for it work.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use axum::extract::State;
use axum::http::header::CONTENT_TYPE;
use axum::response::{IntoResponse, Response};
use inflight_engine::EngineStats;

use super::exposition::Exposition;
use super::memory_figures::memory_figures;
use super::metrics::{Ending, Metrics};
use crate::access::Account;
use crate::state::ServerState;

/// What Prometheus expects of its text format.
const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";

/// Answers with all figures.
pub(crate) async fn metrics(State(state): State<ServerState>) -> Response {
    ([(CONTENT_TYPE, TEXT_FORMAT)], text(&state)).into_response()
}

fn text(state: &ServerState) -> String {
    let (stats, metrics) = (state.engine().stats(), state.metrics());
    let mut ours = Exposition::new(&[("model_name", &state.config().model_names[0])]);
    engine_figures(&mut ours, stats);
    memory_figures(&mut ours, stats, &state.config().kv_capacities);
    step_figures(&mut ours, state);
    request_figures(&mut ours, metrics);
    tenant_figures(&mut ours, state);
    let mut text = ours.finish();
    if state.config().vllm_metrics {
        let labels = [("model_name", state.config().model_names[0].as_str()), ("engine", "0")];
        let mut vllms = Exposition::new(&labels);
        vllm_figures(&mut vllms, stats, metrics);
        text += &vllms.finish();
    }
    text
}

fn size(cell: &AtomicUsize) -> f64 {
    cell.load(Ordering::Relaxed) as f64
}

fn count(cell: &AtomicU64) -> f64 {
    cell.load(Ordering::Relaxed) as f64
}

/// The share of the KV cache's blocks that somebody needs.
fn cache_usage(stats: &EngineStats) -> f64 {
    let total = size(&stats.num_total_blocks);
    if total > 0.0 { 1.0 - size(&stats.num_free_blocks) / total } else { 0.0 }
}

fn engine_figures(out: &mut Exposition, stats: &EngineStats) {
    out.gauge("inflight_requests_running", "Sequences in batches.", size(&stats.num_running));
    out.gauge("inflight_requests_waiting", "Sequences in the queue.", size(&stats.num_waiting));
    let blocks = size(&stats.num_total_blocks);
    out.gauge("inflight_kv_cache_blocks", "Blocks of the KV cache.", blocks);
    let free = size(&stats.num_free_blocks);
    out.gauge("inflight_kv_cache_free_blocks", "Blocks that nobody needs.", free);
    let usage = cache_usage(stats);
    out.gauge("inflight_kv_cache_usage_ratio", "Share of blocks that are needed.", usage);
    out.counter("inflight_steps_total", "Batches launched.", count(&stats.num_steps));
    let computed = count(&stats.num_computed_tokens);
    out.counter("inflight_computed_tokens_total", "Tokens through the model.", computed);
    let spared = count(&stats.num_cascaded_tokens);
    let help = "Tokens of shared prefixes that a row did not read for itself.";
    out.counter("inflight_cascaded_tokens_total", help, spared);
    let preempted = count(&stats.num_preemptions);
    out.counter("inflight_preemptions_total", "Sequences that gave way to others.", preempted);
}

fn step_figures(out: &mut Exposition, state: &ServerState) {
    let Some(recorder) = state.recorder() else { return };
    let totals = recorder.totals();
    let busy = totals.busy.as_secs_f64();
    out.counter("inflight_device_busy_seconds_total", "Time the device computed.", busy);
    let blocked = totals.blocked.as_secs_f64();
    out.counter("inflight_host_blocked_seconds_total", "Time the host waited.", blocked);
    let idle = totals.idle.iter().map(|(cause, time)| (cause.label(), time.as_secs_f64()));
    let help = "Time the device had nothing to run, by cause.";
    out.counters("inflight_device_idle_seconds_total", help, "cause", idle);
    let lost = totals.num_lost_steps as f64;
    out.counter("inflight_unrecorded_steps_total", "Steps whose records were lost.", lost);
}

fn request_figures(out: &mut Exposition, metrics: &Metrics) {
    let tokens = count(&metrics.prompt_tokens);
    out.counter("inflight_prompt_tokens_total", "Tokens of accepted prompts.", tokens);
    let tokens = count(&metrics.generated_tokens);
    out.counter("inflight_generated_tokens_total", "Tokens generated.", tokens);
    let looked_up = count(&metrics.prefix_queries);
    let help = "Prompt tokens looked up in the prefix cache.";
    out.counter("inflight_prefix_cache_queries_total", help, looked_up);
    let found = count(&metrics.prefix_hits);
    out.counter("inflight_prefix_cache_hits_total", "Those found there.", found);
    if let Some(dropped) = metrics.requests.num_dropped_traces() {
        let help = "Requests whose traces could not be sent.";
        out.counter("inflight_dropped_traces_total", help, dropped as f64);
    }
    let ended = Ending::ALL.map(|(ending, name)| (name, metrics.num_ended(ending) as f64));
    out.counters("inflight_requests_total", "Sequences that ended, by how.", "reason", ended);
    for (name, help, histogram) in [
        ("inflight_time_to_first_token_seconds", "From accepted.", &metrics.first_token),
        ("inflight_inter_token_latency_seconds", "Between tokens.", &metrics.inter_token),
        ("inflight_request_duration_seconds", "From accepted to ended.", &metrics.end_to_end),
        ("inflight_request_queue_seconds", "From accepted to the first row.", &metrics.queue),
        ("inflight_request_prefill_seconds", "First row to first token.", &metrics.prefill),
        ("inflight_request_decode_seconds", "First token to last.", &metrics.decode),
        ("inflight_request_prompt_tokens", "Of a sequence's prompt.", &metrics.prompt_len),
        ("inflight_request_generated_tokens", "By a sequence.", &metrics.output_len),
    ] {
        out.histogram(name, help, &histogram.snapshot());
    }
}

/// Of the keys that have names: few, and chosen by whoever runs the server.
fn tenant_figures(out: &mut Exposition, state: &ServerState) {
    type Figure = fn(&Account) -> f64;
    let figures: [(&str, &str, Figure); 4] = [
        ("inflight_tenant_requests_total", "Requests of a key.", |a| count(&a.num_requests)),
        ("inflight_tenant_refused_total", "Over the key's limits.", |a| count(&a.num_refused)),
        ("inflight_tenant_prompt_tokens_total", "Of its prompts.", |a| count(&a.prompt_tokens)),
        ("inflight_tenant_generated_tokens_total", "Generated.", |a| count(&a.generated_tokens)),
    ];
    let mut tenants: BTreeMap<&str, Vec<&Account>> = BTreeMap::new();
    for account in state.accounts() {
        if let Some(name) = &account.key().name {
            tenants.entry(name).or_default().push(account);
        }
    }
    if tenants.is_empty() {
        return;
    }
    for (name, help, figure) in figures {
        let sum = |accounts: &Vec<&Account>| accounts.iter().map(|account| figure(account)).sum();
        let values = tenants.iter().map(|(tenant, accounts)| (*tenant, sum(accounts)));
        out.counters(name, help, "tenant", values);
    }
}

/// # Source
/// vLLM, `docs/design/metrics.md`.
fn vllm_figures(out: &mut Exposition, stats: &EngineStats, metrics: &Metrics) {
    out.gauge("vllm:num_requests_running", "See inflight_requests_running.", {
        size(&stats.num_running)
    });
    out.gauge("vllm:num_requests_waiting", "See inflight_requests_waiting.", {
        size(&stats.num_waiting)
    });
    out.gauge("vllm:kv_cache_usage_perc", "1 is full.", cache_usage(stats));
    out.counter("vllm:num_preemptions_total", "Preemptions.", count(&stats.num_preemptions));
    out.counter("vllm:prompt_tokens_total", "Prompt tokens.", count(&metrics.prompt_tokens));
    out.counter("vllm:generation_tokens_total", "Generated tokens.", {
        count(&metrics.generated_tokens)
    });
    out.counter("vllm:prefix_cache_queries_total", "Tokens looked up.", {
        count(&metrics.prefix_queries)
    });
    out.counter("vllm:prefix_cache_hits_total", "Tokens found.", count(&metrics.prefix_hits));
    let ended = Ending::ALL.map(|(ending, name)| (name, metrics.num_ended(ending) as f64));
    out.counters("vllm:request_success_total", "Ended requests.", "finished_reason", ended);
    for (name, histogram) in [
        ("vllm:time_to_first_token_seconds", &metrics.first_token),
        ("vllm:inter_token_latency_seconds", &metrics.inter_token),
        ("vllm:e2e_request_latency_seconds", &metrics.end_to_end),
        ("vllm:request_queue_time_seconds", &metrics.queue),
        ("vllm:request_prefill_time_seconds", &metrics.prefill),
        ("vllm:request_decode_time_seconds", &metrics.decode),
        ("vllm:request_inference_time_seconds", &metrics.inference),
        ("vllm:request_time_per_output_token_seconds", &metrics.time_per_token),
        ("vllm:request_prompt_tokens", &metrics.prompt_len),
        ("vllm:request_generation_tokens", &metrics.output_len),
    ] {
        out.histogram(name, "As vLLM has it.", &histogram.snapshot());
    }
}

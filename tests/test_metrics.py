"""/metrics as Prometheus' own checker sees it, and the names that vLLM's dashboards ask for."""

import subprocess

from inflight import TINY_MODEL, Server
from test_page import needed

# vLLM, docs/design/metrics.md and the Grafana dashboard in its examples.
VLLM_TYPES = {
    "vllm:num_requests_running": "gauge",
    "vllm:num_requests_waiting": "gauge",
    "vllm:kv_cache_usage_perc": "gauge",
    "vllm:num_preemptions_total": "counter",
    "vllm:prompt_tokens_total": "counter",
    "vllm:generation_tokens_total": "counter",
    "vllm:request_success_total": "counter",
    "vllm:time_to_first_token_seconds": "histogram",
    "vllm:inter_token_latency_seconds": "histogram",
    "vllm:e2e_request_latency_seconds": "histogram",
    "vllm:request_queue_time_seconds": "histogram",
    "vllm:request_prefill_time_seconds": "histogram",
    "vllm:request_decode_time_seconds": "histogram",
}


def test_prometheus_accepts_the_metrics(server, client, model):
    client.completions.create(model=model, prompt="Hello", max_tokens=4)
    text = server.request("GET", "/metrics")[2]
    check = subprocess.run(
        [needed("promtool"), "check", "metrics"], input=text, text=True, capture_output=True
    )
    # vLLM's names have colons, which Prometheus keeps for recording rules; nothing else is wrong.
    complaints = (check.stdout + check.stderr).splitlines()
    colons = [line for line in complaints if line.endswith("should not contain ':'")]
    assert [line for line in complaints if line not in colons] == []
    assert all(line.startswith("vllm:") for line in colons)


def test_vllms_names_have_its_types(server):
    lines = server.request("GET", "/metrics")[2].splitlines()
    types = dict(line.split()[2:] for line in lines if line.startswith("# TYPE"))
    assert {name: types.get(name) for name in VLLM_TYPES} == VLLM_TYPES


def test_vllms_names_can_be_left_out():
    with Server(TINY_MODEL, "--vllm-metrics", "off") as server:
        text = server.request("GET", "/metrics")[2]
    assert "inflight_steps_total" in text and "vllm:" not in text

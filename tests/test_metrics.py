"""/metrics as Prometheus' own checker sees it, and the names that vLLM's dashboards ask for."""

import json
import re
import subprocess

from inflight import ROOT, TINY_MODEL, Server
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
    "vllm:request_inference_time_seconds": "histogram",
    "vllm:request_time_per_output_token_seconds": "histogram",
    "vllm:request_prompt_tokens": "histogram",
    "vllm:request_generation_tokens": "histogram",
    "vllm:prefix_cache_queries_total": "counter",
    "vllm:prefix_cache_hits_total": "counter",
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


def test_the_prefix_cache_is_counted_by_tokens(tiny):
    def counted():
        names = ["vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"]
        lines = tiny.request("GET", "/metrics")[2].splitlines()
        values = [line.rsplit(" ", 1)[1] for n in names for line in lines if line.startswith(n)]
        return [float(value) for value in values]

    before = counted()
    # Two whole blocks of 16 and some more: the second time they are found.
    for _ in range(2):
        tiny.post("/v1/completions", {"prompt": list(range(3, 43)), "max_tokens": 2})
    queries, hits = (after - then for after, then in zip(counted(), before, strict=True))
    assert (queries, hits) == (80, 32)


def test_the_dashboard_asks_for_what_is_exported(server, client, model):
    client.completions.create(model=model, prompt="Hello", max_tokens=4)
    exported = set()
    for line in server.request("GET", "/metrics")[2].splitlines():
        if not line.startswith("#"):
            exported.add(line.split("{")[0].split(" ")[0])
    dashboard = json.loads((ROOT / "docs" / "grafana" / "inflight.json").read_text())
    queries = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    assert len(queries) > 15
    for query in queries:
        asked = set(re.findall(r"\b(?:inflight|vllm)[_:][a-z_:]+", query))
        assert asked and asked <= exported, f"{query}: {asked - exported} is not exported"


def test_vllms_names_can_be_left_out():
    with Server(TINY_MODEL, "--vllm-metrics", "off") as server:
        text = server.request("GET", "/metrics")[2]
    assert "inflight_steps_total" in text and "vllm:" not in text

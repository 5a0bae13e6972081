"""One request, step by step: `/debug/requests`, `inflight trace`, and traces for OpenTelemetry."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from inflight import TINY_MODEL, Server, run

TRACE_ID, PARENT_ID = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PROMPT = {"prompt": [5] * 20, "max_tokens": 6, "ignore_eos": True, "temperature": 0}


class Collector(HTTPServer):
    """Keeps what is sent to it, as a collector would."""

    def __init__(self):
        self.bodies = []
        super().__init__(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server_address[1]}"
        threading.Thread(target=self.serve_forever, daemon=True).start()

    def spans(self):
        resources = [resource for body in self.bodies for resource in body["resourceSpans"]]
        return [span for r in resources for scope in r["scopeSpans"] for span in scope["spans"]]


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        assert self.path == "/v1/traces" and self.headers["Content-Type"] == "application/json"
        self.server.bodies.append(json.loads(body))
        self.send_response(200)
        self.send_header("Content-Length", "2")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_):
        pass


def ask(server, body, **headers):
    import urllib.request

    data = json.dumps(body).encode()
    headers = {"Content-Type": "application/json", **headers}
    request = urllib.request.Request(f"{server.url}/v1/completions", data, headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read()), answer.headers


def told(server, request):
    status, _, body = server.request("GET", f"/debug/requests/{request}")
    assert status == 200, body
    return body


def until(condition):
    """Records are taken some 20 times a second."""
    for _ in range(200):
        if value := condition():
            return value
        time.sleep(0.05)
    raise AssertionError("it never came")


def test_a_request_is_told_step_by_step(tiny):
    answer, headers = ask(tiny, PROMPT, **{"X-Request-Id": "my-own-name"})
    assert headers["x-request-id"] == "my-own-name"

    def ended():
        [sequence] = told(tiny, answer["id"])["sequences"]
        timeline = sequence["timeline"]
        steps = sum(s["steps"] for s in timeline["stretches"]) if timeline else 0
        return sequence if steps >= 6 else None

    sequence = until(ended)
    assert (sequence["prompt_tokens"], sequence["generated_tokens"]) == (20, 6)
    assert sequence["ending"] == "length"
    assert 0 <= sequence["queue_s"] <= sequence["first_token_s"] <= sequence["ended_s"]
    timeline = sequence["timeline"]
    kinds = [stretch["kind"] for stretch in timeline["stretches"]]
    assert kinds == ["prefill", "decode"] and timeline["preemptions"] == 0
    prefill, decode = timeline["stretches"]
    # The last token is drawn and never computed.
    assert (prefill["tokens"] + timeline["cached_tokens"], decode["tokens"]) == (20, 5)
    assert timeline["queue"]["start_us"] <= timeline["queue"]["end_us"] == prefill["staged_us"]
    assert prefill["compute"]["end_us"] <= decode["compute"]["start_us"]
    assert told(tiny, "my-own-name") == told(tiny, answer["id"])
    assert told(tiny, sequence["engine_id"])["names"] == [answer["id"]]
    status, _, body = tiny.request("GET", "/debug/requests/no-such")
    assert status == 400 and "no-such" in body["error"]["message"]
    code, stdout, stderr = run("trace", tiny.url, "--request", "my-own-name")
    assert code == 0, stderr
    assert "queue" in stdout and "decode: 5 tokens in 5 steps" in stdout


def test_a_server_is_traced_and_its_timeline_drawn(tiny, tmp_path):
    ask(tiny, PROMPT)
    steps, page = tmp_path / "steps.json", tmp_path / "page.html"
    until(lambda: len(tiny.request("GET", "/debug/timeline?seconds=60")[2]) > 20)
    flags = ["--seconds", "60", "--json", steps, "--picture", page]
    code, _, stderr = run("trace", tiny.url, *flags)
    assert code == 0, stderr
    assert {"compute", "launch"} <= {event.get("cat") for event in json.loads(steps.read_text())}
    again = tmp_path / "again.html"
    code, _, stderr = run("trace", steps, steps, "--picture", again)
    assert code == 0, stderr
    # Twice the same steps, so the same bars twice.
    assert again.read_text().count('class="launch"') > page.read_text().count('class="launch"')
    code, _, stderr = run("trace", tmp_path / "no-such.json")
    assert code == 1 and "no-such.json" in stderr


def test_a_short_load_is_drawn_both_ways(tmp_path):
    page = tmp_path / "both.html"
    code, stdout, stderr = run("trace", "--config", "tiny", "--picture", page)
    assert code == 0, stdout + stderr
    text = page.read_text()
    assert "overlap on" in text and "overlap off" in text and "<svg" in text


def attributes(span):
    plain = {}
    for attribute in span["attributes"]:
        [(kind, value)] = attribute["value"].items()
        plain[attribute["key"]] = int(value) if kind == "intValue" else value
    return plain


def test_a_trace_has_a_span_for_each_stage():
    collector = Collector()
    with Server(TINY_MODEL, "--otlp-endpoint", collector.endpoint) as server:
        parent = {"traceparent": f"00-{TRACE_ID}-{PARENT_ID}-01"}
        answer, _ = ask(server, PROMPT, **parent)
        ask(server, PROMPT, traceparent=f"00-{TRACE_ID}-{PARENT_ID}-00")
        spans = until(lambda: collector.spans())
        time.sleep(0.5)
        assert spans == collector.spans(), "a trace that its caller does not keep was sent"
        root, *stages = spans
        assert (root["traceId"], root["parentSpanId"]) == (TRACE_ID, PARENT_ID)
        assert (root["name"], root["kind"]) == ("llm_request", 2)
        plain = attributes(root)
        assert plain["gen_ai.response.id"] == answer["id"]
        assert plain["gen_ai.usage.input_tokens"] == plain["gen_ai.usage.prompt_tokens"] == 20
        assert plain["gen_ai.usage.output_tokens"] == 6
        assert [stage["name"] for stage in stages] == ["queue", "prefill", "decode"]
        assert all(stage["parentSpanId"] == root["spanId"] for stage in stages)
        times = [
            (int(span["startTimeUnixNano"]), int(span["endTimeUnixNano"])) for span in spans
        ]
        (begin, end), queue, prefill, decode = times
        assert begin <= queue[0] <= queue[1] == prefill[0] <= prefill[1] == decode[0]
        assert decode[0] <= decode[1] <= end
        assert abs(begin / 1e9 - time.time()) < 60
        # A request without a parent is a trace of its own, sent when the server ends at the latest.
        ask(server, PROMPT)
    last = collector.spans()[-4]
    assert last["traceId"] != TRACE_ID and "parentSpanId" not in last


def test_a_collector_that_is_not_there_holds_nobody_up():
    with Server(TINY_MODEL, "--otlp-endpoint", "http://127.0.0.1:9") as server:
        ask(server, PROMPT)
        dropped = "inflight_dropped_traces_total"
        until(lambda: any(
            line.startswith(dropped) and line.endswith(" 1")
            for line in server.request("GET", "/metrics")[2].splitlines()
        ))  # fmt: skip


@pytest.mark.parametrize("endpoint", ["localhost:4318", "https://h:1"])
def test_a_collector_that_cannot_be_is_refused(endpoint):
    code, _, stderr = run("serve", TINY_MODEL, "--port", "0", "--otlp-endpoint", endpoint)
    assert code == 2 and "--otlp-endpoint" in stderr

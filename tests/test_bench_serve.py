"""`inflight bench serve` against our own server, and against one that misbehaves on purpose."""

import json

import pytest
from inflight import run
from known_pace import KnownPace, Listener


def bench(url, *flags):
    return run("bench", "serve", "--url", url, *flags)


def test_figures_of_a_closed_loop_add_up(tiny, tmp_path):
    figures, plot = tmp_path / "load.json", tmp_path / "load.svg"
    before = metric(tiny, "vllm:generation_tokens_total")
    code, stdout, stderr = bench(
        tiny.url, "--concurrency", "1,3", "--num-prompts", "6", "--input-len", "5:20",
        "--output-len", "12", "--prompts", "ids", "--id-range", "5:200", "--ignore-eos",
        "--warm-up", "0", "--goodput", "ttft:60000,tpot:60000", "--json", figures, "--plot", plot,
    )  # fmt: skip
    assert code == 0, stdout + stderr
    told = json.loads(figures.read_text())
    assert [run["concurrency"] for run in told["runs"]] == [1, 3]
    for run_of in told["runs"]:
        assert (run_of["num_ok"], run_of["failures"]) == (6, {})
        assert run_of["num_output_tokens"] == 6 * 12 and run_of["is_counted_by_server"]
        assert 6 * 5 <= run_of["num_input_tokens"] <= 6 * 20
        assert run_of["output_tokens_per_s"] == pytest.approx(6 * 12 / run_of["wall_s"])
        assert run_of["goodput"]["fraction"] == 1.0
        assert run_of["ttft_ms"]["n"] == 6
        assert run_of["ttft_ms"]["p50"] <= run_of["e2e_ms"]["p50"] <= run_of["wall_s"] * 1e3
    assert told["runs"][0]["peak_in_flight"] == 1 and told["runs"][1]["peak_in_flight"] == 3
    # The server has counted the same tokens.
    assert metric(tiny, "vllm:generation_tokens_total") - before == 2 * 6 * 12
    svg = plot.read_text()
    assert svg.startswith("<svg") and svg.count("<polyline") == 9


def metric(server, name):
    _, _, text = server.request("GET", "/metrics")
    lines = text.splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith(name + "{"))


def test_a_rate_is_kept_and_lengths_come_from_a_file(tiny, tmp_path):
    lengths, figures = tmp_path / "lengths.json", tmp_path / "load.json"
    lengths.write_text("[[3, 4], [10, 8]]")
    code, stdout, stderr = bench(
        tiny.url, "--rate", "40", "--arrivals", "constant", "--num-prompts", "20", "--lengths",
        lengths, "--endpoint", "chat", "--ignore-eos", "--json", figures,
    )  # fmt: skip
    assert code == 0, stdout + stderr
    [told] = json.loads(figures.read_text())["runs"]
    assert (told["mode"], told["rate"], told["num_ok"]) == ("constant", 40.0, 20)
    assert told["num_output_tokens"] == 10 * (4 + 8)
    # 20 requests are due in 19 times 25 ms, from the first one on.
    assert told["wall_s"] >= 0.475
    assert told["lateness_ms"]["n"] == 20


def test_times_are_from_sending_to_the_first_text_and_between_texts(tmp_path):
    figures = tmp_path / "load.json"
    with KnownPace(ttft_ms=40, gap_ms=10) as server:
        code, stdout, stderr = bench(
            server.url, "--concurrency", "2", "--num-prompts", "4", "--output-len", "5",
            "--warm-up", "0", "--no-keepalive", "--json", figures,
        )  # fmt: skip
    assert code == 0, stdout + stderr
    [told] = json.loads(figures.read_text())["runs"]
    # Nothing comes early; how late it comes is this machine's affair.
    assert (told["ttft_ms"]["n"], told["itl_ms"]["n"]) == (4, 4 * (5 - 1))
    assert told["ttft_ms"]["p50"] >= 40 and told["e2e_ms"]["p50"] >= 40 + 4 * 10
    # All gaps of a request add up to the time from its first text to its last.
    assert told["itl_ms"]["mean"] == pytest.approx(told["tpot_ms"]["mean"], rel=1e-6)
    between = told["e2e_ms"]["mean"] - told["ttft_ms"]["mean"]
    assert 4 * told["itl_ms"]["mean"] <= between


class Misbehaving(Listener):
    """Answers every connection with the same bytes."""

    def __init__(self, what):
        super().__init__()
        self.what = what

    def answer(self, connection):
        with connection:
            connection.recv(1 << 16)
            connection.sendall(self.what)


def stream(body):
    head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n"
    return (head + body).encode()


TEXT = 'data: {"choices":[{"index":0,"text":"a"}]}\n\n'
END = 'data: {"choices":[{"index":0,"text":"","finish_reason":"length"}]}\n\n'


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nbusy", "http_503"),
        (stream(TEXT + END), "no_done"),
        (stream(TEXT + "data: [DONE]\n\n"), "no_finish_reason"),
        (stream(TEXT * 9 + END + "data: [DONE]\n\n"), "too_many_tokens"),
        (stream('data: {"error":{"message":"boom"}}\n\n'), "error_event"),
        (stream("data: {nonsense\n\n"), "bad_json"),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 99\r\n\r\ndata: ", "cut_off"),
    ],
)
def test_what_a_server_does_wrong_is_named(answer, kind):
    with Misbehaving(answer) as server:
        flags = ["--model", "m", "--num-prompts", "2", "--output-len", "4", "--warm-up", "0"]
        code, stdout, stderr = bench(server.url, *flags)
        assert code == 1, stdout
        assert f"2 failed: {kind}" in stdout and "no request succeeded" in stderr

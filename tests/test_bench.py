"""`inflight bench offline` and `inflight doctor`, on a machine that need not have a GPU."""

import json

import pytest
from inflight import TINY_MODEL, run

PHASES = ["admit", "plan", "stage", "launch", "blocked", "collect"]
SMALL = ["--num-prompts", "6", "--input-len", "20", "--output-len", "24", "--device", "cpu"]


def offline(*flags):
    return run("bench", "offline", *flags)


@pytest.mark.parametrize(
    "draws",
    [
        [],
        ["--temperature", "0.9", "--top-p", "0.9"],
        ["--repetition-penalty", "1.2", "--logprobs", "3"],
    ],
)
def test_overlap_changes_no_token_and_waits_for_nothing(tmp_path, draws):
    figures, trace = tmp_path / "figures.json", tmp_path / "steps.json"
    code, stdout, stderr = offline(
        "--config", "tiny", *SMALL, "--overlap", "both", "--json", figures, "--trace", trace, *draws
    )
    assert code == 0, stderr
    assert "gave the same tokens" in stdout
    told = json.loads(figures.read_text())
    assert told["same_tokens"] is True and told["model"] == "tiny"
    assert "union" in told["definitions"]["device_busy_fraction"]
    on, off = told["runs"]
    assert (on["overlap"], off["overlap"]) == (True, False)
    assert on["tokens_checksum"] == off["tokens_checksum"]
    assert on["num_waits_before_launch"] == 0
    assert off["num_waits_before_launch"] == off["num_steps"] - 1
    for figures_of in (on, off):
        check_figures(figures_of)
    for overlap, figures_of in (("on", on), ("off", off)):
        check_timeline(tmp_path / f"steps.{overlap}.json", figures_of)


def check_figures(told):
    assert (told["num_input_tokens"], told["num_output_tokens"]) == (6 * 20, 6 * 24)
    assert told["output_tokens_per_s"] == pytest.approx(6 * 24 / told["wall_s"])
    assert told["total_tokens_per_s"] == pytest.approx(6 * 44 / told["wall_s"])
    # All prompts fit one batch, which gives each its first token.
    assert (told["num_steps"], told["num_prefill_steps"], told["num_lost_steps"]) == (24, 1, 0)
    assert 0 < told["device_busy_fraction"] <= 1
    assert [quarter["num_steps"] for quarter in told["quarters"]] == [6, 6, 6, 6]
    spans = sum(quarter["num_steps"] * quarter["ms_per_step"] for quarter in told["quarters"])
    assert spans == pytest.approx(told["device_span_s"] * 1e3)
    idle = sum(told["bubbles_s"].values()) / told["device_span_s"]
    assert idle == pytest.approx(1 - told["device_busy_fraction"], abs=1e-6)
    assert [time["phase"] for time in told["host"]] == PHASES
    assert all(0 <= time["median_us"] <= time["p99_us"] for time in told["host"])
    assert told["engine"]["max_num_seqs"] == 6


def check_timeline(path, told):
    events = json.loads(path.read_text())
    lanes = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert lanes == ["host", "h2d", "compute", "d2h"]
    computed = [event for event in events if event.get("cat") == "compute"]
    assert len(computed) == told["num_steps"]
    bubbles = [event for event in events if event.get("cat") == "bubble"]
    assert all(event["args"]["cause"] for event in bubbles)
    bubbles_s = sum(event["dur"] for event in bubbles) / 1e6
    assert bubbles_s == pytest.approx(sum(told["bubbles_s"].values()), rel=1e-3, abs=1e-6)


def test_files_are_measured_too():
    code, stdout, stderr = offline(TINY_MODEL, *SMALL, "--no-warm-up", "--overlap", "off")
    assert code == 0, stderr
    assert "6 * 24" not in stdout and "144 tokens" in stdout


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (["--config", "tiny", "--input-len", "2000"], "--input-len"),
        (["--config", "no-such"], "no-such"),
        (["--config", "tiny", "--device", "cpu", "--enforce-eager"], "--enforce-eager"),
        (["--config", "tiny", "--temperature=-1"], "temperature"),
        (["--config", "tiny", "--json", "/no/such/folder/file"], "/no/such/folder"),
    ],
)
def test_what_cannot_be_measured_is_named(flags, named):
    code, _, stderr = offline(*flags)
    assert code not in (0, 101) and named in stderr, stderr


def test_doctor_passes_on_the_cpu():
    code, stdout, stderr = run("doctor", "--device", "cpu")
    assert code == 0, stdout + stderr
    assert "FAILED" not in stdout and "checks passed" in stdout
    for told in ("Plain: ", "attention", "tokens: greedy", "GB/s"):
        assert told in stdout


@pytest.mark.parametrize("arguments", [["doctor"], ["serve", TINY_MODEL, "--port", "0"]])
def test_a_gpu_that_is_not_there_is_named(arguments):
    # No machine has that many.
    code, _, stderr = run(*arguments, "--device", "cuda:1000000")
    assert code not in (0, 101), stderr
    assert "--device cuda: no CUDA device" in stderr and "panicked" not in stderr


def test_the_reference_experiment_and_its_comparison(tmp_path):
    files = {name: tmp_path / name for name in ("a.json", "b.json", "a.svg", "steps.html")}
    small = ["--config", "tiny", "--num-prompts", "4", "--input-len", "20", "--device", "cpu"]
    code, stdout, stderr = run(
        "bench", "async", *small, "--output-len", "24", "--repeats", "2", "--json", files["a.json"],
        "--plot", files["a.svg"], "--picture", files["steps.html"],
    )  # fmt: skip
    assert code == 0, stdout + stderr
    assert "device busy, %" in stdout and "the same tokens" in stdout
    told = json.loads(files["a.json"].read_text())
    assert [run["overlap"] for run in told["runs"]] == [True, False, True, False]
    assert told["same_tokens"] is True and told["bench"] == "async"
    on, off = told["runs"][:2]
    assert (on["num_waits_before_launch"], off["num_waits_before_launch"]) == (0, 23)
    svg = files["a.svg"].read_text()
    assert "overlap on" in svg and "overlap off" in svg and "http://www.w3.org" in svg
    page = files["steps.html"].read_text()
    assert page.index("overlap on") < page.index("overlap off")

    doubled = json.loads(files["a.json"].read_text())
    for run_of in doubled["runs"]:
        run_of["output_tokens_per_s"] *= 2
    files["b.json"].write_text(json.dumps(doubled))
    code, stdout, stderr = run("bench", "compare", files["a.json"], files["b.json"])
    assert code == 0, stderr
    [line, *_] = [line for line in stdout.splitlines() if "output_tokens_per_s" in line]
    assert line.split()[-2:] == ["2.000", "better"]
    code, _, stderr = run("bench", "compare", files["a.json"], files["a.svg"])
    assert code == 1 and "a.svg is no JSON" in stderr


def test_plots_are_written_by_every_experiment(tmp_path):
    tiny = ["--config", "tiny", "--device", "cpu"]
    commands = {
        "offline": ["--num-prompts", "2", "--input-len", "9", "--output-len", "6", "--no-warm-up"],
        "kernels": ["--rows", "2", "--batches", "2", "--contexts", "9", "--prompts", "9"],
        "batching": ["--num-prompts", "4", "--static-batches", "1", "--limits", "32", "--rates",
                     "50", "--rate-prompts", "4", "--scale", "32"],
    }  # fmt: skip
    for command, flags in commands.items():
        plot = tmp_path / f"{command}.svg"
        code, stdout, stderr = run("bench", command, *tiny, *flags, "--plot", plot)
        assert code == 0, stdout + stderr
        svg = plot.read_text()
        assert svg.startswith("<svg") and svg.rstrip().endswith("</svg>"), command
        assert "NaN" not in svg and "<g " in svg, command

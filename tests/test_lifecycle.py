"""The process: health, names, the end by signal, and the other commands."""

import json

import pytest
from inflight import TINY_MODEL, Server, default_model, run

QUESTION = "List 10 facts about the ocean, numbered."


def test_health_and_models(tiny):
    assert tiny.request("GET", "/health")[0] == 200
    status, _, body = tiny.request("GET", "/v1/models")
    assert status == 200 and body["object"] == "list"
    assert [entry["object"] for entry in body["data"]] == ["model"]


def test_served_model_name():
    with Server(TINY_MODEL, "--served-model-name", "parrot") as running:
        assert running.request("GET", "/v1/models")[2]["data"][0]["id"] == "parrot"
        body = {"model": "parrot", "prompt": "the dog", "max_tokens": 2}
        assert running.post("/v1/completions", body)[2]["model"] == "parrot"


def test_max_model_len():
    with Server(TINY_MODEL, "--max-model-len", "32") as running:
        body = {"prompt": [5] * 40, "max_tokens": 2}
        body["model"] = running.request("GET", "/v1/models")[2]["data"][0]["id"]
        assert running.post("/v1/completions", body)[0] == 400
        answer = running.post("/v1/completions", body | {"prompt": [5] * 30, "max_tokens": 2})
        assert answer[0] == 200, answer


def test_a_folder_of_safetensors():
    """A Hugging Face folder without a tokenizer is named as such, not served half."""
    code, _, stderr = run("serve", TINY_MODEL.parent.parent / "qwen2", "--port", "0")
    assert code != 0 and "tokenizer" in stderr


def test_end_by_signal_lets_streams_finish():
    with Server(default_model()) as running:
        client = running.client()
        model = client.models.list().data[0].id
        chunks = iter(
            client.completions.create(
                model=model, prompt="One, two,", max_tokens=40, stream=True, temperature=0
            )
        )
        first = next(chunks)
        running.terminate()
        reasons = [choice.finish_reason for chunk in [first, *chunks] for choice in chunk.choices]
        assert [reason for reason in reasons if reason] in (["length"], ["stop"])
        assert running.wait() == 0, running.output()


def test_run_prints_an_answer():
    code, stdout, stderr = run("run", default_model(), QUESTION)
    assert code == 0, stderr
    assert "ocean" in stdout


def test_chat_answers_each_line():
    code, stdout, stderr = run("chat", default_model(), stdin=QUESTION + "\n")
    assert code == 0, stderr
    assert "ocean" in stdout


def test_help_teaches():
    code, stdout, _ = run("--help")
    assert code == 0
    for command in ("serve", "run", "chat", "doctor", "bench"):
        assert command in stdout
    code, stdout, _ = run("serve", "--help")
    assert code == 0
    flags = ("--max-model-len", "--max-num-seqs", "--max-num-batched-tokens", "--overlap")
    for flag in ("--host", "--port", "--served-model-name", *flags):
        assert flag in stdout


@pytest.mark.parametrize("command", ["serve", "run"])
def test_what_is_no_model_is_named(tmp_path, command):
    torn = tmp_path / "torn.gguf"
    torn.write_bytes(TINY_MODEL.read_bytes()[:20_000])
    text = tmp_path / "text.gguf"
    text.write_text(json.dumps({"not": "a model"}))
    for path in (torn, text, tmp_path / "absent.gguf"):
        arguments = [command, path] + (["hello"] if command == "run" else ["--port", "0"])
        code, _, stderr = run(*arguments)
        assert code not in (0, 101), f"{path}: {stderr}"  # 101 is a panic
        assert path.name in stderr


def test_wrong_flags_are_named():
    for flags, named in (
        (["--port", "70000"], "port"),
        (["--overlap", "maybe"], "overlap"),
        (["--max-num-seqs", "0"], "max-num-seqs"),
        (["--no-such-flag"], "no-such-flag"),
    ):
        code, _, stderr = run("serve", TINY_MODEL, *flags)
        assert code not in (0, 101) and named in stderr, stderr

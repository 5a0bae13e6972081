"""The server and its OpenAPI document, held to each other by schemathesis, and by hostile bodies.

Schemathesis makes requests of the document, such as it allows and such as it does not, and compares
status, content type, headers and body of every answer with it. What it is not asked, and why, is in
schemathesis.toml.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest
from inflight import Server, default_model

KEY = "sk-contract"
SECONDS = 75
CONFIG = Path(__file__).with_name("schemathesis.toml")


@pytest.fixture(scope="module")
def contract(tmp_path_factory):
    """The default model with short answers, and a key: what needs one must say so."""
    flags = ("--api-key", KEY, "--max-model-len", "64", "--request-timeout", "20")
    kept = tmp_path_factory.mktemp("kept")
    with Server(default_model(), *flags, "--files-dir", kept) as running:
        yield running


@pytest.fixture(scope="module")
def document(contract):
    status, _, document = contract.request("GET", "/openapi.json")
    assert status == 200
    return document


def test_schemathesis_finds_nothing(contract, tmp_path):
    # One worker: Python 3.11's parser, which Hypothesis asks for its messages, minds threads.
    command = [
        Path(sys.executable).with_name("st"), "--config-file", CONFIG,
        "run", f"{contract.url}/openapi.json",
        "--header", f"Authorization: Bearer {KEY}",
        "--phases", "examples,coverage,fuzzing", "--max-examples", "20",
        "--max-time", str(SECONDS), "--workers", "1", "--generation-deterministic",
        "--request-timeout", "60", "--continue-on-failure",
        "--suppress-health-check", "all", "--no-color", "--warnings", "off",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout[-20_000:] + done.stderr[-2_000:]
    assert "passed" in done.stdout


def bodies(document):
    """Each endpoint's path, and the fields that it knows."""
    for path, methods in document["paths"].items():
        content = methods.get("post", {}).get("requestBody", {}).get("content", {})
        if body := content.get("application/json"):
            yield path, body["schema"]


HOSTILE = [
    None, True, -1, 0, 2**31, 2**63, 2**64, 10**400, -(10**400), 0.5, 1e-320, 1e308, "", "\0",
    "a" * 5000, "\ud800", [], [[]], [None], [10**30], {}, {"": None}, {"type": "text"},
    ["text", "a"], "NaN",
]  # fmt: skip
DEEP = [b"[" * 5000, b'{"a":' * 5000, b"[" * 200_000]
RAW = [b"NaN", b"1e999", b"-0", b'"\\ud800"', b"[1,]", b"\xff", b'{"a":1,"a":2}']


def test_hostile_values_of_every_field(contract, document):
    """Whatever a field holds, the answer is one of the document's, and never a 500."""
    generator, count = random.Random(7), 0
    for path, schema in bodies(document):
        allowed = set(document["paths"][path]["post"]["responses"])
        base = {
            name: value
            for name, value in {
                "messages": [{"role": "user", "content": "a"}],
                "prompt": "a", "input": "a", "tokens": [1], "max_tokens": 2,
            }.items()  # fmt: skip
            if name in schema["properties"] and (path, name) != ("/tokenize", "prompt")
        }
        for name in [*schema["properties"], "no_such_field"]:
            values = [json.dumps(value).encode() for value in generator.sample(HOSTILE, 5)]
            values += generator.sample(RAW, 2) + generator.sample(DEEP[:2], 1)
            for value in values:
                members = {key: json.dumps(base[key]).encode() for key in base} | {name: value}
                members = [b'"%b": %b' % (key.encode(), text) for key, text in members.items()]
                body = b"{%b}" % b", ".join(members)
                status, _, answer = contract.request(
                    "POST", path, raw=body, headers={"Authorization": f"Bearer {KEY}"}
                )
                assert str(status) in allowed and status < 500, (path, body[:200], answer)
                count += 1
    assert count > 1000
    assert contract.request("GET", "/health")[0] == 200


@pytest.mark.parametrize("raw", DEEP + RAW)
def test_hostile_bodies(contract, document, raw):
    for path, _ in bodies(document):
        status, _, answer = contract.request(
            "POST", path, raw=raw, headers={"Authorization": f"Bearer {KEY}"}
        )
        assert status == 400 and answer["error"]["message"], (path, answer)

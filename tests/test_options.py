"""Every option of sampling and structured output: the same tokens whatever else goes on.

One request for each option, asked alone; then again in other circumstances. The arithmetic of the
CPU backend is batch-invariant, so that even log-probabilities are the same to the bit.
"""

import re
from concurrent.futures import ThreadPoolExecutor

import pytest
from inflight import TINY_MODEL, Server

PATH = "/v1/completions"
SCHEMA = {
    "type": "object", "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
    "required": ["a", "b"], "additionalProperties": False,
}  # fmt: skip
# 32 to 126 are the vocabulary's printable letters.
OPTIONS = {
    "greedy": {"temperature": 0},
    "temperature": {"temperature": 1.3},
    "top_k": {"top_k": 7},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.1},
    "typical_p": {"typical_p": 0.6},
    "top_n_sigma": {"top_n_sigma": 1.2},
    "xtc": {"xtc_probability": 0.6, "xtc_threshold": 0.01},
    "dry": {"dry_multiplier": 3, "dry_allowed_length": 1, "dry_sequence_breakers": ["e"]},
    "repetition_penalty": {"repetition_penalty": 1.3},
    "presence_penalty": {"presence_penalty": 1.5},
    "frequency_penalty": {"frequency_penalty": 1.5},
    "logit_bias": {"logit_bias": {"65": 3, "66": -100}},
    "bad_words": {"bad_words": ["a", "th", "e "]},
    "min_tokens": {"min_tokens": 20, "stop_token_ids": list(range(32, 90))},
    "stop_token_ids": {"stop_token_ids": [70, 71, 72, 73]},
    "ignore_eos": {"ignore_eos": True},
    "stop": {"stop": ["a", "\ufffd\ufffd\ufffd"]},
    "logprobs": {"logprobs": 5},
    "prompt_logprobs": {"prompt_logprobs": 2},
    "echo": {"echo": True},
    "n": {"n": 3},
    "json_schema": {"guided_json": SCHEMA},
    "regex": {"guided_regex": r"[a-f]{3}(-\d\d){4}"},
    "choice": {"guided_choice": ["left", "right", "straight on"]},
    "lark": {"guided_grammar": 'start: ("a" | "b" "c")~12..20'},
    "gbnf": {"grammar": 'root ::= "x" | "(" root ")"'},
    "schema and rules": {
        "guided_json": SCHEMA, "top_n_sigma": 1.2, "dry_multiplier": 3, "frequency_penalty": 1,
        "typical_p": 0.9, "logit_bias": {"49": 3},
    },
}  # fmt: skip
NUM_OTHERS = 64
SMALL = ("--kv-cache-tokens", "192", "--block-size", "8")


def body(name):
    others = {"prompt": "the dog and the end", "temperature": 1, "seed": 11, "max_tokens": 90}
    return others | {"logprobs": 0} | OPTIONS[name]


def ask(server, name):
    status, _, answer = server.post(PATH, body(name))
    assert status == 200, answer
    return [{key: choice[key] for key in choice} for choice in answer["choices"]]


def ask_among_others(server, name):
    """In the middle of requests of all kinds and lengths."""
    def other(i):
        names = list(OPTIONS)
        length = {"seed": i, "max_tokens": 1 + i * 7 % 90, "prompt": "ship " * (i % 9)}
        return server.post(PATH, body(names[i % len(names)]) | length)[0]

    with ThreadPoolExecutor(NUM_OTHERS + 1) as pool:
        others = [pool.submit(other, i) for i in range(NUM_OTHERS // 2)]
        asked = pool.submit(ask, server, name)
        others += [pool.submit(other, i) for i in range(NUM_OTHERS // 2, NUM_OTHERS)]
        assert all(done.result() in (200, 400) for done in others)
        return asked.result()


def num_preemptions(server):
    text = server.request("GET", "/metrics")[2]
    return float(re.search(r"^inflight_preemptions_total\S* (\S+)$", text, re.M)[1])


@pytest.fixture(scope="module")
def servers():
    """With overlap and without, with room for everybody and with none."""
    settings = [(overlap, small) for overlap in ("on", "off") for small in ((), SMALL)]
    started = [Server(TINY_MODEL, "--overlap", overlap, *small) for overlap, small in settings]
    yield started
    for server in started:
        server.stop()


@pytest.fixture(scope="module")
def alone(servers):
    return {name: ask(servers[0], name) for name in OPTIONS}


@pytest.mark.parametrize("name", OPTIONS)
def test_the_same_tokens(servers, alone, name):
    for server in servers:
        assert ask(server, name) == alone[name]
        assert ask_among_others(server, name) == alone[name]


def test_who_had_no_room_gave_way(servers, alone):
    for server in servers[1::2]:
        before = num_preemptions(server)
        assert ask_among_others(server, "greedy") == alone["greedy"]
        assert num_preemptions(server) > before
    for server in servers[::2]:
        assert num_preemptions(server) == 0


def test_every_option_changes_something(alone):
    """Or its part of the above would show nothing."""
    plain = alone["temperature"]
    same = [name for name in OPTIONS if name != "temperature" and alone[name] == plain]
    assert same == []

"""What `usage` says is what others count: prompts by tiktoken, outputs by what they are made of.

An output's tokens are counted in ways that know nothing of the server's own counting: by a length
that was asked for, by re-encoding a text that was forced, by the pieces that log-probabilities tell
(each must be one of the vocabulary's), by where a stop string is first complete in them, and by the
engine's counters.
"""

import itertools
import json

import pytest
from inflight import Server, default_model
from vocabulary import Vocabulary

SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
QUESTION = "Name 12 colours, and say why you don't like grey 🦙."
MESSAGES = [{"role": "user", "content": QUESTION}]
PROMPT = "One, two, three,  4 or 567"
PARIS = 7042  # " Paris"
END = b"<|im_end|>"
TOOL = {
    "type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"],
    "additionalProperties": False,
}  # fmt: skip


@pytest.fixture(scope="module")
def vocabulary():
    return Vocabulary(default_model())


@pytest.fixture(scope="module")
def counted():
    """A server that nobody else asks, so that its counters are this test's."""
    with Server(default_model()) as running:
        yield running


def rendered(*turns):
    """A chat as the default model's template writes it."""
    if turns[0][0] != "system":
        turns = (("system", SYSTEM), *turns)
    return "".join(f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in turns) + (
        "<|im_start|>assistant\n"
    )


def counters(server):
    lines = server.request("GET", "/metrics")[2].splitlines()
    names = ("inflight_prompt_tokens_total", "inflight_generated_tokens_total")
    found = (next(line for line in lines if line.startswith(name)) for name in names)
    return [int(line.split()[-1]) for line in found]


def events(text):
    data = (line.removeprefix("data: ") for line in text.splitlines() if line.startswith("data: "))
    return [json.loads(line) for line in data if line != "[DONE]"]


def usage_of(server, path, body):
    """Prompt and output tokens that a whole answer and a stream tell, which must be the same."""
    whole = server.post(path, body)
    assert whole[0] == 200, whole
    told = []
    streamed = server.post(path, body | {"stream": True} | (
        {"stream_options": {"include_usage": True}} if "completions" in path else {}))[2]
    usages = {}
    for event in events(streamed):
        for usage in (event, event.get("message") or {}, event.get("response") or {}):
            usages |= usage.get("usage") or {}
    for usage in (whole[2]["usage"], usages):
        prompt = usage.get("prompt_tokens", usage.get("input_tokens"))
        # Anthropic's input tokens are those beside the cached ones.
        prompt += usage.get("cache_read_input_tokens", 0)
        output = usage.get("completion_tokens", usage.get("output_tokens"))
        assert usage.get("total_tokens", prompt + output) == prompt + output
        told.append((prompt, output))
    assert told[0] == told[1], (path, body)
    return told[0]


CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"
RESPOND, MESSAGE = "/v1/responses", "/v1/messages"
FORCED = {"logit_bias": {str(PARIS): 100}}


@pytest.mark.parametrize(
    ("path", "body", "limit"),
    [
        (COMPLETE, {"prompt": PROMPT}, "max_tokens"),
        (CHAT, {"messages": MESSAGES}, "max_tokens"),
        (CHAT, {"messages": MESSAGES}, "max_completion_tokens"),
        (RESPOND, {"input": QUESTION}, "max_output_tokens"),
        (MESSAGE, {"messages": MESSAGES}, "max_tokens"),
    ],
)
def test_every_endpoint(counted, vocabulary, path, body, limit):
    expected = vocabulary.count(PROMPT if "prompt" in body else rendered(("user", QUESTION)))
    for length in (1, 9):
        before = counters(counted)
        usage = usage_of(counted, path, body | FORCED | {limit: length})
        assert usage == (expected, vocabulary.count(" Paris" * length))
        after = counters(counted)
        # Asked twice: whole, and as a stream.
        assert [b - a for a, b in zip(before, after)] == [2 * expected, 2 * length]


def pieces_of(choice, vocabulary):
    entries = choice["logprobs"]["content"]
    pieces = [bytes(entry["bytes"]) for entry in entries]
    assert all(piece in vocabulary.pieces for piece in pieces)
    return pieces


def ask(server, vocabulary, **fields):
    """A chat's choices, their pieces, and the usage that comes without asking for pieces."""
    body = {"messages": MESSAGES, "temperature": 0, "max_tokens": 40} | fields
    choices = server.post(CHAT, body | {"logprobs": True})[2]["choices"]
    return choices, [pieces_of(choice, vocabulary) for choice in choices], usage_of(
        server, CHAT, body)


def test_an_end_of_its_own_counts(counted, vocabulary):
    fields = {"messages": [{"role": "user", "content": "Say yes."}], "max_tokens": 8}
    # Token 2 ends a turn. No text shows it, and it was generated as all others are.
    (choice,), (pieces,), usage = ask(counted, vocabulary, logit_bias={"2": 100}, **fields)
    assert (choice["finish_reason"], choice["message"]["content"]) == ("stop", "")
    assert (usage[1], pieces) == (1, [END])


def test_a_stop_string_ends_the_count(counted, vocabulary):
    _, (pieces,), _ = ask(counted, vocabulary)
    text = b"".join(pieces).decode()
    for stop in (text[9:11], text[30:37], text[-3:]):
        (choice,), _, usage = ask(counted, vocabulary, stop=[stop])
        assert choice["message"]["content"] == text[: text.index(stop)]
        said = itertools.accumulate(pieces)
        complete = next(i for i, part in enumerate(said, 1) if stop.encode() in part)
        assert usage[1] == complete


def test_several_outputs(counted, vocabulary):
    fields = {"n": 3, "temperature": 1.1, "seed": 5, "stop": ["e"], "max_tokens": 24}
    choices, pieces, usage = ask(counted, vocabulary, **fields)
    assert len(choices) == 3 and len({len(p) for p in pieces}) > 1
    # The prompt counts once.
    assert usage == (vocabulary.count(rendered(("user", QUESTION))), sum(map(len, pieces)))
    body = {"prompt": [PROMPT, "Two"], "n": 2, "max_tokens": 5, "temperature": 1} | FORCED
    assert usage_of(counted, COMPLETE, body) == (vocabulary.count(PROMPT) + 1, 4 * 5)
    best = counted.post(COMPLETE, {"prompt": PROMPT, "max_tokens": 5, "best_of": 3} | FORCED)[2]
    assert best["usage"]["completion_tokens"] == 3 * 5


def test_what_is_echoed_is_not_generated(counted, vocabulary):
    body = {"prompt": PROMPT, "echo": True, "max_tokens": 3} | FORCED
    assert usage_of(counted, COMPLETE, body) == (vocabulary.count(PROMPT), 3)
    nothing = counted.post(COMPLETE, {"prompt": PROMPT, "echo": True, "max_tokens": 0})[2]
    assert nothing["usage"]["completion_tokens"] == 0
    assert nothing["usage"]["prompt_tokens"] == vocabulary.count(PROMPT)


def test_constraints(counted, vocabulary):
    choices, (pieces,), usage = ask(counted, vocabulary, guided_regex=r"[a-f]{3}-\d\d")
    assert b"".join(pieces) == choices[0]["message"]["content"].encode() + END
    assert usage[1] == len(pieces) and choices[0]["finish_reason"] == "stop"
    before = counters(counted)[1]
    usage_of(counted, CHAT, {"messages": MESSAGES, "guided_regex": r"[a-f]{3}-\d\d",
                             "temperature": 0, "max_tokens": 40})
    assert counters(counted)[1] - before == 2 * usage[1]


def test_tool_calls_on_every_endpoint(counted):
    """The same call by every API: the same tokens, and as many as the engine generated."""
    function = {"name": "f", "parameters": TOOL}
    anthropic = {"name": "f", "input_schema": TOOL}
    told = set()
    for path, body in (
        (CHAT, {"messages": MESSAGES, "tools": [{"type": "function", "function": function}],
                "tool_choice": "required", "parallel_tool_calls": False, "max_tokens": 60}),
        (RESPOND, {"input": QUESTION, "tools": [{"type": "function", **function}],
                   "tool_choice": "required", "parallel_tool_calls": False,
                   "max_output_tokens": 60}),
        (MESSAGE, {"messages": MESSAGES, "tools": [anthropic], "max_tokens": 60,
                   "tool_choice": {"type": "any", "disable_parallel_tool_use": True}}),
    ):  # fmt: skip
        before = counters(counted)
        usage = usage_of(counted, path, body | {"temperature": 0})
        after = counters(counted)
        assert [b - a for a, b in zip(before, after)] == [2 * usage[0], 2 * usage[1]]
        told.add(usage)
    assert len(told) == 1, told


def test_turns_and_systems(counted, vocabulary):
    turns = (("system", "Be brief."), ("user", "2 + 2?"), ("assistant", "4"), ("user", "Why?"))
    messages = [{"role": role, "content": text} for role, text in turns]
    expected = vocabulary.count(rendered(*turns))
    for path, body in (
        (CHAT, {"messages": messages, "max_tokens": 2}),
        (RESPOND, {"instructions": "Be brief.", "input": messages[1:], "max_output_tokens": 2}),
        (MESSAGE, {"system": "Be brief.", "messages": messages[1:], "max_tokens": 2}),
    ):
        assert usage_of(counted, path, body | FORCED) == (expected, 2)
    count = {"system": "Be brief.", "messages": messages[1:]}
    assert counted.post(f"{MESSAGE}/count_tokens", count)[2] == {"input_tokens": expected}
    assert counted.post("/tokenize", {"messages": messages})[2]["count"] == expected


def test_embeddings(counted, vocabulary):
    texts = [PROMPT, QUESTION]
    usage = counted.post("/v1/embeddings", {"input": texts})[2]["usage"]
    expected = sum(map(vocabulary.count, texts))
    assert usage == {"prompt_tokens": expected, "total_tokens": expected}

"""Structured output: what comes is what was asked for, or the request is refused by name."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jsonschema
import pytest
from jsonschema.validators import validator_for
from openai import BadRequestError

SCHEMAS = Path(__file__).parent / "data" / "schemastore.jsonl"
NUM_CLIENTS = 32
# The default model's tokens that end a text, a list and an object; liked better, so that it comes
# to an end.
CLOSING = {"18": 6, "77": 6, "109": 9}
MESSAGES = [{"role": "user", "content": "Answer in JSON, as short as you can."}]


def keywords(value):
    if isinstance(value, dict):
        for name, item in value.items():
            yield name
            yield from keywords(item)
    elif isinstance(value, list):
        for item in value:
            yield from keywords(item)


def answer_to(server, schema):
    body = {
        "messages": MESSAGES,
        "max_tokens": 200,
        "temperature": 0,
        "logit_bias": CLOSING,
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "it", "schema": schema, "strict": True},
        },
    }
    return server.request("POST", "/v1/chat/completions", body)


def check(server, line):
    """What became of one schema."""
    schema = json.loads(line)
    status, _, body = answer_to(server, schema)
    if status == 400:
        message = body["error"]["message"]
        assert "response_format" in body["error"]["param"], body
        names = [name for name in set(keywords(schema)) if name in message]
        assert names or "nsatisfiable" in message or "regex" in message, message
        return "refused"
    assert status == 200, body
    choice = body["choices"][0]
    if choice["finish_reason"] == "length":
        return "cut"
    assert choice["finish_reason"] == "stop"
    answer = json.loads(choice["message"]["content"])
    validator = validator_for(schema)
    validator(schema).validate(answer)
    return "valid"


def test_two_hundred_schemas_that_people_use(server):
    lines = SCHEMAS.read_text().splitlines()
    assert len(lines) == 200
    with ThreadPoolExecutor(NUM_CLIENTS) as clients:
        results = list(clients.map(lambda line: check(server, line), lines))
    counts = {result: results.count(result) for result in set(results)}
    print(counts)
    assert counts["valid"] >= 100, counts
    assert counts["refused"] <= 80, counts


def chat(client, model, **fields):
    return client.chat.completions.create(
        model=model, messages=MESSAGES, max_tokens=60, temperature=0, **fields
    )


@pytest.mark.parametrize("temperature", [0, 1.5])
def test_every_kind_of_constraint(client, model, temperature):
    def content(**extra):
        answer = client.chat.completions.create(
            model=model,
            messages=MESSAGES,
            max_tokens=60,
            temperature=temperature,
            seed=7,
            extra_body=extra,
        )
        assert answer.choices[0].finish_reason == "stop"
        return answer.choices[0].message.content

    assert content(guided_choice=["left", "right"]) in ("left", "right")
    assert re.fullmatch(r"[a-f]{3}-\d\d", content(guided_regex=r"[a-f]{3}-\d\d"))
    assert content(structured_outputs={"grammar": 'start: "a" "b"~2..3 "c"'}) in ("abbc", "abbbc")
    assert re.fullmatch(r"\(*x\)*", content(grammar='root ::= "x" | "(" root ")"', seed=1))
    schema = {"type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    schema["additionalProperties"] = False
    assert json.loads(content(guided_json=schema)) in ({"n": 1}, {"n": 2})
    assert json.loads(content(json_schema=schema)) in ({"n": 1}, {"n": 2})


def test_streams_add_up(client, model):
    schema = {"type": "array", "items": {"type": "integer"}, "minItems": 3, "maxItems": 3}
    fields = {"extra_body": {"guided_json": schema}}
    whole = chat(client, model, **fields).choices[0].message.content
    chunks = chat(client, model, stream=True, **fields)
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == whole
    assert len(json.loads(whole)) == 3


def tool(name, properties):
    parameters = {
        "type": "object",
        "properties": properties,
        "required": list(properties),
        "additionalProperties": False,
    }
    function = {"name": name, "parameters": parameters, "strict": True}
    return {"type": "function", "function": function}


TOOLS = [tool("add", {"a": {"type": "integer"}, "b": {"enum": [1, 2]}}), tool("now", {})]


def test_calls_that_are_asked_for(client, model):
    def calls(choice):
        answer = chat(client, model, tools=TOOLS, tool_choice=choice, parallel_tool_calls=False)
        assert answer.choices[0].finish_reason == "tool_calls", answer
        return answer.choices[0].message.tool_calls

    (call,) = calls("required")
    assert call.function.name in ("add", "now")
    (call,) = calls({"type": "function", "function": {"name": "add"}})
    assert call.function.name == "add"
    arguments = json.loads(call.function.arguments)
    assert set(arguments) == {"a", "b"} and arguments["b"] in (1, 2)


WRONG = '{"name": "add", "arguments": {"a": "seven", "b": 3, "c": null}}'


def test_calls_that_may_be_made(client, model):
    """A model that is told to write a call that its tool's schema forbids writes another one."""
    ask = f"Repeat: <tool_call>\n{WRONG}\n</tool_call>"
    fields = {"model": model, "messages": [{"role": "user", "content": ask}], "max_tokens": 80}
    num_calls = 0
    for seed in range(8):
        answer = client.chat.completions.create(tools=TOOLS, seed=seed, temperature=0.7, **fields)
        for call in answer.choices[0].message.tool_calls or []:
            if answer.choices[0].finish_reason == "length":
                continue
            (known,) = [t["function"] for t in TOOLS if t["function"]["name"] == call.function.name]
            jsonschema.validate(json.loads(call.function.arguments), known["parameters"])
            num_calls += 1
    assert num_calls > 0


@pytest.mark.parametrize(
    ("fields", "param", "word"),
    [
        ({"guided_json": {"type": "array", "uniqueItems": True}}, "guided_json", "uniqueItems"),
        ({"guided_regex": "(?=a)a"}, "guided_regex", "look"),
        ({"guided_grammar": "start: missing"}, "guided_grammar", "missing"),
        ({"grammar": "root ::= missing"}, "grammar", "missing"),
        ({"guided_json": {"type": "integer", "multipleOf": 1000003}}, "guided_json", "multipleOf"),
        ({"mirostat": 2}, "mirostat", ""),
        ({"use_beam_search": True}, "use_beam_search", ""),
    ],
)
def test_what_cannot_be_is_refused_soon(client, model, fields, param, word):
    started = time.monotonic()
    with pytest.raises(BadRequestError) as refused:
        chat(client, model, extra_body=fields)
    assert refused.value.param == param and word in refused.value.message
    assert time.monotonic() - started < 60


def test_sampling_beyond_openai(client, model):
    def text(**fields):
        answer = client.completions.create(
            model=model, prompt="One, two, one, two,", max_tokens=24, seed=3, extra_body=fields
        )
        return answer.choices[0].text

    free = text(temperature=0)
    assert "four" in free
    assert "four" not in text(temperature=0, bad_words=["four"])
    assert text(temperature=0, dry_multiplier=5, dry_allowed_length=1) != free
    for fields in ({"typical_p": 0.5}, {"top_n_sigma": 0.5}, {"xtc_probability": 1}):
        fields["xtc_threshold"] = 0.05
        assert text(temperature=1, **fields) == text(temperature=1, **fields)
    assert text(temperature=1, top_n_sigma=0.0001) == free

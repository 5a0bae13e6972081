"""Every field of completions and chats, by the official client, whole and streamed.

The model is small, so nothing here depends on what it says: where a shape is wanted, it is forced.
"""

import json
import math
from typing import Literal

import jsonschema
import pytest
from inflight import TINY_MODEL, Server
from openai import BadRequestError
from pydantic import BaseModel, conint, conlist

QUESTION = [{"role": "user", "content": "What is the weather in Paris and in Rome?"}]
WEATHER = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "maxLength": 12}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
CLOCK = {"type": "function", "function": {"name": "clock", "parameters": {"type": "object"}}}
# PROMPT, by llama.cpp.
PROMPT, PROMPT_IDS = "The capital of France is", [504, 3575, 282, 4649, 314]


def chat(client, model, **options):
    options = {"messages": QUESTION, "temperature": 0, "max_tokens": 16} | options
    return client.chat.completions.create(model=model, **options)


def complete(client, model, **options):
    options = {"prompt": PROMPT, "temperature": 0, "max_tokens": 6} | options
    return client.completions.create(model=model, **options)


def add_up(chunks):
    """What a client makes of a stream: a message by index, and the usage."""
    messages, usage = {}, None
    for chunk in chunks:
        if chunk.usage:
            assert chunk.choices == []
            usage = chunk.usage
        for choice in chunk.choices:
            empty = {"content": "", "calls": [], "tokens": [], "reason": None}
            message = messages.setdefault(choice.index, empty)
            assert message["reason"] is None, "nothing follows the end"
            message["content"] += choice.delta.content or ""
            message["tokens"] += choice.logprobs.content if choice.logprobs else []
            for call in choice.delta.tool_calls or []:
                if call.index == len(message["calls"]):
                    message["calls"].append([call.id, call.function.name, ""])
                assert call.index == len(message["calls"]) - 1
                message["calls"][call.index][2] += call.function.arguments or ""
            message["reason"] = choice.finish_reason
    return messages, usage


@pytest.mark.parametrize("prompt", [PROMPT, [PROMPT], PROMPT_IDS, [PROMPT_IDS]])
def test_forms_of_a_prompt(client, model, prompt):
    answer = complete(client, model, prompt=prompt)
    assert answer.choices[0].text.startswith(" Paris")
    assert answer.usage.prompt_tokens == len(PROMPT_IDS)


def test_several_prompts_and_outputs(client, model):
    prompts = [PROMPT_IDS, PROMPT_IDS[:3]]
    options = {"prompt": prompts, "n": 2, "temperature": 1, "seed": 5, "max_tokens": 4}
    answer = complete(client, model, logprobs=0, **options)
    assert [choice.index for choice in answer.choices] == [0, 1, 2, 3]
    told = [len(choice.logprobs.tokens) for choice in answer.choices]
    assert answer.usage.prompt_tokens == len(PROMPT_IDS) + 3
    assert answer.usage.completion_tokens == sum(told)
    texts = {}
    for chunk in complete(client, model, stream=True, **options):
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + choice.text
    assert texts == {choice.index: choice.text for choice in answer.choices}


def test_echo_and_best_of(client, model):
    echoed = complete(client, model, echo=True)
    assert echoed.choices[0].text == PROMPT + complete(client, model).choices[0].text
    options = {"temperature": 1.2, "seed": 11}
    all_four = complete(client, model, n=4, logprobs=0, **options).choices
    mean = {
        choice.text: sum(choice.logprobs.token_logprobs) / len(choice.logprobs.token_logprobs)
        for choice in all_four
    }
    best = complete(client, model, best_of=4, **options)
    assert best.choices[0].text == max(mean, key=mean.get)
    assert best.choices[0].logprobs is None
    assert best.usage.completion_tokens == sum(len(c.logprobs.tokens) for c in all_four)


def test_bias_seed_stop_and_stream_options(client, model):
    # 7042 is " Paris" in this vocabulary.
    forced = complete(client, model, logit_bias={"7042": 100}, max_tokens=3)
    assert forced.choices[0].text == " Paris" * 3
    seeded = [complete(client, model, temperature=1.3, seed=3).choices[0].text for _ in range(2)]
    assert seeded[0] == seeded[1]
    stopped = complete(client, model, stop=["ris"])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (" Pa", "stop")
    chunks = list(complete(client, model, stream=True, stream_options={"include_usage": True}))
    assert chunks[-1].choices == [] and chunks[-1].usage.completion_tokens == 6
    assert all(chunk.usage is None for chunk in chunks[:-1])


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"suffix": "."}, "suffix"),
        ({"best_of": 2, "stream": True}, "best_of"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_completions_refuse(client, model, fields, named):
    with pytest.raises(BadRequestError) as refused:
        complete(client, model, **fields)
    assert refused.value.param == named


def test_chat_fields_whole_and_streamed(client, model):
    parts = [{"type": "text", "text": "Name a colour."}, {"type": "text", "text": "One word."}]
    options = {
        "messages": [{"role": "developer", "content": "Be brief."},
                     {"role": "user", "content": parts}],
        "n": 2, "temperature": 1, "seed": 7, "logprobs": True, "top_logprobs": 2,
        "max_completion_tokens": 8, "stop": ["."], "max_tokens": 8,
    }
    whole = chat(client, model, **options)
    told = [choice.logprobs.content for choice in whole.choices]
    assert whole.usage.completion_tokens == sum(map(len, told))
    assert all(len(token.top_logprobs) == 2 for tokens in told for token in tokens)
    streamed, usage = add_up(
        chat(client, model, stream=True, stream_options={"include_usage": True}, **options)
    )
    assert usage.completion_tokens == whole.usage.completion_tokens
    assert usage.prompt_tokens == whole.usage.prompt_tokens
    for choice in whole.choices:
        message = streamed[choice.index]
        assert message["content"] == choice.message.content
        assert message["reason"] == choice.finish_reason
        assert [t.token for t in message["tokens"]] == [t.token for t in told[choice.index]]


def test_prompts_are_counted_as_tokenize_counts_them(server, client, model):
    for fields in ({}, {"tools": [WEATHER]}):
        count = server.post("/tokenize", {"messages": QUESTION} | fields)[2]["count"]
        assert chat(client, model, max_tokens=1, **fields).usage.prompt_tokens == count
    status, _, told = server.post("/tokenize", {"prompt": PROMPT, "return_token_strs": True})
    assert (status, told["tokens"], told["count"]) == (200, PROMPT_IDS, len(PROMPT_IDS))
    assert "".join(told["token_strs"]) == PROMPT
    assert server.post("/detokenize", {"tokens": PROMPT_IDS})[2] == {"prompt": PROMPT}


NAMED = {"type": "function", "function": {"name": "weather"}}


@pytest.mark.parametrize("choice", ["required", NAMED])
def test_forced_tool_calls(client, model, choice):
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 120, "temperature": 0}
    answer = chat(client, model, parallel_tool_calls=False, **options).choices[0]
    assert answer.finish_reason == "tool_calls"
    (call,) = answer.message.tool_calls
    assert call.function.name == "weather"
    assert list(json.loads(call.function.arguments)) == ["city"]
    streamed, _ = add_up(chat(client, model, stream=True, parallel_tool_calls=False, **options))
    ((_, name, arguments),) = streamed[0]["calls"]
    assert (name, arguments) == ("weather", call.function.arguments)
    assert streamed[0]["reason"] == "tool_calls"


def test_a_call_that_is_cut(client, model):
    options = {"tools": [WEATHER], "tool_choice": "required", "max_tokens": 14}
    answer = chat(client, model, **options).choices[0]
    streamed, _ = add_up(chat(client, model, stream=True, **options))
    assert answer.finish_reason == streamed[0]["reason"] == "length"
    whole = [call.function.arguments for call in answer.message.tool_calls or []]
    assert [call[2] for call in streamed[0]["calls"]] == whole


def test_tools_that_need_not_be_called(client, model):
    result = {"role": "tool", "tool_call_id": "c1", "content": "Sunny"}
    called = {
        "role": "assistant", "content": None, "tool_calls": [
            {"id": "c1", "type": "function",
             "function": {"name": "weather", "arguments": '{"city": "Paris"}'}},
        ],
    }
    for tool_choice in ("auto", "none"):
        answer = chat(client, model, messages=[*QUESTION, called, result],
                      tools=[WEATHER, CLOCK], tool_choice=tool_choice)
        message = answer.choices[0].message
        assert message.content or message.tool_calls


def test_the_last_message_goes_on(client, model):
    messages = [*QUESTION, {"role": "assistant", "content": "The weather in Paris is"}]
    body = {"continue_final_message": True, "add_generation_prompt": False}
    answer = chat(client, model, messages=messages, extra_body=body)
    assert answer.choices[0].message.content.startswith(" ")


def test_a_model_without_thoughts_keeps_to_any_budget(client, model):
    plain, held = (chat(client, model, extra_body=body).choices[0].message.content
                   for body in ({}, {"thinking_token_budget": 0}))
    assert held == plain


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [WEATHER], "tool_choice": "perhaps"}, "tool_choice"),
        ({"reasoning_effort": "high"}, "reasoning_effort"),
        ({"store": True}, "store"),
        ({"modalities": ["audio"]}, "modalities"),
        ({"extra_body": {"enable_thinking": True}}, "enable_thinking"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_chats_refuse(client, model, fields, named):
    with pytest.raises(BadRequestError) as refused:
        chat(client, model, **fields)
    assert refused.value.param == named


def flat(tool):
    return {"type": "function", "strict": False} | tool["function"]


def respond(client, model, **options):
    options = {"input": "Name a colour.", "temperature": 0, "max_output_tokens": 12} | options
    return client.responses.create(model=model, **options)


def test_responses(server, client, model):
    answer = respond(client, model, instructions="Be brief.", metadata={"a": "b"}, store=False)
    assert answer.output_text and answer.output[0].role == "assistant"
    assert (answer.metadata, answer.store, answer.error) == ({"a": "b"}, False, None)
    messages = [{"role": "system", "content": "Be brief."},
                {"role": "user", "content": "Name a colour."}]
    count = server.post("/tokenize", {"messages": messages})[2]["count"]
    assert answer.usage.input_tokens == count
    same = chat(client, model, messages=messages, max_tokens=12)
    assert same.choices[0].message.content == answer.output_text
    assert same.usage.completion_tokens == answer.usage.output_tokens
    cut = respond(client, model, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_responses_in_events(client, model):
    whole = respond(client, model, input=[{"role": "user", "content": "Name a colour."}])
    with client.responses.stream(
        model=model, input="Name a colour.", temperature=0, max_output_tokens=12
    ) as stream:
        events = list(stream)
    assert events[0].type == "response.created"
    assert events[-1].type in ("response.completed", "response.incomplete")
    final = events[-1].response
    text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
    assert text == whole.output_text == final.output_text
    assert final.usage.output_tokens == whole.usage.output_tokens


def test_tools_of_responses(client, model):
    options = {"tools": [flat(WEATHER)], "tool_choice": "required", "max_output_tokens": 120,
               "parallel_tool_calls": False}
    (call,) = respond(client, model, **options).output
    assert (call.type, call.name) == ("function_call", "weather")
    assert list(json.loads(call.arguments)) == ["city"]
    events = list(respond(client, model, stream=True, **options))
    deltas = [e.delta for e in events if e.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments
    said = [{"role": "user", "content": "Weather?"}, call.model_dump(exclude_none=True),
            {"type": "function_call_output", "call_id": call.call_id, "output": "Sunny"}]
    assert respond(client, model, input=said).output_text


class Colour(BaseModel):
    name: Literal["red", "green", "blue"]
    parts: conlist(conint(ge=0, le=255), min_length=3, max_length=3)


def test_responses_of_a_format(client, model):
    """The client makes the schema of a type, and checks what comes with that type."""
    options = {"model": model, "input": "Name a colour.", "temperature": 0}
    whole = client.responses.parse(text_format=Colour, **options)
    assert isinstance(whole.output_parsed, Colour)
    assert whole.text.format.type == "json_schema" and whole.text.format.name == "Colour"
    with client.responses.stream(text_format=Colour, **options) as stream:
        text = "".join(e.delta for e in stream if e.type == "response.output_text.delta")
        assert stream.get_final_response().output_parsed == whole.output_parsed
    assert text == whole.output_text
    schema = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"],
              "additionalProperties": False}
    asked = {"format": {"type": "json_schema", "name": "it", "schema": schema}}
    jsonschema.validate(json.loads(respond(client, model, text=asked).output_text), schema)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"text": {"format": {"type": "json_schema", "name": "it", "schema": {"not": {}}}}},
         "text.format.schema"),
        ({"text": {"verbosity": "high"}}, "text.verbosity"),
        ({"store": True}, "store"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"background": True}, "background"),
        ({"tools": [{"type": "web_search"}]}, "tools[0].type"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_responses_refuse(client, model, fields, named):
    with pytest.raises(BadRequestError) as refused:
        respond(client, model, **fields)
    assert refused.value.param == named


def test_embeddings(client, model):
    texts = ["A cat sat on the mat.", "A kitten sits on a rug.", "Interest rates rose again."]
    answer = client.embeddings.create(model=model, input=texts, encoding_format="float")
    vectors = [entry.embedding for entry in answer.data]
    assert [len(vector) for vector in vectors] == [576] * 3
    assert all(abs(sum(x * x for x in vector) - 1) < 1e-4 for vector in vectors)
    # The official client asks for base64 by itself and decodes it.
    coded = client.embeddings.create(model=model, input=texts)
    for vector, entry in zip(vectors, coded.data):
        assert entry.embedding == pytest.approx(vector, abs=1e-6)
    # One at a time, and as tokens: the same vectors, since nobody's depends on the others.
    alone = client.embeddings.create(model=model, input=texts[1], encoding_format="float")
    assert alone.data[0].embedding == pytest.approx(vectors[1], abs=1e-5)
    ids = client.embeddings.create(model=model, input=[PROMPT_IDS], encoding_format="float")
    same = client.embeddings.create(model=model, input=PROMPT, encoding_format="float")
    assert ids.data[0].embedding == pytest.approx(same.data[0].embedding, abs=1e-5)
    assert ids.usage.prompt_tokens == ids.usage.total_tokens == len(PROMPT_IDS)


def test_the_first_dimensions_of_an_embedding(client, model):
    def embedding(**options):
        answer = client.embeddings.create(model=model, input="A cat sat on the mat.", **options)
        return answer.data[0].embedding

    whole, short = embedding(), embedding(dimensions=64)
    length = math.sqrt(sum(x * x for x in whole[:64]))
    assert short == pytest.approx([x / length for x in whole[:64]], abs=1e-5)


def test_the_mean_as_an_embedding():
    """The mean of two states is a positive sum of those of prompts that end there."""
    def dot(a, b):
        return sum(x * y for x, y in zip(a, b))

    def embedding(server, ids):
        answer = server.post("/v1/embeddings", {"input": [ids]})[2]
        return answer["data"][0]["embedding"]

    with Server(TINY_MODEL) as last:
        first, second = (embedding(last, ids) for ids in ([65], [65, 90]))
    with Server(TINY_MODEL, "--pooling", "mean") as server:
        assert embedding(server, [65]) == pytest.approx(first, abs=1e-5)
        mean = embedding(server, [65, 90])
    # The mean's part in the plane of both, by their Gram matrix, is all of it.
    c = dot(first, second)
    assert c < 0.999
    shares = [(dot(mean, a) - c * dot(mean, b)) / (1 - c * c)
              for a, b in ((first, second), (second, first))]
    assert min(shares) > 0.1
    assert mean == pytest.approx([shares[0] * x + shares[1] * y for x, y in zip(first, second)],
                                 abs=1e-4)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"input": ""}, "input"),
        ({"input": []}, "input"),
        ({"input": [10_000_000]}, "input"),
        ({"input": "a", "dimensions": 0}, "dimensions"),
        ({"input": "a", "dimensions": 577}, "dimensions"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format"),
    ],
)
def test_what_embeddings_refuse(client, model, fields, named):
    with pytest.raises(BadRequestError) as refused:
        client.embeddings.create(model=model, **fields)
    assert refused.value.param.startswith(named)


def test_health(server):
    for path in ("/health", "/health/live", "/health/ready", "/version"):
        assert server.request("GET", path)[0] == 200

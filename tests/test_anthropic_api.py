"""Anthropic's messages, by the official client, whole and streamed."""

import pytest

from anthropic import APIStatusError, BadRequestError, NotFoundError

QUESTION = [{"role": "user", "content": "Name a colour."}]
WEATHER = {
    "name": "weather",
    "description": "Tells the weather of a city",
    "input_schema": {
        "type": "object",
        "properties": {"city": {"type": "string", "maxLength": 12}},
        "required": ["city"],
        "additionalProperties": False,
    },
}


def fields(options):
    """The client has no argument for the temperature any more; the API has the field."""
    body = {"temperature": 0} | options.pop("extra_body", {})
    return {"messages": QUESTION, "max_tokens": 12, "extra_body": body} | options


def ask(anthropic, model, **options):
    return anthropic.messages.create(model=model, **fields(options))


def stream(anthropic, model, **options):
    """The final message that the client makes of a stream, and the text that it saw go by."""
    with anthropic.messages.stream(model=model, **fields(options)) as events:
        text = "".join(events.text_stream)
        return events.get_final_message(), text


def said(message):
    return [block.model_dump(exclude={"id", "citations"}) for block in message.content]


def test_messages_whole_and_streamed(server, client, anthropic, model):
    system = [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}]
    whole = ask(anthropic, model, system=system, metadata={"user_id": "ann"})
    assert whole.stop_reason in ("end_turn", "max_tokens") and whole.role == "assistant"
    messages = [{"role": "system", "content": "Be brief."}, *QUESTION]
    same = client.chat.completions.create(
        model=model, messages=messages, max_tokens=12, temperature=0
    )
    assert whole.content[0].text == same.choices[0].message.content
    usage = whole.usage
    prompt_tokens = usage.input_tokens + usage.cache_read_input_tokens
    assert prompt_tokens == same.usage.prompt_tokens
    assert usage.output_tokens == same.usage.completion_tokens
    streamed, text = stream(anthropic, model, system=system)
    assert said(streamed) == said(whole) and text == whole.content[0].text
    assert streamed.stop_reason == whole.stop_reason
    assert streamed.usage.output_tokens == whole.usage.output_tokens
    count = anthropic.messages.count_tokens(model=model, messages=QUESTION, system=system)
    assert count.input_tokens == prompt_tokens


def test_stop_sequences(anthropic, model):
    text = ask(anthropic, model).content[0].text
    stop = text[3:5]
    options = {"stop_sequences": ["no such text", stop]}
    for message in (ask(anthropic, model, **options), stream(anthropic, model, **options)[0]):
        assert (message.stop_reason, message.stop_sequence) == ("stop_sequence", stop)
        assert "".join(block.text for block in message.content) == text[: text.index(stop)]


def test_an_answer_that_was_begun(anthropic, model):
    begun = [*QUESTION, {"role": "assistant", "content": "My favourite colour is"}]
    assert ask(anthropic, model, messages=begun).content[0].text.startswith(" ")


@pytest.mark.parametrize("choice", [{"type": "any"}, {"type": "tool", "name": "weather"}])
def test_forced_tools(anthropic, model, choice):
    choice = choice | {"disable_parallel_tool_use": True}
    options = {"tools": [WEATHER], "tool_choice": choice, "max_tokens": 120}
    whole = ask(anthropic, model, **options)
    streamed, _ = stream(anthropic, model, **options)
    assert whole.stop_reason == streamed.stop_reason == "tool_use"
    assert said(streamed) == said(whole)
    (block,) = whole.content
    assert (block.type, block.name, list(block.input)) == ("tool_use", "weather", ["city"])
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Sunny"}
    turns = [*QUESTION, {"role": "assistant", "content": [block.model_dump(include={
        "type", "id", "name", "input"})]}, {"role": "user", "content": [result]}]
    answer = ask(anthropic, model, messages=turns, tools=[WEATHER], tool_choice={"type": "none"})
    assert answer.content


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"messages": []}, "messages"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": 10_000_000}, "max_tokens"),
        ({"tools": [WEATHER], "tool_choice": {"type": "tool", "name": "clock"}}, "tool_choice"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "image"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_is_refused(anthropic, model, wrong, named):
    with pytest.raises(BadRequestError) as refused:
        ask(anthropic, model, **wrong)
    error = refused.value.body["error"]
    assert error["type"] == "invalid_request_error" and named in error["message"]


def test_other_errors(anthropic):
    with pytest.raises(NotFoundError) as unknown:
        ask(anthropic, "nobody's")
    assert unknown.value.body["error"]["type"] == "not_found_error"
    assert isinstance(unknown.value, APIStatusError)

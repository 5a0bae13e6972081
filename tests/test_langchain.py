"""LangChain's client, which reads more of the API's shapes than the official one needs."""

from typing import Literal

import pytest
from langchain_core.messages import AIMessageChunk, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import tool
from langchain_openai import ChatOpenAI


@tool
def weather(city: Literal["Paris", "Rome"]) -> str:
    """Tells the weather of a city."""
    return f"Sunny in {city}"


@pytest.fixture(scope="module", params=[False, True], ids=["chat", "responses"])
def llm(request, server, model):
    return ChatOpenAI(
        model=model, base_url=f"{server.url}/v1", api_key="unused", max_retries=0, timeout=300,
        temperature=0, max_tokens=60, use_responses_api=request.param, stream_usage=True,
    )


def test_answers_whole_and_streamed(llm):
    messages = [SystemMessage("Be brief."), HumanMessage("Name a colour.")]
    whole = llm.invoke(messages)
    total = AIMessageChunk(content="")
    for chunk in llm.stream(messages):
        total = total + chunk
    assert total.text and total.text == whole.text
    assert total.usage_metadata["output_tokens"] == whole.usage_metadata["output_tokens"]
    assert total.usage_metadata["input_tokens"] == whole.usage_metadata["input_tokens"]


def test_tools(llm):
    forced = llm.bind_tools([weather], tool_choice="required", parallel_tool_calls=False)
    question = HumanMessage("What is the weather in Paris?")
    answer = forced.invoke([question], max_tokens=200)
    (call,) = answer.tool_calls
    assert call["name"] == "weather" and call["args"]["city"] in ("Paris", "Rome")
    total = AIMessageChunk(content="")
    for chunk in forced.stream([question], max_tokens=200):
        total = total + chunk
    assert total.tool_calls[0]["args"] == call["args"]
    result = ToolMessage(weather.invoke({"city": "Paris"}), tool_call_id=call["id"])
    assert llm.bind_tools([weather], tool_choice="none").invoke([question, answer, result]).text

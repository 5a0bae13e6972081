"""Requests that keep only a part in the KV cache."""

import pytest
from inflight import TINY_MODEL, Server

STORY = "Once upon a time there was a lighthouse keeper who counted the waves. " * 12


def complete(client, model, kv_cache, **options):
    body = {"kv_cache": kv_cache, "ignore_eos": True}
    if kv_cache is None:
        del body["kv_cache"]
    options = {"prompt": STORY, "max_tokens": 40, "temperature": 0, **options}
    return client.completions.create(model=model, extra_body=body, **options)


@pytest.mark.parametrize("kv_cache", [{"window": 1024}, {"budget": 1024}, {"window": 0}])
def test_what_holds_everything_changes_nothing(client, model, kv_cache):
    plain = complete(client, model, None).choices[0].text
    assert complete(client, model, kv_cache).choices[0].text == plain


@pytest.mark.parametrize("kv_cache", [{"sinks": 4, "window": 64}, {"budget": 64}])
def test_less_than_the_prompt_is_kept(client, model, kv_cache):
    answers = [complete(client, model, kv_cache, n=2, max_tokens=200) for _ in range(2)]
    texts = [choice.text for answer in answers for choice in answer.choices]
    assert len(set(texts)) == 1, "greedy, whatever was found of the prompt"
    assert all(answer.usage.completion_tokens == 400 for answer in answers)


@pytest.mark.parametrize(
    "kv_cache",
    [{}, {"sinks": 4}, {"window": 64, "budget": 64}, {"budget": 40}, {"window": 1 << 40}],
)
def test_what_cannot_work_is_refused(server, model, kv_cache):
    body = {"model": model, "prompt": "Hi", "max_tokens": 1, "kv_cache": kv_cache}
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "kv_cache", answer


def test_checksums_change_nothing(tiny):
    """Blocks that are found again, and those that come back from the host."""
    body = {"prompt": "A beginning that is the same each time. ", "max_tokens": 40}
    _, _, expected = tiny.request("POST", "/v1/completions", {**body, "temperature": 0})
    flags = ["--kv-checksums", "--kv-cache-tokens", "512", "--host-cache", "0.1"]
    with Server(TINY_MODEL, *flags) as checked:
        for _ in range(3):
            _, _, answer = checked.request("POST", "/v1/completions", {**body, "temperature": 0})
            assert answer["choices"][0]["text"] == expected["choices"][0]["text"]

"""What was computed before is not computed again, and nobody finds out what others asked."""

import pytest

# Ten tokens each for the default model's tokenizer would do; many more make many full blocks.
STORY = "Once upon a time there was a lighthouse keeper who counted the waves. " * 12


def cached(usage):
    return usage.prompt_tokens_details.cached_tokens


@pytest.mark.parametrize("stream", [False, True])
def test_a_repeated_prompt_is_found(client, model, stream):
    prompt = f"{stream} {STORY}"

    def ask():
        options = {"stream_options": {"include_usage": True}} if stream else {}
        answer = client.completions.create(
            model=model, prompt=prompt, max_tokens=4, temperature=0, stream=stream, **options
        )
        if not stream:
            return answer.choices[0].text, answer.usage
        chunks = list(answer)
        text = "".join(choice.text for chunk in chunks for choice in chunk.choices)
        return text, chunks[-1].usage

    (first, before), (second, after) = ask(), ask()
    assert first == second
    assert cached(before) == 0
    # All full blocks of 16 but the one with the last token, which is always computed.
    assert cached(after) == (after.prompt_tokens - 1) // 16 * 16 > 100


def test_a_chat_goes_on_where_it_was(client, model):
    messages = [{"role": "user", "content": f"Chat: {STORY}"}]

    def ask():
        return client.chat.completions.create(
            model=model, messages=messages, max_tokens=20, temperature=0
        )

    first = ask()
    assert cached(first.usage) < first.usage.prompt_tokens // 2
    messages.append({"role": "assistant", "content": first.choices[0].message.content})
    messages.append({"role": "user", "content": "And then?"})
    second = ask()
    assert cached(second.usage) >= (first.usage.prompt_tokens - 1) // 16 * 16


def test_salts_keep_apart(client, model):
    def ask(salt):
        body = {"cache_salt": salt} if salt else {}
        return client.completions.create(
            model=model, prompt=f"Salt: {STORY}", max_tokens=4, temperature=0, extra_body=body
        )

    answers = {salt: [ask(salt), ask(salt)] for salt in (None, "ours", "theirs")}
    texts = {answer.choices[0].text for pair in answers.values() for answer in pair}
    assert len(texts) == 1, "what is said does not depend on who asks"
    for salt, (before, after) in answers.items():
        assert cached(before.usage) == 0, f"{salt} found what others had asked"
        assert cached(after.usage) > 100


def test_an_empty_salt_is_refused(server, model):
    body = {"model": model, "prompt": "Hi", "max_tokens": 1, "cache_salt": ""}
    status, _, answer = server.request("POST", "/v1/completions", body)
    assert status == 400 and answer["error"]["param"] == "cache_salt"


def test_outputs_share_the_prompt(client, model):
    options = {"max_tokens": 6, "temperature": 1, "logprobs": 1}
    prompt = f"Outputs: {STORY}"
    whole = client.completions.create(model=model, prompt=prompt, n=4, seed=5, **options)
    assert cached(whole.usage) == 0, "counted once, and for the first output"
    alone = [
        client.completions.create(model=model, prompt=prompt, seed=5 + i, **options).choices[0]
        for i in range(4)
    ]
    assert [choice.text for choice in whole.choices] == [choice.text for choice in alone]
    for together, apart in zip(whole.choices, alone):
        assert together.logprobs.token_logprobs == apart.logprobs.token_logprobs

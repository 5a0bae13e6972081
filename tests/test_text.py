"""What is said, by the official client: text, streams, stop strings, usage, log-probabilities."""

import pytest

# llama.cpp begins its answer with "1. The ocean is a vast, interconnected body of saltwater".
QUESTION = [{"role": "user", "content": "List 10 facts about the ocean, numbered."}]
PROMPT = "The capital of France is"


def chat(client, model, **options):
    options = {"messages": QUESTION, "temperature": 0, "max_tokens": 24} | options
    return client.chat.completions.create(model=model, **options)


def complete(client, model, **options):
    options = {"prompt": PROMPT, "temperature": 0, "max_tokens": 24} | options
    return client.completions.create(model=model, **options)


def streamed(chunks):
    """Text, finish reason and usage of a stream; exactly one choice tells how it finished."""
    text, reasons, usage = "", [], None
    for chunk in chunks:
        usage = chunk.usage or usage
        for choice in chunk.choices:
            delta = choice.delta.content if hasattr(choice, "delta") else choice.text
            text += delta or ""
            if choice.finish_reason:
                reasons.append(choice.finish_reason)
    assert len(reasons) == 1
    return text, reasons[0], usage


def test_sensible_answers(client, model):
    answer = chat(client, model).choices[0].message.content
    assert answer.startswith("1.") and "ocean" in answer
    # llama.cpp leads here by a margin of 2.5 in log-probability, so numerics cannot decide it.
    assert complete(client, model, max_tokens=1).choices[0].text == " Paris"


@pytest.mark.parametrize("options", [{}, {"temperature": 1, "seed": 7}, {"stop": ["of"]}])
def test_a_stream_adds_up_to_the_whole(client, model, options):
    for ask, text_of in (
        (chat, lambda choice: choice.message.content),
        (complete, lambda choice: choice.text),
    ):
        whole = ask(client, model, **options)
        text, reason, _ = streamed(ask(client, model, stream=True, **options))
        assert text == text_of(whole.choices[0])
        assert reason == whole.choices[0].finish_reason


def test_usage_counts_tokens(client, model):
    whole = complete(client, model, max_tokens=5)
    assert whole.choices[0].finish_reason == "length"
    # Five prompt tokens by llama.cpp's count of the same text.
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (5, 5)
    assert whole.usage.total_tokens == 10
    options = {"stream": True, "max_tokens": 5, "stream_options": {"include_usage": True}}
    _, _, usage = streamed(complete(client, model, **options))
    assert usage.completion_tokens == 5
    _, _, usage = streamed(complete(client, model, stream=True, max_tokens=5))
    assert usage is None


def test_stop_strings_do_not_show(client, model):
    # "Paris" is one token: a stop string may begin and end inside of it.
    for stop in ("Paris", "ar", ".\n", " Par"):
        whole = complete(client, model, stop=[stop])
        text, reason, _ = streamed(complete(client, model, stop=[stop], stream=True))
        assert (text, reason) == (whole.choices[0].text, "stop")
        unstopped = complete(client, model).choices[0].text
        assert text == unstopped[: unstopped.index(stop)]


def test_seeds(client, model):
    def say(seed):
        whole = complete(client, model, temperature=1.2, seed=seed, max_tokens=16)
        return whole.choices[0].text

    assert say(1) == say(1)
    assert len({say(seed) for seed in range(6)}) > 1


def test_penalties_and_bias_change_what_is_said(client, model):
    plain = complete(client, model, max_tokens=48).choices[0].text
    penalised = complete(client, model, max_tokens=48, frequency_penalty=2).choices[0].text
    assert penalised != plain
    # 7042 is " Paris" in this vocabulary.
    biased = complete(client, model, max_tokens=1, logit_bias={"7042": -100}).choices[0].text
    assert biased != " Paris"
    forced = complete(client, model, max_tokens=3, logit_bias={"7042": 100}).choices[0].text
    assert forced == " Paris Paris Paris"


def test_log_probabilities(client, model):
    answer = chat(client, model, logprobs=True, top_logprobs=3, max_tokens=4).choices[0]
    content = answer.logprobs.content
    assert "".join(entry.token for entry in content) == answer.message.content
    for entry in content:
        assert entry.logprob <= 0
        top = [candidate.logprob for candidate in entry.top_logprobs]
        assert len(top) == 3 and top == sorted(top, reverse=True)
        # Greedy: the token said is the first of the top.
        assert entry.token == entry.top_logprobs[0].token
        assert entry.logprob == pytest.approx(top[0])


def test_log_probability_of_a_completion(client, model):
    logprobs = complete(client, model, logprobs=2, max_tokens=1).choices[0].logprobs
    assert logprobs.tokens == [" Paris"]
    # llama.cpp says -0.241; its own kernels differ by up to 0.28 among themselves on this model.
    assert logprobs.token_logprobs[0] == pytest.approx(-0.241, abs=0.35)
    assert len(logprobs.top_logprobs[0]) == 2


def test_prompts_as_token_ids(client, model):
    ids = [504, 3575, 282, 4649, 314]  # PROMPT, by llama.cpp
    by_ids, by_text = (complete(client, model, prompt=prompt) for prompt in (ids, PROMPT))
    assert by_ids.choices[0].text == by_text.choices[0].text

"""Many at once: nobody's text depends on who else is served, on overlap, or on who hangs up."""

import random
from concurrent.futures import ThreadPoolExecutor

import pytest
from inflight import TINY_MODEL, Server, default_model

NUM_REQUESTS = 64
SUBJECTS = ("the sea", "a small dog", "bread", "winter", "the number nine", "a lost key", "Rome")


def mixed_requests(max_tokens):
    """Greedy, sampled and penalised ones of many lengths, the same in every run."""
    draws = random.Random(20260711)
    kinds = (
        {"temperature": 0},
        {"temperature": 1.0},
        {"temperature": 0.8, "top_p": 0.9},
        {"temperature": 0, "frequency_penalty": 0.7, "presence_penalty": 0.3},
        {"temperature": 1.1, "extra_body": {"top_k": 40, "min_p": 0.02}},
        {"temperature": 0.9, "extra_body": {"repetition_penalty": 1.2}},
        {"temperature": 0, "logit_bias": {"40": 4}},
    )
    return [
        kinds[i % len(kinds)]
        | {
            "prompt": f"Tell {i} about {draws.choice(SUBJECTS)}" + " and more" * draws.randrange(4),
            "max_tokens": draws.randrange(1, max_tokens),
            "seed": i,
        }
        for i in range(NUM_REQUESTS)
    ]


def say(client, model, request):
    chunks = client.completions.create(model=model, stream=True, **request)
    return "".join(choice.text for chunk in chunks for choice in chunk.choices)


def say_all(server, requests, num_threads):
    client = server.client()
    model = client.models.list().data[0].id
    with ThreadPoolExecutor(num_threads) as pool:
        return list(pool.map(lambda request: say(client, model, request), requests))


def test_together_as_one_at_a_time(server):
    requests = mixed_requests(max_tokens=20)
    together = say_all(server, requests, NUM_REQUESTS)
    assert together == say_all(server, requests, 1)


@pytest.mark.parametrize("name", ["tiny", "default"])
def test_overlap_changes_no_token(name):
    path, max_tokens = (TINY_MODEL, 60) if name == "tiny" else (default_model(), 20)
    requests = mixed_requests(max_tokens)
    said = {}
    for overlap in ("on", "off"):
        with Server(path, "--overlap", overlap) as running:
            said[overlap] = say_all(running, requests, NUM_REQUESTS)
    assert said["on"] == said["off"]


def test_hanging_up_disturbs_nobody(tiny):
    """Clients that leave at any moment, among others that stay."""
    client = tiny.client()
    model = client.models.list().data[0].id
    request = {"prompt": "the dog", "temperature": 1, "seed": 3, "max_tokens": 60}
    alone = say(client, model, request)

    def leave(i):
        chunks = client.completions.create(
            model=model, prompt=f"ship {i}", max_tokens=100, stream=True, temperature=1, seed=i
        )
        for _, _chunk in zip(range(i % 7), chunks):
            pass
        chunks.close()
        return None

    tasks = [leave if i % 4 else None for i in range(400)]
    with ThreadPoolExecutor(32) as pool:
        outcomes = pool.map(
            lambda job: job[1](job[0]) if job[1] else say(client, model, request),
            enumerate(tasks),
        )
        stayed = [text for text in outcomes if text is not None]
    assert stayed == [alone] * 100


def test_hanging_up_frees_the_place():
    """With one place only, the next request is answered only if the one before is really gone."""
    with Server(default_model(), "--max-num-seqs", "1") as running:
        client = running.client()
        model = client.models.list().data[0].id
        # Token 2 ends a text in this vocabulary; without it this request goes on to the limit.
        endless = {"prompt": "One, two,", "max_tokens": 4000, "logit_bias": {"2": -100}}
        chunks = client.completions.create(model=model, stream=True, **endless)
        next(iter(chunks))
        chunks.close()
        impatient = client.with_options(timeout=30)
        short = impatient.completions.create(model=model, prompt="One", max_tokens=2)
        assert short.usage.completion_tokens == 2

"""A stream adds up to the whole, for random bytes and random stop strings.

The model is random over a vocabulary of bytes, so its outputs are random bytes: characters that are
cut, invalid ones, anything. Stop strings are drawn from the outputs themselves, so that they occur.
"""

import json
import random
from concurrent.futures import ThreadPoolExecutor

NUM_CASES = 60
PATH = "/v1/completions"


def events(server, body):
    text = server.post(PATH, body | {"stream": True, "stream_options": {"include_usage": True}})[2]
    lines = [line.removeprefix("data: ") for line in text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def add_up(chunks):
    """Texts and endings by index, and the usage."""
    texts, endings = {}, {}
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]
    for chunk in chunks:
        (choice,) = chunk["choices"]
        index = choice["index"]
        assert index not in endings, "nothing follows the end"
        texts[index] = texts.get(index, "") + choice["text"]
        if choice["finish_reason"]:
            endings[index] = (choice["finish_reason"], choice.get("stop_reason"))
    return texts, endings, last["usage"]


def draw_stops(draws, text):
    """Pieces of the text, their variations, and noise."""
    stops = []
    for _ in range(draws.randrange(1, 5)):
        start = draws.randrange(len(text))
        piece = text[start : start + draws.randrange(1, 6)]
        if draws.random() < 0.3:
            piece += draws.choice("ab\ufffd\n")
        stops.append(piece)
    return stops


def expected(text, stops):
    """The text up to the stop that ends first; of those the longest. Straight from the rule."""
    for end in range(1, len(text) + 1):
        met = [stop for stop in stops if text[:end].endswith(stop)]
        if met:
            longest = max(met, key=len)
            return text[: end - len(longest)], longest
    return text, None


def check(server, seed):
    draws = random.Random(seed)
    body = {
        "prompt": [draws.randrange(1, 200) for _ in range(4)], "seed": seed, "temperature": 1.5,
        "max_tokens": draws.randrange(8, 80), "ignore_eos": True, "skip_special_tokens": False,
    }
    plain = server.post(PATH, body)[2]["choices"][0]["text"]
    if not plain:
        return
    stops = draw_stops(draws, plain)
    whole = server.post(PATH, body | {"stop": stops})[2]
    text, stop = expected(plain, stops)
    choice = whole["choices"][0]
    assert choice["text"] == text, (seed, plain, stops)
    assert choice["finish_reason"] == ("stop" if stop else "length")
    assert choice.get("stop_reason") == stop
    texts, endings, usage = add_up(events(server, body | {"stop": stops}))
    assert texts == {0: text}
    assert endings == {0: (choice["finish_reason"], stop)}
    assert usage == whole["usage"]


def test_random_bytes_and_stops(tiny):
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda seed: check(tiny, seed), range(NUM_CASES)))


def test_outputs_that_end_at_different_places(tiny):
    body = {"prompt": "the dog", "n": 6, "seed": 9, "temperature": 1.5, "max_tokens": 60,
            "ignore_eos": True}
    plain = [choice["text"] for choice in tiny.post(PATH, body)[2]["choices"]]
    # One output ends early by a piece of its own, the others wherever they come upon it.
    stops = [plain[2][5:7], plain[4][20:22]]
    texts, endings, usage = add_up(events(tiny, body | {"stop": stops}))
    whole = tiny.post(PATH, body | {"stop": stops})[2]
    for index, text in enumerate(plain):
        said, stop = expected(text, stops)
        assert texts[index] == said == whole["choices"][index]["text"]
        assert endings[index] == ("stop" if stop else "length", stop)
    assert len({len(text) for text in texts.values()}) > 1
    assert usage == whole["usage"]

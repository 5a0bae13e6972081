"""What is refused, and how: a 4xx that names the field, and a server that goes on."""

import json

import pytest

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
MESSAGES = [{"role": "user", "content": "hi"}]
TINY_CONTEXT = 128


def assert_refused(answer, field):
    """OpenAI's shape of an error, with the field in `param` or at least in the message."""
    status, _, body = answer
    assert 400 <= status < 500, (status, body)
    error = body["error"]
    assert error["message"] and error["type"]
    assert field is None or field in (error.get("param") or "") or field in error["message"], error


def assert_answered_or_refused(answer, field):
    if answer[0] != 200:
        assert_refused(answer, field)


def completion(**fields):
    return {"model": "any", "prompt": "the dog", "max_tokens": 4} | fields


def chat(**fields):
    return {"model": "any", "messages": MESSAGES, "max_tokens": 4} | fields


@pytest.fixture(scope="module")
def post(tiny):
    """Posts with the served model's name in the place of `any`, and checks that life goes on."""
    name = tiny.request("GET", "/v1/models")[2]["data"][0]["id"]

    def send(path, body):
        if isinstance(body, dict) and body.get("model") == "any":
            body = body | {"model": name}
        answer = tiny.post(path, body)
        assert tiny.post(COMPLETIONS, completion(model=name))[0] == 200
        return answer

    return send


WRONG_FIELDS = [
    ("temperature", "hot"),
    ("temperature", -1),
    ("temperature", 1e9),
    ("top_p", 0),
    ("top_p", 1.5),
    ("max_tokens", -1),
    ("max_tokens", "many"),
    ("max_tokens", 1.5),
    ("n", 0),
    ("n", 100000),
    ("stop", 5),
    ("stop", ["x"] * 1000),
    ("seed", "lucky"),
    ("stream", "yes"),
    ("presence_penalty", 99),
    ("frequency_penalty", "a"),
    ("logit_bias", {"not a number": 1}),
    ("logit_bias", {"100000": 1}),
    ("logit_bias", {"1": 1000}),
    ("logit_bias", [1]),
]


@pytest.mark.parametrize(("field", "value"), WRONG_FIELDS)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_wrong_values(post, path, field, value):
    body = chat() if path == CHAT else completion()
    assert_refused(post(path, body | {field: value}), field)


@pytest.mark.parametrize(
    ("path", "body", "field"),
    [
        (CHAT, {"model": "any"}, "messages"),
        (CHAT, chat(messages=[]), "messages"),
        (CHAT, chat(messages="hi"), "messages"),
        (CHAT, chat(messages=[{"role": "user"}]), "content"),
        (CHAT, chat(messages=[{"content": "hi"}]), "role"),
        (CHAT, chat(top_logprobs=1000, logprobs=True), "top_logprobs"),
        (COMPLETIONS, {"model": "any"}, "prompt"),
        (COMPLETIONS, completion(prompt=5), "prompt"),
        (COMPLETIONS, completion(prompt=[-1]), "prompt"),
        (COMPLETIONS, completion(prompt=[1_000_000]), "prompt"),
        (COMPLETIONS, completion(logprobs=1000), "logprobs"),
    ],
)
def test_missing_and_malformed(post, path, body, field):
    assert_refused(post(path, body), field)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"null", b"\xff\xfe", b'{"model": "a",}'])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_what_is_no_request(tiny, path, raw):
    assert_refused(tiny.request("POST", path, raw=raw), None)


def test_deep_and_large_bodies(tiny):
    deep = b"[" * 100_000
    assert_refused(tiny.request("POST", COMPLETIONS, raw=deep), None)
    large = json.dumps(completion(prompt="a " * 1_000_000)).encode()
    assert_refused(tiny.request("POST", COMPLETIONS, raw=large), None)


def test_unknown_model(post):
    assert_refused(post(COMPLETIONS, completion(model="nobody's")), "model")


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_unknown_fields(post, path):
    body = chat() if path == CHAT else completion()
    assert_answered_or_refused(post(path, body | {"no_such_field": 1}), "no_such_field")


def test_unknown_path(tiny):
    assert tiny.request("GET", "/v1/nothing")[0] == 404
    assert tiny.request("GET", COMPLETIONS)[0] == 405


def test_absent_and_extreme_max_tokens(post):
    absent = completion()
    del absent["max_tokens"]
    assert post(COMPLETIONS, absent)[0] == 200
    status, _, body = post(COMPLETIONS, completion(max_tokens=1))
    assert status == 200 and body["usage"]["completion_tokens"] <= 1
    for value in (0, 2**31, 2**63, 2**70):
        answer = post(COMPLETIONS, completion(max_tokens=value))
        assert_answered_or_refused(answer, "max_tokens")
        if answer[0] == 200 and value == 0:
            assert answer[2]["usage"]["completion_tokens"] == 0


def test_empty_prompt(post):
    assert_answered_or_refused(post(COMPLETIONS, completion(prompt="")), "prompt")
    assert_answered_or_refused(post(COMPLETIONS, completion(prompt=[])), "prompt")
    assert post(CHAT, chat(messages=[{"role": "user", "content": ""}]))[0] == 200


@pytest.mark.parametrize("prompt_len", [1, TINY_CONTEXT - 2, TINY_CONTEXT - 1])
def test_prompts_up_to_the_limit(post, prompt_len):
    """A prompt that leaves room for a token is served, and gets no more than there is room for."""
    body = completion(prompt=[5] * prompt_len)
    del body["max_tokens"]
    status, _, answer = post(COMPLETIONS, body)
    assert status == 200, answer
    assert answer["usage"]["prompt_tokens"] == prompt_len
    assert 1 <= answer["usage"]["completion_tokens"] <= TINY_CONTEXT - prompt_len


@pytest.mark.parametrize("prompt_len", [TINY_CONTEXT + 1, 2 * TINY_CONTEXT, 50_000])
def test_prompts_beyond_the_limit(post, prompt_len):
    assert_refused(post(COMPLETIONS, completion(prompt=[5] * prompt_len)), "prompt")

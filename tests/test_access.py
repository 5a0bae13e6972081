"""Keys, limits, tenants, origins: who may ask the real server, through the clients they use."""

import hashlib

import anthropic
import openai
import pytest
from inflight import TINY_MODEL, Server, run

ADMIN, ANN, BOB = "sk-admin", "sk-ann", "sk-bob"


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    file = tmp_path_factory.mktemp("keys") / "keys"
    bobs = hashlib.sha256(BOB.encode()).hexdigest()
    file.write_text(f"# ours\n{ANN} name=ann\nsha256:{bobs} name=bob requests_per_minute=2\n")
    flags = ("--api-key", ADMIN, "--api-key-file", str(file))
    with Server(TINY_MODEL, *flags, "--cors-origin", "https://example.org") as running:
        yield running


def get(server, path, key=None):
    return server.request("GET", path, headers={"Authorization": f"Bearer {key}"} if key else {})


def test_clients_need_a_key(guarded):
    model = guarded.client(ANN).models.list().data[0].id
    answer = guarded.client(ANN).completions.create(model=model, prompt="a", max_tokens=2)
    assert answer.usage.completion_tokens <= 2
    with pytest.raises(openai.AuthenticationError) as error:
        guarded.client("sk-nobody").completions.create(model=model, prompt="a")
    assert error.value.code == "invalid_api_key" and "sk-nobody" not in error.value.message
    messages = [{"role": "user", "content": "a"}]
    said = guarded.anthropic(ANN).messages.create(model=model, messages=messages, max_tokens=2)
    assert said.usage.output_tokens <= 2
    with pytest.raises(anthropic.AuthenticationError) as error:
        guarded.anthropic("sk-nobody").messages.create(
            model=model, messages=messages, max_tokens=2
        )
    assert error.value.body["error"]["type"] == "authentication_error"


def test_limits_and_figures_of_tenants(guarded):
    client = guarded.client(BOB)
    model = client.models.list().data[0].id
    used = [
        client.completions.create(model=model, prompt=[5, 6, 7], max_tokens=2).usage
        for _ in range(2)
    ]
    with pytest.raises(openai.RateLimitError) as error:
        client.completions.create(model=model, prompt="a")
    assert 1 <= int(error.value.response.headers["retry-after"]) <= 30
    for path in ("/metrics", "/debug/state"):
        assert get(guarded, path, ANN)[0] == 403
    state = get(guarded, "/debug/state", ADMIN)[2]
    bob = next(key for key in state["keys"] if key["name"] == "bob")
    assert (bob["requests"], bob["refused"], bob["running"]) == (2, 1, 0)
    assert bob["prompt_tokens"] == sum(usage.prompt_tokens for usage in used)
    assert bob["generated_tokens"] == sum(usage.completion_tokens for usage in used)
    metrics = get(guarded, "/metrics", ADMIN)[2]
    assert 'tenant="bob"} 2\n' in metrics


def test_a_running_request_shows_its_tenant(guarded):
    client = guarded.client(ANN)
    model = client.models.list().data[0].id
    stream = client.completions.create(
        model=model, prompt=[5], max_tokens=100, n=100, stream=True, extra_body={"ignore_eos": True}
    )
    next(iter(stream))
    requests = get(guarded, "/debug/state", ADMIN)[2]["engine"]["requests"]
    stream.close()
    assert {request["tenant"] for request in requests} == {"ann"}


def test_what_needs_no_key(guarded):
    for path in ("/", "/health", "/health/live", "/health/ready", "/version", "/web/chat.js"):
        assert get(guarded, path)[0] == 200, path
    for path in ("/v1/models", "/metrics", "/debug/state", "/debug/timeline", "/no/such/path"):
        assert get(guarded, path)[0] == 401, path


def test_pages_of_other_origins(guarded):
    def asked(origin):
        preflight = {"Origin": origin, "Access-Control-Request-Method": "POST"}
        status, headers, _ = guarded.request("OPTIONS", "/v1/completions", headers=preflight)
        return status, headers.get("access-control-allow-origin")

    assert asked("https://example.org") == (204, "https://example.org")
    assert asked("https://example.com") == (401, None)


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--api-key", "two words"), "--api-key"),
        (("--api-key-file", "/no/such/file"), "--api-key-file"),
        (("--cors-origin", "example.org"), "--cors-origin"),
    ],
)
def test_wrong_flags_end_at_once(flags, named):
    code, _, stderr = run("serve", TINY_MODEL, "--port", "0", *flags)
    assert code != 0 and named in stderr and "two words" not in stderr


def test_a_body_over_the_limit():
    with Server(TINY_MODEL, "--max-body-size", "1") as running:
        answer = running.request("POST", "/v1/completions", raw=b'"' + b"a" * (1 << 20))
        assert answer[0] == 413, answer

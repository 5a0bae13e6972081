"""Who runs when: every policy gives the same answers, and whoever waits too long hears of it."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from inflight import TINY_MODEL, Server, run

COMPLETIONS = "/v1/completions"
POLICIES = (
    ("--batching", "static", "--static-batch-size", "3"),
    ("--mixing", "prefill-first"),
    ("--mixing", "decode-first", "--waiting-served-ratio", "1.2", "--max-waiting-tokens", "7"),
    ("--scheduling-policy", "priority", "--max-batch-total-tokens", "300"),
    ("--scheduling-policy", "fair", "--target-itl-ms", "5", "--target-ttft-ms", "50"),
    ("--max-batch-prefill-tokens", "5", "--overlap", "off"),
)


def request(i, **fields):
    prompt = [1 + (i * 7 + k) % 200 for k in range(3 + 5 * (i % 8))]
    body = {"prompt": prompt, "max_tokens": 5 + i % 20, "temperature": 0, "ignore_eos": True}
    return body | {"user": f"user {i % 3}"} | fields


def answers(server):
    def answer(i):
        status, _, body = server.post(COMPLETIONS, request(i))
        assert status == 200, body
        return body["choices"][0]["text"], body["usage"]["completion_tokens"]

    with ThreadPoolExecutor(24) as pool:
        return list(pool.map(answer, range(24)))


@pytest.fixture(scope="module")
def usual(tiny):
    return answers(tiny)


@pytest.mark.parametrize("flags", POLICIES, ids=" ".join)
def test_policies_change_no_answer(usual, flags):
    with Server(TINY_MODEL, *flags) as server:
        assert answers(server) == usual


def test_priorities_need_their_policy(tiny):
    status, _, body = tiny.post(COMPLETIONS, request(0, priority=1))
    assert status == 400 and body["error"]["param"] == "priority", body
    assert tiny.post(COMPLETIONS, request(0, priority=0))[0] == 200
    with Server(TINY_MODEL, "--scheduling-policy", "priority") as server:
        assert server.post(COMPLETIONS, request(0, priority=-3))[0] == 200


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_is_an_error(stream):
    """Of one sequence at a time, the second waits for a hundred tokens: more than a millisecond."""
    long = {"prompt": [5, 6, 7], "max_tokens": 100, "ignore_eos": True}
    with Server(TINY_MODEL, "--max-num-seqs", "1") as server, ThreadPoolExecutor(4) as pool:
        client = server.client()
        running = client.completions.create(
            model=client.models.list().data[0].id,
            prompt=long["prompt"],
            max_tokens=100,
            stream=True,
            extra_body={"ignore_eos": True},
        )
        next(iter(running))  # it has the only place, so nobody overtakes it
        first = [pool.submit(server.post, COMPLETIONS, long) for _ in range(3)]
        late = server.post(COMPLETIONS, long | {"timeout_ms": 1, "stream": stream})
        assert late[0] == 504 and late[2]["error"]["code"] == "deadline_exceeded", late
        for done in first:
            status, _, body = done.result()
            assert status == 200 and body["usage"]["completion_tokens"] == 100


def test_time_in_the_queue_is_bounded():
    long = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True}
    flags = ("--max-num-seqs", "1", "--max-queue-time-ms", "1")
    with Server(TINY_MODEL, *flags) as server, ThreadPoolExecutor(16) as pool:
        done = [pool.submit(server.post, COMPLETIONS, long) for _ in range(32)]
        replies = [one.result() for one in done]
    refused = [reply for reply in replies if reply[0] != 200]
    assert refused, "32 requests of 120 tokens, one after the other, waited for no millisecond"
    for status, headers, body in refused:
        assert status == 503 and body["error"]["code"] == "queue_timeout", body
        assert int(headers["Retry-After"]) >= 1


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--static-batch-size", "2"), "--static-batch-size"),
        (("--batching", "static", "--target-itl-ms", "9"), "--target-itl-ms"),
        (("--max-batch-total-tokens", "10"), "max_batch_total_tokens"),
        (("--waiting-served-ratio", "nan"), "--waiting-served-ratio"),
    ],
)
def test_flags_that_cannot_be(flags, named):
    code, _, stderr = run("serve", TINY_MODEL, "--port", "0", *flags)
    assert code != 0 and named in stderr, stderr

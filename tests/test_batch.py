"""`inflight batch`, killed without warning: all lines are answered, once, as they should be."""

import json
import subprocess
import time

from inflight import TINY_MODEL, binary, run

NUM_LINES = 1200
# Answers after which a run is killed: early enough that much is left to do.
KILLS = (50, 150, 250, 350)


def line(i):
    """Requests of all kinds; every tenth is none."""
    if i % 10 == 9:
        return json.dumps({"custom_id": f"c{i}", "method": "POST", "url": "/v1/completions",
                           "body": {"prompt": "a", "no_such_field": i}})
    body = {"max_tokens": 1 + i % 50, "temperature": 1, "seed": i}
    if i % 3 == 0:
        url, body = "/v1/chat/completions", body | {
            "messages": [{"role": "user", "content": f"Say {i}"}]}
    elif i % 3 == 1:
        url, body = "/v1/completions", body | {"prompt": f"{i} is"}
    else:
        url, body = "/v1/embeddings", {"input": f"number {i}"}
    return json.dumps({"custom_id": f"c{i}", "method": "POST", "url": url, "body": body})


def answers(path):
    """What each line was answered, without what changes from run to run."""
    found = {}
    for text in path.read_text().splitlines():
        answer = json.loads(text)
        assert answer["custom_id"] not in found, "a line is answered twice"
        body = answer["response"]["body"]
        for name in ("id", "created", "usage", "system_fingerprint"):
            body.pop(name, None)
        found[answer["custom_id"]] = (answer["response"]["status_code"], body)
    return found


def num_lines(path):
    return path.read_bytes().count(b"\n") if path.exists() else 0


def test_killed_runs_lose_and_repeat_nothing(tmp_path):
    questions, whole, killed = (tmp_path / name for name in ("in", "whole", "killed"))
    questions.write_text("".join(line(i) + "\n" for i in range(NUM_LINES)))
    command = ("batch", questions, "--model", TINY_MODEL, "-o")
    # All lines were answered, some with errors: that is no failure of the run.
    assert run(*command, whole)[0] == 0
    expected = answers(whole)
    assert len(expected) == NUM_LINES
    assert sum(status == 400 for status, _ in expected.values()) == NUM_LINES // 10

    survived = []
    for attempt, target in enumerate(KILLS):
        process = subprocess.Popen(
            [binary(), *map(str, command), str(killed)], stderr=subprocess.DEVNULL
        )
        while num_lines(killed) < target and process.poll() is None:
            time.sleep(0.001)
        assert process.poll() is None, "it was to be killed in the middle"
        process.kill()
        assert process.wait() == -9
        survived.append(num_lines(killed))
        assert survived[-1] < NUM_LINES, "nothing was left to do"
        before = killed.read_bytes()
        if attempt % 2:
            # As a system that fails leaves it: the last line is torn.
            killed.write_bytes(before[:-7])
    assert survived[0] > 0
    kept = killed.read_bytes()
    kept = kept[: kept.rindex(b"\n") + 1]
    code, _, told = run(*command, killed)
    assert code == 0, told
    assert killed.read_bytes().startswith(kept), "what was answered stays as it is"
    assert answers(killed) == expected
    # Once more: there is nothing left to do, and nothing is done.
    done = killed.read_bytes()
    assert run(*command, killed)[0] == 0
    assert killed.read_bytes() == done

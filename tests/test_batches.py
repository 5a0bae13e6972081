"""Files and batches, by the official client: `/v1/files`, `/v1/batches`."""

import json
import time

import pytest
from inflight import TINY_MODEL, Server
from openai import BadRequestError, NotFoundError

ENDPOINT = "/v1/completions"


@pytest.fixture(scope="module")
def keeping(tmp_path_factory):
    with Server(TINY_MODEL, "--files-dir", tmp_path_factory.mktemp("kept")) as running:
        yield running


@pytest.fixture(scope="module")
def client(keeping):
    return keeping.client()


def request(i, **fields):
    body = {"prompt": f"{i} is", "max_tokens": 1 + i % 40, "seed": i, "temperature": 1} | fields
    return {"custom_id": f"c{i}", "method": "POST", "url": ENDPOINT, "body": body}


def upload(client, requests, name="requests.jsonl"):
    lines = "".join(json.dumps(one) + "\n" for one in requests)
    return client.files.create(file=(name, lines.encode()), purpose="batch")


def begin(client, file, **fields):
    fields = {"endpoint": ENDPOINT, "completion_window": "24h"} | fields
    return client.batches.create(input_file_id=file.id, **fields)


def wait(client, batch, timeout_s=60):
    deadline = time.monotonic() + timeout_s
    while batch.status in ("validating", "in_progress", "finalizing", "cancelling"):
        assert time.monotonic() < deadline, batch
        time.sleep(0.02)
        batch = client.batches.retrieve(batch.id)
    return batch


def answers(client, file_id):
    """By `custom_id`; each only once."""
    if file_id is None:
        return {}
    lines = client.files.content(file_id).text.splitlines()
    found = {line["custom_id"]: line for line in map(json.loads, lines)}
    assert len(found) == len(lines)
    return found


def text_of(answer):
    return answer["response"]["body"]["choices"][0]["text"]


def test_files(client):
    data = b"".join(b'{"custom_id": "%d"}\n' % i for i in range(50_000))
    made = [client.files.create(file=(f"f{i}.jsonl", data), purpose="batch") for i in range(3)]
    assert made[0].bytes == len(data) and made[0].filename == "f0.jsonl"
    assert (made[0].object, made[0].purpose, made[0].status) == ("file", "batch", "processed")
    assert client.files.retrieve(made[0].id) == made[0]
    assert client.files.content(made[0].id).content == data
    ids = [file.id for file in made]
    listed = [file.id for file in client.files.list(limit=2, order="asc") if file.id in ids]
    assert listed == ids, "the client turns the pages"
    assert client.files.delete(ids[1]).deleted
    assert ids[1] not in [file.id for file in client.files.list(purpose="batch")]
    for missing in (ids[1], "file-none", "..%2Flock", "a%2F..%2Fb"):
        with pytest.raises(NotFoundError):
            client.files.retrieve(missing)


def test_a_batch(client):
    requests = [request(i) for i in range(60)] + [request(60, no_such_field=1)]
    batch = begin(client, upload(client, requests), metadata={"for": "ann"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", ENDPOINT)
    batch = wait(client, batch)
    assert (batch.status, batch.errors, batch.metadata) == ("completed", None, {"for": "ann"})
    counts = batch.request_counts
    assert (counts.total, counts.completed, counts.failed) == (61, 60, 1)
    assert batch.created_at <= batch.in_progress_at <= batch.finalizing_at <= batch.completed_at
    good, bad = answers(client, batch.output_file_id), answers(client, batch.error_file_id)
    assert sorted(good) == sorted(f"c{i}" for i in range(60)) and list(bad) == ["c60"]
    assert bad["c60"]["response"]["status_code"] == 400
    model = client.models.list().data[0].id
    for i in (3, 38):
        same = client.completions.create(model=model, **requests[i]["body"])
        assert text_of(good[f"c{i}"]) == same.choices[0].text
    assert client.files.retrieve(batch.output_file_id).purpose == "batch_output"
    assert batch.id in [one.id for one in client.batches.list(limit=1)]


@pytest.mark.parametrize(
    ("requests", "line", "code"),
    [
        ([request(0), request(1) | {"url": "/v1/embeddings"}], 2, "mismatched_url"),
        ([request(0), request(0)], 2, "duplicate_custom_id"),
        ([request(0) | {"method": "GET"}], 1, "invalid_request"),
        ([request(0, stream=True)], 1, "invalid_request"),
        (["no object"], 1, "invalid_line"),
    ],
)
def test_flaws_are_told_before_anything_is_asked(client, requests, line, code):
    batch = wait(client, begin(client, upload(client, requests)))
    assert batch.status == "failed" and batch.output_file_id is None
    (flaw,) = batch.errors.data
    assert (flaw.line, flaw.code) == (line, code) and flaw.message


def test_cancelling(client):
    # Requests that leave the tiny model's context no room take long only in number.
    file = upload(client, [request(i, max_tokens=90, n=4) for i in range(4000)])
    batch = begin(client, file)
    while batch.status == "validating" or batch.request_counts.completed == 0:
        batch = client.batches.retrieve(batch.id)
    with pytest.raises(BadRequestError):
        client.files.delete(file.id)
    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    batch = wait(client, batch)
    assert batch.status == "cancelled" and batch.cancelling_at <= batch.cancelled_at
    done = answers(client, batch.output_file_id)
    assert 0 < len(done) == batch.request_counts.completed < 4000
    with pytest.raises(BadRequestError):
        client.batches.cancel(batch.id)
    assert client.files.delete(file.id).deleted


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"endpoint": "/v1/messages"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"metadata": {"a": "b" * 513}}, "metadata"),
        ({"input_file_id": "file-none"}, "input_file_id"),
        ({"extra_body": {"no_such_field": 1}}, "no_such_field"),
    ],
)
def test_what_batches_refuse(client, fields, named):
    known = {"input_file_id": upload(client, [request(0)]).id, "endpoint": ENDPOINT,
             "completion_window": "24h"}
    with pytest.raises(BadRequestError) as refused:
        client.batches.create(**(known | fields))
    assert refused.value.param == named


def test_what_files_refuse(keeping, client):
    with pytest.raises(BadRequestError) as refused:
        client.files.create(file=("a", b"a"), purpose="fine-tune")
    assert refused.value.param == "purpose"
    with pytest.raises(BadRequestError) as refused:
        client.files.create(file=("a", b""), purpose="batch")
    assert refused.value.param == "file"
    assert keeping.request("GET", "/v1/files?limit=0")[0] == 400
    assert keeping.request("GET", "/v1/files?color=red")[0] == 400
    assert keeping.post("/v1/files", {"purpose": "batch"})[0] == 400


def test_batches_survive_their_server(tmp_path):
    requests = [request(i, max_tokens=60) for i in range(1500)]
    with Server(TINY_MODEL, "--files-dir", tmp_path) as first:
        client = first.client()
        batch = begin(client, upload(client, requests))
        later = begin(client, upload(client, requests[:3]))
        while batch.status == "validating" or batch.request_counts.completed < 50:
            batch = client.batches.retrieve(batch.id)
        first.process.kill()
        first.wait()
    with Server(TINY_MODEL, "--files-dir", tmp_path) as second:
        client = second.client()
        batch, later = wait(client, batch), wait(client, later)
        assert batch.status == later.status == "completed"
        assert batch.request_counts.completed == len(requests)
        found = answers(client, batch.output_file_id)
        assert len(found) == len(requests)
        model = client.models.list().data[0].id
        for i in (0, 49, 1499):
            same = client.completions.create(model=model, **requests[i]["body"])
            assert text_of(found[f"c{i}"]) == same.choices[0].text
        assert len(answers(client, later.output_file_id)) == 3


def test_a_batch_whose_time_is_up(tmp_path):
    requests = [request(i, max_tokens=60) for i in range(1500)]
    with Server(TINY_MODEL, "--files-dir", tmp_path) as first:
        client = first.client()
        batch = begin(client, upload(client, requests))
        assert batch.expires_at == batch.created_at + 24 * 60 * 60
        while batch.status == "validating" or batch.request_counts.completed < 10:
            batch = client.batches.retrieve(batch.id)
        first.process.kill()
        first.wait()
    # As if it had been left here long ago.
    path = tmp_path / "batches" / f"{batch.id}.json"
    record = json.loads(path.read_text())
    record["object"]["expires_at"] = int(time.time()) - 1
    path.write_text(json.dumps(record))
    with Server(TINY_MODEL, "--files-dir", tmp_path) as second:
        client = second.client()
        batch = wait(client, client.batches.retrieve(batch.id))
        assert batch.status == "expired" and batch.expired_at >= batch.expires_at
        found = answers(client, batch.output_file_id)
        assert 10 <= len(found) == batch.request_counts.completed < len(requests)
        assert batch.request_counts.total == len(requests)


def test_everybody_sees_their_own(tmp_path):
    keys = tmp_path / "keys"
    keys.write_text("sk-ann name=ann\nsk-bob\n")
    kept = tmp_path / "kept"
    with Server(TINY_MODEL, "--files-dir", kept, "--api-key-file", keys) as running:
        ann, bob = (running.client(key) for key in ("sk-ann", "sk-bob"))
        file = upload(ann, [request(0)])
        batch = wait(ann, begin(ann, file))
        assert batch.request_counts.completed == 1, "it is answered on its owner's account"
        with pytest.raises(NotFoundError):
            bob.files.content(batch.output_file_id)
        with pytest.raises(NotFoundError):
            bob.batches.retrieve(batch.id)
        with pytest.raises(BadRequestError):
            begin(bob, file)
        assert bob.files.list().data == [] and bob.batches.list().data == []
        assert running.request("GET", "/v1/files")[0] == 401
        own = wait(bob, begin(bob, upload(bob, [request(1)])))
        assert own.request_counts.completed == 1


def test_without_a_folder(tiny):
    status, _, body = tiny.request("GET", "/v1/files")
    assert (status, body["error"]["code"]) == (404, "no_files")
    paths = tiny.request("GET", "/openapi.json")[2]["paths"]
    assert "/v1/batches" not in paths

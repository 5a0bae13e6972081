"""Connections: TLS with a certificate made here, slow and silent clients, limits."""

import shutil
import socket
import ssl
import subprocess
import time

import openai
import pytest
from inflight import TINY_MODEL, Server, default_model, run


def certificate(folder, name="127.0.0.1"):
    """A certificate for this machine that vouches for itself, and its key."""
    assert shutil.which("openssl"), "needs openssl (Debian: apt install openssl)"
    paths = folder / f"{name}.pem", folder / f"{name}.key"
    arguments = ["req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1"]
    arguments += ["-nodes", "-days", "2", "-subj", f"/CN={name}"]
    arguments += ["-addext", "subjectAltName=IP:127.0.0.1"]
    arguments += ["-addext", "keyUsage=critical,digitalSignature,keyCertSign"]
    arguments += ["-out", paths[0], "-keyout", paths[1]]
    subprocess.run(["openssl", *arguments], check=True, capture_output=True)
    return paths


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return certificate(tmp_path_factory.mktemp("tls"))


def secure_client(server, pair):
    http = openai.DefaultHttpxClient(verify=ssl.create_default_context(cafile=pair[0]))
    return openai.OpenAI(
        base_url=f"{server.url}/v1", api_key="unused", max_retries=0, http_client=http
    )


def test_openais_client_over_tls_until_the_end(pair):
    with Server(default_model(), "--tls-cert", pair[0], "--tls-key", pair[1]) as running:
        assert running.url.startswith("https://")
        client = secure_client(running, pair)
        model = client.models.list().data[0].id
        whole = client.completions.create(model=model, prompt="a", max_tokens=3, temperature=0)
        assert whole.usage.completion_tokens <= 3
        with pytest.raises(openai.APIConnectionError):
            running.client().models.list()
        # Plain HTTP is no handshake: that connection ends, the others do not.
        with socket.create_connection(("127.0.0.1", running.port), 10) as plain:
            plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
            assert b"HTTP" not in plain.recv(4096)
        chunks = iter(
            client.completions.create(
                model=model, prompt="One, two,", max_tokens=40, stream=True, temperature=0
            )
        )
        first = next(chunks)
        running.terminate()
        reasons = [choice.finish_reason for chunk in [first, *chunks] for choice in chunk.choices]
        assert [reason for reason in reasons if reason] in (["length"], ["stop"])
        assert running.wait() == 0, running.output()


def test_wrong_certificates_end_at_once(pair, tmp_path):
    other = certificate(tmp_path)

    def refused(*flags):
        code, _, stderr = run("serve", TINY_MODEL, "--port", "0", *flags)
        assert code != 0
        return stderr

    assert "--tls-key" in refused("--tls-cert", pair[0])
    assert "/no/file" in refused("--tls-cert", "/no/file", "--tls-key", pair[1])
    assert "the certificate" in refused("--tls-cert", pair[1], "--tls-key", pair[1])
    assert "the key" in refused("--tls-cert", pair[0], "--tls-key", pair[0])
    assert "certificate and key" in refused("--tls-cert", pair[0], "--tls-key", other[1])


@pytest.fixture(scope="module")
def strict():
    with Server(TINY_MODEL, "--receive-timeout", "1", "--max-connections", "3") as running:
        yield running


def exchange(server, sent):
    """What comes back for these bytes until the server closes."""
    with socket.create_connection(("127.0.0.1", server.port), 30) as connection:
        connection.sendall(sent)
        received = b""
        while chunk := connection.recv(4096):
            received += chunk
    return received


@pytest.mark.parametrize("start", [b"", b"GET /hea", b"GET /health HTTP/1.1\r\nHost: x\r\n"])
def test_heads_that_do_not_come(strict, start):
    answer = exchange(strict, start)
    assert answer == b"" or answer.startswith(b"HTTP/1.1 408 "), answer


def test_bodies_that_do_not_come(strict):
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    answer = exchange(strict, head + b'Content-Length: 100\r\n\r\n{"prompt":')
    assert answer.startswith(b"HTTP/1.1 408 ") and b"body_timeout" in answer, answer


def test_heads_that_are_too_large(strict):
    wide = b"GET /health HTTP/1.1\r\nHost: x\r\nA: " + b"a" * 70_000 + b"\r\n\r\n"
    many = b"GET /health HTTP/1.1\r\n" + b"A: a\r\n" * 101 + b"\r\n"
    for head in (wide, many):
        assert exchange(strict, head).startswith(b"HTTP/1.1 431 "), head[:40]
    assert strict.request("GET", "/health")[0] == 200


def test_connections_over_the_limit_are_told(strict):
    address = ("127.0.0.1", strict.port)
    request = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    held = []
    try:
        # What earlier tests closed counts until the server has seen it.
        for _ in range(100):
            connection = socket.create_connection(address, 30)
            connection.sendall(request)
            if connection.recv(4096).startswith(b"HTTP/1.1 200 "):
                held.append(connection)
            else:
                connection.close()
                time.sleep(0.1)
            if len(held) == 3:
                break
        assert len(held) == 3
        answer = exchange(strict, request)
        assert answer.startswith(b"HTTP/1.1 503 ") and b"too_many_connections" in answer, answer
        assert b"retry-after: 1" in answer.lower()
    finally:
        for connection in held:
            connection.close()

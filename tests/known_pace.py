"""A server of known pace, to hold clients that measure against: what they say is right or wrong.

known_pace.py PORT TTFT_MS GAP_MS: the first text of an answer comes TTFT_MS after the last byte
of a request, each further one GAP_MS after the one before, up to the request's max_tokens.
"""

import json
import re
import socket
import sys
import threading
import time

HEAD = b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: "
# Sleeping ends late by less than this; the rest is waited for awake.
SLACK_S = 0.0015


class Listener:
    """Lets `answer` answer each connection in a thread of its own."""

    def __init__(self, port=0):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.url = f"http://127.0.0.1:{self.listener.getsockname()[1]}"

    def serve(self):
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:
                return
            threading.Thread(target=self.answer, args=(connection,), daemon=True).start()

    def __enter__(self):
        threading.Thread(target=self.serve, daemon=True).start()
        return self

    def __exit__(self, *_):
        self.listener.close()


class KnownPace(Listener):
    def __init__(self, ttft_ms, gap_ms, port=0):
        super().__init__(port)
        self.ttft_s, self.gap_s = ttft_ms / 1e3, gap_ms / 1e3

    def answer(self, connection):
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head, body = read_request(connection)
            if head.startswith(b"GET"):
                models = b'{"data": [{"id": "m"}]}'
                connection.sendall(HEAD + b"application/json\r\n\r\n" + models)
                return
            due = time.perf_counter() + self.ttft_s
            connection.sendall(HEAD + b"text/event-stream\r\n\r\n")
            num_tokens = json.loads(body)["max_tokens"]
            for i in range(num_tokens):
                wait_until(due)
                due += self.gap_s
                connection.sendall(events(i, num_tokens))


def read_request(connection):
    text = b""
    while b"\r\n\r\n" not in text:
        text += connection.recv(1 << 16)
    head, body = text.split(b"\r\n\r\n", 1)
    length = re.search(rb"(?i)content-length: (\d+)", head)
    while length and len(body) < int(length[1]):
        body += connection.recv(1 << 16)
    return head, body


def wait_until(due):
    while (left := due - time.perf_counter()) > 0:
        if left > 2 * SLACK_S:
            time.sleep(left - SLACK_S)


def events(i, num_tokens):
    is_last = i == num_tokens - 1
    choice = {"index": 0, "text": "a ", "finish_reason": "length" if is_last else None}
    sent = [{"id": "x", "choices": [choice]}]
    if is_last:
        usage = {"prompt_tokens": 1, "completion_tokens": num_tokens}
        sent.append({"id": "x", "choices": [], "usage": usage})
    told = [f"data: {json.dumps(event)}\n\n" for event in sent]
    return "".join(told + ["data: [DONE]\n\n"] * is_last).encode()


if __name__ == "__main__":
    KnownPace(float(sys.argv[2]), float(sys.argv[3]), int(sys.argv[1])).serve()

"""The binary under test, as a user meets it: a process, an address, HTTP."""

import http.client
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FIXTURES = ROOT / "crates" / "model" / "tests" / "fixtures"
# Random weights, a context of 128 tokens and a vocabulary of bytes: starts at once, says nonsense.
TINY_MODEL = FIXTURES / "llama3" / "model.gguf"
START_TIMEOUT_S = 120
ADDRESS = re.compile(r"(https?://127\.0\.0\.1:(\d+))")


def needed_path(variable):
    """The file that `variable` names. Tests never skip for want of it: `make test` sets both."""
    path = os.environ.get(variable)
    if not path or not Path(path).exists():
        raise RuntimeError(f"{variable} must name a file (is {path!r}): run `make test`")
    return path


def binary():
    return needed_path("INFLIGHT_BINARY")


def default_model():
    return needed_path("INFLIGHT_TEST_MODEL")


class Server:
    """A running `inflight serve` on a port that the system chose; what it prints is kept."""

    def __init__(self, model, *flags):
        command = [binary(), "serve", str(model), "--host", "127.0.0.1", "--port", "0", *flags]
        self.lines = []
        self.url = self.port = None
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
        self._address_known = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        if not self._address_known.wait(START_TIMEOUT_S) or self.port is None:
            self.process.kill()
            raise RuntimeError(f"{command} named no address:\n{self.output()}")

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line)
            if self.port is None and (found := ADDRESS.search(line)):
                self.url, self.port = found[1], int(found[2])
                self._address_known.set()
        self._address_known.set()  # it ended: whoever waits must not wait on

    def output(self):
        return "".join(self.lines)

    def client(self, key="unused"):
        from openai import OpenAI

        return OpenAI(base_url=f"{self.url}/v1", api_key=key, max_retries=0, timeout=300)

    def anthropic(self, key="unused"):
        from anthropic import Anthropic

        return Anthropic(base_url=self.url, api_key=key, max_retries=0, timeout=300)

    def request(self, method, path, body=None, raw=None, headers=None):
        """Status, headers and body of one plain HTTP exchange; `raw` sends bytes as they are."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            data = raw if raw is not None else None if body is None else json.dumps(body)
            content = {} if data is None else {"Content-Type": "application/json"}
            connection.request(method, path, data, content | (headers or {}))
            response = connection.getresponse()
            text = response.read().decode()
        finally:
            connection.close()
        try:
            return response.status, response.headers, json.loads(text)
        except json.JSONDecodeError:
            return response.status, response.headers, text

    def post(self, path, body):
        return self.request("POST", path, body)

    def terminate(self):
        self.process.send_signal(signal.SIGTERM)

    def wait(self, timeout_s=60):
        code = self.process.wait(timeout_s)
        self._reader.join(timeout_s)
        return code

    def stop(self):
        """Ends the process and says how it ended; a server that hangs is an error."""
        if self.process.poll() is None:
            self.terminate()
        try:
            return self.wait()
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise RuntimeError(f"the server did not end on SIGTERM:\n{self.output()}") from None

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.stop()


def run(*arguments, stdin=None, timeout_s=300):
    """One run of the binary to its end: exit code, stdout, stderr."""
    done = subprocess.run(
        [binary(), *map(str, arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout_s,
    )
    return done.returncode, done.stdout, done.stderr

"""`inflight top` against a running server: as text, in a terminal, and when there is no server."""

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import termios
import time

import pytest
from inflight import TINY_MODEL, Server, binary, run


def test_figures_as_text_are_those_of_the_server(tiny):
    tiny.post("/v1/completions", {"prompt": [9] * 30, "max_tokens": 5})
    code, stdout, stderr = run("top", tiny.url, "--once", "--interval-ms", "200")
    assert code == 0, stderr
    assert re.search(rf" at {tiny.url}, over 0\.\d s\n", stdout)
    # Nothing runs any more, and the device's time is told whole.
    parts = [float(part) for part in re.findall(r"device (?:busy|idle) ([\d.]+) %", stdout)]
    assert sum(parts) == pytest.approx(100, abs=0.2) and ": no work" in stdout
    assert "0 running, 0 waiting, KV cache 0.0 %" in stdout


def test_a_terminal_is_filled_until_somebody_leaves(tiny):
    process, master = in_terminal("top", tiny.url, "--interval-ms", "50")
    seen = read_until(master, "q leaves")
    assert "the last steps" in seen and "latencies" in seen
    os.write(master, b"q")
    read_until(master, None)
    assert process.wait(30) == 0
    os.close(master)


def in_terminal(*arguments):
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    process = subprocess.Popen(
        [binary(), *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | {"TERM": "xterm-256color"},
    )
    os.close(slave)
    return process, master


def read_until(master, text, timeout_s=60):
    """What was written until `text` comes, or until the terminal is closed."""
    seen, end = b"", time.monotonic() + timeout_s
    while time.monotonic() < end:
        if not select.select([master], [], [], 1)[0]:
            continue
        try:
            read = os.read(master, 1 << 16)
        except OSError:
            return seen.decode(errors="replace")
        seen += read
        if text and text.encode() in seen:
            return seen.decode(errors="replace")
    raise AssertionError(f"{text!r} did not come: {seen[:2000]!r}")


def test_without_a_terminal_it_says_so(tiny):
    code, stdout, stderr = run("top", tiny.url)
    assert (code, stdout) == (1, "") and "--once" in stderr


@pytest.mark.parametrize("flags", [[], ["--api-key", "sk-wrong"]])
def test_a_key_is_asked_for(flags):
    with Server(TINY_MODEL, "--api-key", "sk-top") as guarded:
        code, _, stderr = run("top", guarded.url, "--once", *flags)
        assert code == 1 and "--api-key" in stderr
        code, stdout, stderr = run("top", guarded.url, "--once", "--api-key", "sk-top")
        assert code == 0 and "device busy" in stdout, stderr


def test_a_server_that_is_not_there_is_named():
    code, _, stderr = run("top", "http://127.0.0.1:1", "--once")
    assert code == 1 and "cannot connect to http://127.0.0.1:1" in stderr

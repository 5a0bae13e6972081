#!/usr/bin/env python3
"""Puts NVRTC, CUDA's run-time compiler, into the user's cache folder and prints the folder.

With it every kernel can be compiled, and its registers and shared memory checked, on a machine
without a GPU. pip fetches the wheel (86 MB), so that its settings for mirrors and proxies hold here
too; it is compared with a checksum, and two libraries are taken out of it. Nothing is installed.
"""

import os
import shutil
import tempfile
from pathlib import Path

from wheel_files import cache_folder, download, extract, fail, run, say, sha256

PACKAGE = "nvidia-cuda-nvrtc==13.0.88"
SHA256 = "ad9b6d2ead2435f11cbb6868809d2adeeee302e9bb94bcf0539c7a40d80e8575"
PLATFORM = "manylinux_2_12_x86_64"
LIBRARIES = ["libnvrtc-builtins.so.13.0", "libnvrtc.so.13"]


def main():
    target = cache_folder("nvrtc") / PACKAGE
    if not all((target / name).exists() for name in LIBRARIES):
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that the last step is a rename: it is never seen half written.
        with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
            say(f"fetching {PACKAGE} (86 MB, once) into {target.parent}")
            libraries = fetch(Path(folder))
            shutil.rmtree(target, ignore_errors=True)
            os.replace(libraries, target)
    print(target)


def fetch(folder):
    """A folder with the libraries, out of the wheel whose checksum is known."""
    wheel = download(PACKAGE, folder, "--only-binary=:all:", "--platform", PLATFORM)
    found = sha256(wheel)
    if found != SHA256:
        fail(f"{wheel.name} has the sha256 {found}, not {SHA256}")
    libraries = folder / "libraries"
    libraries.mkdir()
    for name in LIBRARIES:
        extract(wheel, name, libraries)
    return libraries


if __name__ == "__main__":
    run(main)

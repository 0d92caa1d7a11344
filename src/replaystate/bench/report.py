"""Results of a benchmark as JSON: what was measured, by which command, on which machine.

The file is an object with

| key | meaning |
|---|---|
| schema | version of this layout |
| benchmark, version | name of the benchmark; version of replaystate |
| command | the command line that makes the file again |
| environment | machine, software and load (`environment`) |
| results | a list; each has "name", its parameters, "time" (`Timing`), and what was derived from it |
| checks | a list of `Check`: a target, the value found, and whether it was met |
| skipped | a list of what was not timed: name, what, reason; missing where nothing was |
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import re
import sys
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from ..kernels import cpu_backend

SCHEMA = 1


@dataclass(frozen=True)
class Check:
    """A target and what was found."""

    name: str
    target: str
    value: float
    met: bool


@dataclass
class Report:
    """Collects results and checks, and writes the file.

    Args:
        benchmark: its name.
        results, checks, skipped: as in the file.
        command: the command line that makes the file again; None: that of this process.
        threads: torch threads while it measured; None: those of this process now.
    """

    benchmark: str
    results: list[dict[str, Any]] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    skipped: list[dict[str, Any]] = field(default_factory=list)
    command: str | None = None
    threads: int | None = None

    def add(self, name: str, **values: Any) -> None:
        """One result; values are numbers, strings, or dataclasses such as `Timing`."""
        plain = {
            key: asdict(value) if hasattr(value, "__dataclass_fields__") else value for key, value in values.items()
        }
        self.results.append({"name": name, **plain})

    def at_least(self, name: str, value: float, target: float) -> None:
        """Record a target that is a lower bound."""
        self.checks.append(Check(name, f">= {target:g}", round(value, 3), value >= target))

    def at_most(self, name: str, value: float, target: float) -> None:
        """Record a target that is an upper bound."""
        self.checks.append(Check(name, f"<= {target:g}", round(value, 3), value <= target))

    def to_dict(self) -> dict[str, Any]:
        """The whole file."""
        return {
            "schema": SCHEMA,
            "benchmark": self.benchmark,
            "version": importlib.metadata.version("replaystate") if _installed() else "source",
            "command": self.command or " ".join(["python", *sys.argv]),
            "environment": environment() | ({} if self.threads is None else {"threads": self.threads}),
            "results": self.results,
            "checks": [asdict(check) for check in self.checks],
            **({"skipped": self.skipped} if self.skipped else {}),
        }

    def write(self, path: Path) -> None:
        """Write the file, and its folder."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(self.to_dict(), indent=1) + "\n")


def environment() -> dict[str, Any]:
    """Machine and software, without names of hosts or users.

    >>> sorted(environment())[:4]
    ['architecture', 'cpu', 'cpus', 'gpu']
    """
    return {
        "cpu": _cpu_name(),
        "cpus": os.cpu_count(),
        "architecture": platform.machine(),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "isa": cpu_backend.isa() if cpu_backend.usable() is None else None,
        "load": [round(x, 2) for x in os.getloadavg()],
    }


def _cpu_name() -> str:
    try:
        match = re.search(r"^model name\s*: (.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
    except OSError:
        match = None
    return match.group(1) if match else platform.processor() or platform.machine()


def _installed() -> bool:
    try:
        importlib.metadata.version("replaystate")
    except importlib.metadata.PackageNotFoundError:
        return False
    return True

"""The wheel: its tag, that it runs where there is no compiler, and what is said where the library is missing.

How this tests: the wheel is built from this checkout, installed into a fresh virtual environment that has only torch
beside it (by a .pth file: torch is not installed twice), and run with a PATH on which there is no compiler.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch

from replaystate.errors import BackendError
from replaystate.kernels import cpu_backend

ROOT = Path(__file__).parents[2]

CHECK = """
import shutil, sys
import torch, replaystate
from replaystate import GDNShape, gated_delta_rule, reference

assert not any(shutil.which(name) for name in ("cc", "gcc", "g++", "c++", "clang")), "a compiler is on PATH"
assert replaystate.__file__.startswith(sys.prefix), replaystate.__file__
usable = {info.name: info.reason for info in replaystate.backends()}
assert usable["cpu"] is None, usable["cpu"]
torch.manual_seed(0)
shape, bounds = GDNShape(2, 4, 64, 64), torch.tensor([0, 40])
inputs = [torch.randn(40, n) for n in (shape.qkv_dim, 4, 4)] + [torch.randn(4), torch.randn(4)]
out, state = gated_delta_rule(*inputs, shape, bounds, backend="cpu")
truth, last = reference.recurrent(*[x.double() for x in inputs], shape, bounds)
for found, expected in ((out, truth), (state, last)):
    error = float((found - expected).norm() / expected.norm())
    assert error < 1e-6, error
print("ran on", replaystate.kernels.cpu_backend.isa())
"""


def build(out: Path, **environment: str) -> Path:
    """The wheel of this checkout."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-build-isolation",
        "--no-deps",
        "--quiet",
        "-w",
        str(out),
        str(ROOT),
    ]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = out.glob("*.whl")
    return wheel


@pytest.mark.timeout(600)
@pytest.mark.skipif(cpu_backend.usable() is not None, reason="the extension is not built here")
def test_the_wheel_runs_without_a_compiler(tmp_path: Path) -> None:
    wheel = build(tmp_path / "dist", REPLAYSTATE_EXTENSION="require")
    assert re.fullmatch(r"replaystate-[\d.]+-py3-none-(linux|macosx)_\w+\.whl", wheel.name), wheel.name
    fresh = tmp_path / "venv"
    venv.create(fresh, with_pip=False)
    python = fresh / "bin" / "python"
    where = [str(python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
    site = Path(subprocess.run(where, capture_output=True, text=True, check=True).stdout.strip())
    site.joinpath("torch.pth").write_text(sysconfig.get_path("purelib") + "\n")
    subprocess.run(
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--no-index",
            "--target",
            str(site),
            str(wheel),
        ],
        check=True,
    )
    environment = {"PATH": str(fresh / "bin"), "HOME": str(tmp_path)}
    done = subprocess.run(
        [str(python), "-c", CHECK], env=environment, cwd=tmp_path, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "ran on" in done.stdout
    verify = [str(python), "-m", "replaystate", "verify", "--json"]
    done = subprocess.run(verify, env=environment, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert {check["backend"] for check in json.loads(done.stdout)["checks"]} == {"cpu", "torch"}


@pytest.mark.timeout(600)
def test_without_the_extension_the_wheel_is_pure(tmp_path: Path) -> None:
    wheel = build(tmp_path, REPLAYSTATE_EXTENSION="skip")
    assert wheel.name.endswith("-py3-none-any.whl")


def test_no_compiler_gives_a_pure_package(tmp_path: Path) -> None:
    command = [
        sys.executable,
        "setup.py",
        "--quiet",
        "bdist_wheel",
        "--dist-dir",
        str(tmp_path),
        "--bdist-dir",
        str(tmp_path / "b"),
    ]
    environment = {**os.environ, "CC": "/nonexistent/cc", "CXX": "/nonexistent/c++"}
    done = subprocess.run(
        [*command, "build", "--build-base", str(tmp_path / "build")],
        env=environment, cwd=ROOT, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "a pure-Python package, without CPU kernels: no working C++20 compiler" in done.stderr
    assert next(path.name for path in tmp_path.glob("*.whl")).endswith("-py3-none-any.whl")


def test_a_missing_library_is_a_reason(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cpu_backend, "LIBRARY", tmp_path / "_cpu_kernels.so")
    cpu_backend.usable.cache_clear()
    try:
        reason = cpu_backend.usable()
        assert reason is not None
        assert reason.startswith("the C++ extension is not built: ")
        assert "--no-build-isolation" in reason
        with pytest.raises(BackendError, match=r"^backend 'cpu': the C\+\+ extension is not built"):
            cpu_backend.isa()
        (tmp_path / "_cpu_kernels.so").write_bytes(b"not a library")
        cpu_backend.usable.cache_clear()
        reason = cpu_backend.usable()
        assert reason is not None
        assert reason.startswith(f"the C++ extension does not load into torch {torch.__version__}: ")
    finally:
        monkeypatch.undo()
        cpu_backend.usable.cache_clear()

"""The contract of the command: exit codes, stdout and stderr, colour, missing packages, `doctor`.

How this tests, in plain words: most runs are in this process; three start a real one, to see what only a process shows
(the module entry, a reader that goes away, a terminal). Missing packages are simulated by blocking their import.
"""

from __future__ import annotations

import errno
import io
import logging
import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import typer

import replaystate
import replaystate.cli
from replaystate import doctor
from replaystate.cli import app as cli_app
from replaystate.cli import main, output
from replaystate.cli.exits import Exit, exit_code_of
from replaystate.errors import AuditError, ProtocolError, ReplayStateError

from .conftest import Finished

Command = Callable[..., Finished]
SOURCE = Path(replaystate.__file__).parents[1]


# --- help and version ------------------------------------------------------------------------------------------------


def test_version(command: Command) -> None:
    done = command("--version")
    assert (done.code, done.out, done.err) == (0, f"replaystate {replaystate.__version__}\n", "")


@pytest.mark.parametrize("arguments", [[], ["generate"], ["doctor"], ["verify"], ["bench"]], ids=" ".join)
def test_help(command: Command, arguments: list[str]) -> None:
    done = command(*arguments, "--help")
    assert (done.code, done.err) == (0, "")
    assert done.out.startswith("Usage: replaystate")
    assert "..." not in done.out.replace("...\n\n", "").replace("[ARGS]...", "")
    assert max(map(len, done.out.splitlines())) <= 80


@pytest.mark.parametrize(
    "arguments",
    [[], ["nonsense"], ["generate"], ["doctor", "extra"], ["verify", "--nonsense"], ["generate", "--dtype", "int8"]],
    ids=" ".join,
)
def test_wrong_usage(command: Command, arguments: list[str]) -> None:
    done = command(*arguments)
    assert done.code == 2
    assert "Traceback" not in done.err


# --- doctor ----------------------------------------------------------------------------------------------------------


def test_doctor_json(command: Command) -> None:
    done = command("doctor", "--json")
    found = done.json()
    assert (done.code, done.err) == (0, "")
    keys = (
        "command replaystate python platform torch packages extras transformers devices backends flashinfer environment"
    )
    assert list(found) == keys.split()
    assert found["torch"]["version"] == torch.__version__
    assert found["packages"]["typer"]
    assert found["extras"]["cli"] == {"installed": True, "missing": []}
    assert found["transformers"] == {"usable": True, "reason": None}
    assert found["devices"][0]["type"] == "cpu"
    listed = [(backend["name"], backend["usable"], backend["reason"]) for backend in found["backends"]]
    assert listed == [(info.name, info.usable, info.reason) for info in replaystate.backends()]
    assert found["flashinfer"]["usable"] is (found["flashinfer"]["reason"] is None)


def test_doctor_text_has_what_the_json_has(command: Command) -> None:
    found = doctor.examine()
    text = command("doctor").out
    for words in (found["replaystate"], found["python"], found["torch"]["version"], found["devices"][0]["name"]):
        assert words in text
    for backend in found["backends"]:
        assert backend["name"] in text
    if not found["flashinfer"]["usable"]:
        assert found["flashinfer"]["reason"] in text


def test_doctor_names_a_backend_that_is_not_usable_and_a_missing_package() -> None:
    found = doctor.examine()
    found["backends"].append({"name": "cuda", "usable": False, "reason": "no CUDA device"})
    found["extras"]["cli"] = {"installed": False, "missing": ["typer", "rich"]}
    found["devices"].append({"type": "cuda:0", "name": "A GPU", "capability": "sm_90", "memory_bytes": 80 * 2**30})
    found["environment"] = {}
    text = doctor.as_text(found)
    assert "not usable: no CUDA device" in text
    assert "missing typer, rich" in text
    assert "A GPU, sm_90, 80 GiB" in text
    assert "environment" not in text


def test_doctor_tells_only_of_listed_variables(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    done = command("doctor")
    assert "hf_secret" not in done.out
    assert "OMP_NUM_THREADS" in done.out


def test_doctor_reports_a_broken_transformers(monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, "transformers")
    found = doctor.examine()
    assert not found["transformers"]["usable"]
    assert "MissingDependencyError" in found["transformers"]["reason"]


# --- packages that are not there -------------------------------------------------------------------------------------


def block(monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    """Make `import package` fail, and forget the modules of ours that have imported it."""
    for name in [package, *(name for name in sys.modules if name.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, name, None)
    if package == "transformers":
        parent, ours = replaystate, ("replaystate.transformers",)
    else:
        parent, ours = replaystate.cli, ("replaystate.cli.app", "replaystate.cli.output")
    for name in list(sys.modules):
        if name in ours or name.startswith(tuple(f"{module}." for module in ours)):
            monkeypatch.delitem(sys.modules, name)
    for name in ours:
        monkeypatch.delattr(parent, name.rpartition(".")[2], raising=False)


@pytest.mark.parametrize("package", ["typer", "rich"])
def test_without_the_command_packages(command: Command, monkeypatch: pytest.MonkeyPatch, package: str) -> None:
    block(monkeypatch, package)
    done = command("--version")
    assert (done.code, done.out) == (3, "")
    assert done.err == f"replaystate: the command needs {package}: pip install 'replaystate[cli]'\n"


def test_without_transformers(command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block(monkeypatch, "transformers")
    done = command("generate", "--model", model_folder, "--prompt", "x", "--json")
    assert (done.code, done.out) == (3, "")
    assert "pip install 'replaystate[hf]'" in done.err
    assert done.err.count("\n") == 1


def test_with_a_transformers_that_is_too_old(
    command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    block(monkeypatch, "transformers")
    monkeypatch.setitem(sys.modules, "transformers", transformers)
    monkeypatch.setattr(transformers, "__version__", "4.57.6")
    done = command("generate", "--model", model_folder, "--prompt", "x")
    assert done.code == 3
    assert "supports transformers >= 5.17, < 6, got 4.57.6" in done.err


def test_another_import_error_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "replaystate.cli.app")
    monkeypatch.setitem(sys.modules, "replaystate.doctor", None)
    monkeypatch.delattr(replaystate, "doctor")
    with pytest.raises(ImportError, match="doctor"):
        main(["--version"])


# --- colour ----------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    """A stdout that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("no_color", [False, True])
def test_colour_on_a_terminal_unless_no_color(monkeypatch: pytest.MonkeyPatch, no_color: bool) -> None:
    monkeypatch.setenv("TERM", "xterm")
    for name in ("FORCE_COLOR", "NO_COLOR"):
        monkeypatch.delenv(name, raising=False)
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    output.write_prompt("prompt")
    output.results().print("result", style="bold red")
    assert ("\x1b[" in terminal.getvalue()) is not no_color
    assert "prompt" in terminal.getvalue()


def test_the_module_in_a_real_terminal_with_no_color() -> None:
    """`python -m replaystate --version` in a pseudo-terminal: not one escape sequence."""
    master, slave = pty.openpty()
    variables = {**os.environ, "PYTHONPATH": str(SOURCE), "TERM": "xterm-256color", "NO_COLOR": "1"}
    line = [sys.executable, "-m", "replaystate", "--version"]
    finished = subprocess.run(line, stdout=slave, stderr=slave, env=variables, check=False, timeout=120)
    os.close(slave)
    out = os.read(master, 4096)
    os.close(master)
    assert finished.returncode == 0
    assert out == f"replaystate {replaystate.__version__}\r\n".encode()


# --- ends ------------------------------------------------------------------------------------------------------------


def test_a_reader_that_goes_away(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
    class Closed(io.StringIO):
        def write(self, text: str) -> int:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

    with monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", Closed())
        assert main(["doctor"]) == 1
    assert capfd.readouterr().err == ""


def test_interrupted(command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(cli_app, "generate", interrupt)
    done = command("generate", "--model", model_folder, "--prompt", "x")
    assert (done.code, done.err) == (130, "replaystate: interrupted\n")


def test_an_error_of_ours_that_no_user_can_cause_is_shown_whole(
    command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ProtocolError("commit without a step")

    monkeypatch.setattr(cli_app, "generate", fail)
    with pytest.raises(ProtocolError, match="commit without a step"):
        command("generate", "--model", model_folder, "--prompt", "x")


def test_exit_codes_of_errors() -> None:
    assert exit_code_of(AuditError("parted")) == Exit.FAILED
    assert exit_code_of(ReplayStateError("else")) is None
    assert [int(code) for code in Exit] == [0, 1, 2, 3, 130]


def test_warnings_of_the_library_go_to_stderr_with_a_name(command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    def warn(*_: object) -> None:
        logging.getLogger("replaystate.transformers").warning("drafts are cut")
        raise typer.Exit(0)

    monkeypatch.setattr(cli_app.doctor, "examine", warn)
    done = command("doctor")
    assert (done.out, done.err) == ("", "replaystate: drafts are cut\n")
    assert logging.getLogger("replaystate").handlers == []


def test_numbers_for_people() -> None:
    assert [output.size(n) for n in (0, 999, 1e3, 2.5e9)] == ["0 B", "999 B", "1.0 kB", "2.5 GB"]
    assert output.ratio(0, 5, "less", "more") == ""

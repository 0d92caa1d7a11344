"""The commands: their options, and what they print. The larger ones have modules of their own."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from .. import __version__, doctor, verify
from ..errors import ArgumentError
from . import kernels as kernel_commands
from . import output
from .bench import bench_app
from .common import Json, errors_as_exit_codes
from .exits import Exit
from .generation import Request, generate
from .models import one_line
from .plan import plan_command
from .simulate import simulate_command

app = typer.Typer(
    name="replaystate",
    help="Gated DeltaNet decoding whose speculative drafts can be rolled back.\n\n"
    "Exit codes: 0 done, 1 a check failed, 2 wrong usage, 3 this machine lacks something. "
    "Results go to stdout, progress to stderr. Nothing is downloaded.",
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)
app.add_typer(bench_app, name="bench", short_help="Measure, compare, draw results.")


class DType(str, Enum):
    """Weights in memory."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def run(arguments: Sequence[str] | None) -> int:
    """Run a command line and return its exit code."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")  # a terminal that cannot show a character shows another
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("replaystate: %(message)s"))
    logger = logging.getLogger("replaystate")
    logger.addHandler(handler)
    try:
        words = list(sys.argv[1:] if arguments is None else arguments)
        app(args=words, prog_name="replaystate", obj=words)
    except SystemExit as exit_:
        return exit_.code if isinstance(exit_.code, int) else int(exit_.code is not None)
    finally:
        logger.removeHandler(handler)
    return Exit.OK


def _show_version(wanted: bool) -> None:
    if wanted:
        output.results().print(f"replaystate {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options before the command."""


@app.command("generate", short_help="Continue a prompt, with drafts or without.")
def generate_command(
    model: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Model folder, as transformers saves it: Qwen3-Next or Qwen3.5.")
    ],
    prompt: Annotated[str | None, typer.Option(metavar="TEXT", help="What to continue.")] = None,
    prompt_file: Annotated[
        str | None, typer.Option(metavar="FILE", help="Read the prompt from a file; - is standard input.")
    ] = None,
    draft: Annotated[
        str,
        typer.Option(
            metavar="HOW",
            help="none; prompt-lookup: copy what followed the last words before; or the folder of a draft model.",
        ),
    ] = "none",
    max_new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Stop after so many tokens.")] = 128,
    max_query_len: Annotated[
        int, typer.Option(min=1, metavar="T", help="Tokens verified in one step: up to T - 1 drafts.")
    ] = 8,
    window: Annotated[
        int, typer.Option(min=1, metavar="W", help="Tokens between folds; a power of two, at least T.")
    ] = 16,
    dtype: Annotated[DType, typer.Option(help="Weights in memory.")] = DType.float32,
    device: Annotated[str, typer.Option(metavar="DEV", help="Device of torch, e.g. cuda.")] = "cpu",
    compare: Annotated[
        bool, typer.Option("--compare", help="Also run stock greedy decoding; exit 1 if its tokens differ.")
    ] = False,
    json: Json = False,
) -> None:
    """Continue a prompt greedily, with speculative drafts rolled back through the ring.

    The text appears as it is generated. A table follows: calls, accepted drafts, bytes of recurrent state, speed.

    Bytes of state are those that each algorithm needs, S being the state of a GDN layer. Stock transformers, for each
    token: reads S, writes S', and copies S' into its cache (one more read and write), in float32. Replay, for each
    step: reads the checkpoint and the window's ring rows, writes the new ring rows; a fold writes the checkpoint once.
    """
    with errors_as_exit_codes():
        request = Request(
            model,
            _prompt(prompt, prompt_file),
            draft,
            max_new_tokens,
            window,
            max_query_len,
            dtype.value,
            device,
            compare,
        )
        if json:
            outcome = generate(request, output.note)
        else:
            outcome = generate(request, output.note, output.write_prompt, output.write_text)
    if json:
        output.write_json(outcome.as_json())
    else:
        output.write_text("\n")
        output.print_generation(outcome)
    if outcome.identical is False:
        hint = "" if dtype is DType.float32 else f"; {dtype.value} has near-ties that fall either way, try float32"
        output.note(f"the tokens differ from stock greedy decoding, first at {outcome.first_difference}{hint}")
        raise typer.Exit(Exit.FAILED)


def _prompt(prompt: str | None, prompt_file: str | None) -> str:
    if (prompt is None) == (prompt_file is None):
        raise ArgumentError("expected one of --prompt and --prompt-file")
    if prompt is not None:
        return prompt
    if prompt_file == "-":
        return sys.stdin.read()
    try:
        return Path(str(prompt_file)).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"--prompt-file: {one_line(error)}") from error


@app.command("doctor", short_help="Describe this machine, for a bug report.")
def doctor_command(json: Json = False) -> None:
    """Print versions, devices and backends: the text to paste into a bug report."""
    found = doctor.examine()
    if json:
        output.write_json({"command": "doctor", **found})
    else:
        output.write_text(doctor.as_text(found) + "\n")


@app.command("verify", short_help="Check numerics against float64.")
def verify_command(
    backend: Annotated[
        str | None, typer.Option(metavar="NAME", help="Only this backend; default: all usable ones.")
    ] = None,
    device: Annotated[
        str | None, typer.Option(metavar="DEV", help="Only this device of torch; default: cpu, and cuda where it is.")
    ] = None,
    json: Json = False,
) -> None:
    """Check the numerics of every usable backend against float64; exit 1 on a miss.

    Each op runs on small made-up layers, in every storage dtype, width and head ratio, with windows that fold and rings
    that wrap. An error may be twice what plain torch makes with the same storage dtypes, plus 1e-6.
    """
    with errors_as_exit_codes():
        report = verify.verify(backend, device, output.note)
    if json:
        output.write_json(output.verify_json(report))
    else:
        output.print_report(report)
    if not report.checks:
        output.note(f"no backend can run anything on {', '.join(report.devices)}")
        raise typer.Exit(Exit.ENVIRONMENT)
    if not report.ok:
        raise typer.Exit(Exit.FAILED)


app.command("plan", short_help="Say what a model takes on a device, and whether replay pays.")(plan_command)
app.command("simulate", short_help="Simulate a fleet that serves a model, with replay and without.")(simulate_command)
kernel_commands.register(app, errors_as_exit_codes)

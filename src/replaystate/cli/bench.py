"""`replaystate bench run`, `compare` and `report`."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from ..bench import Comparison, Report, compare, page, read_results, run_against
from ..bench.generate import run_generate
from ..bench.run import Layer, Plan, default_threads, run
from ..bench.workloads import DEFAULT, GENERATE, RECURRENCE, WORKLOADS
from ..errors import ArgumentError
from ..models import load_model_shape
from ..shapes import GDNShape
from . import output
from .common import Json, errors_as_exit_codes
from .exits import Exit
from .models import DTYPES, check_device, check_folder, integration, load_model, load_tokenizer, quiet_transformers

bench_app = typer.Typer(
    help="Measure, compare and draw: every kernel is checked against float64 before it is timed.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

DEFAULT_MODEL = "Qwen3.5-4B"
PROMPT = "class Queue:\n    def __init__(self):\n        self.items = []\n\n    def push(self, item):\n"
"""The prompt of the workload generate: it repeats itself, as prompts for code do."""


@bench_app.command("run", short_help="Time workloads, each checked first.")
def run_command(
    context: typer.Context,
    workloads: Annotated[
        list[str] | None, typer.Argument(metavar="[WORKLOAD]...", help=f"Default: {' '.join(DEFAULT)}.")
    ] = None,
    model: Annotated[
        str,
        typer.Option(metavar="NAMES", help="Whose layers' sizes to take; or a config.json."),
    ] = DEFAULT_MODEL,
    tp: Annotated[str, typer.Option(metavar="NUMBERS", help="Devices that a layer's heads are split over.")] = "1",
    shape: Annotated[
        str | None, typer.Option(metavar="H,HV,K,V", help="These sizes instead of a model's, as one layer.")
    ] = None,
    batch: Annotated[str, typer.Option(metavar="NUMBERS", help="Rows of the batch.")] = "1,8,32",
    io: Annotated[str, typer.Option(metavar="DTYPES", help="Inputs and outputs.")] = "bfloat16",
    state: Annotated[str, typer.Option(metavar="DTYPES", help="Checkpoints.")] = "float16",
    ring: Annotated[
        str, typer.Option(metavar="DTYPES", help="k and u rings; auto: float32 beside float32 states, else float16.")
    ] = "auto",
    variants: Annotated[
        str,
        typer.Option(
            metavar="NAMES", help="Backends, auto for the best; recurrence: plain torch without replay, float32 states."
        ),
    ] = f"auto,{RECURRENCE}",
    device: Annotated[str, typer.Option(metavar="DEV", help="cpu or cuda.")] = "cpu",
    threads: Annotated[int | None, typer.Option(min=1, metavar="N", help="CPU threads, one CPU for each.")] = None,
    repeats: Annotated[int, typer.Option(min=1, metavar="N", help="Timed rounds; variants run in turn.")] = 20,
    warmup: Annotated[int, typer.Option(min=0, metavar="N", help="Rounds before them.")] = 2,
    cold_mb: Annotated[
        float, typer.Option(min=0.01, metavar="MB", help="Slots rotate over so much: more than the caches hold.")
    ] = 400,
    prompt_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Length of each prompt of prefill.")] = 512,
    model_folder: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="The model of generate, as transformers saves it.")
    ] = None,
    new_tokens: Annotated[int, typer.Option(min=1, metavar="N", help="Tokens that generate makes.")] = 64,
    out: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the results there, as JSON.")] = None,
    json: Json = False,
) -> None:
    """Time workloads; exit 1 if a kernel fails its check.

    Workloads: decode, verify-2 -4 -8 -16, fold (fold-1 -2 -8 -16), steady (steady-1 -2 -8 -16), materialize, commit,
    adapter, prefill, generate.

    Each variant is first compared with a float64 recurrence on the buffers that are then timed; one that is wrong is
    not timed. On cuda a graph with a call for every group of slots is replayed; on the CPU each call is timed.
    """
    with errors_as_exit_codes():
        names = list(dict.fromkeys(workloads or DEFAULT))
        unknown = [name for name in names if name not in (*WORKLOADS, GENERATE)]
        if unknown:
            raise ArgumentError(f"bench run: expected workloads among {', '.join(WORKLOADS)}, {GENERATE}, "
                                f"got {', '.join(unknown)}")  # fmt: skip
        if GENERATE in names and model_folder is None:
            raise ArgumentError("bench run: generate needs --model-folder, a model as transformers saves it")
        _check_out(out)
        where = check_device(device)
        if where.type not in ("cpu", "cuda"):
            raise ArgumentError(f"--device: expected cpu or cuda, got {device!r}")
        plan = Plan(
            workloads=tuple(name for name in names if name != GENERATE),
            layers=_custom(shape) if shape is not None else _layers(_split(model), _numbers("--tp", tp)),
            batches=_numbers("--batch", batch),
            dtypes=_dtypes(io, state, ring),
            variants=_variants(variants),
            device=where,
            threads=default_threads() if threads is None else threads,
            repeats=repeats,
            warmup=warmup,
            cold_bytes=int(cold_mb * 1e6),
            prompt_tokens=prompt_tokens,
        )
        report = Report("bench", command=shlex.join(["replaystate", *_words(context)]))
        with _progress() as progress:
            if plan.workloads:
                run(plan, report, progress)
            if GENERATE in names and model_folder is not None:
                progress(0, 1, f"generate, {model_folder.name}")
                _generate(model_folder, where, new_tokens, repeats, warmup, report)
                progress(1, 1, "done")
        document = report.to_dict()
        if out is not None:
            report.write(out)
    if json:
        output.write_json({"command": "bench run", **{k: v for k, v in document.items() if k != "command"},
                           "command_line": document["command"]})  # fmt: skip
    else:
        output.print_bench(document)
    missed = [check for check in report.checks if not check.met]
    for check in missed:
        output.note(f"not timed, wrong: {check.name} {check.value:.3g}, expected {check.target}")
    if missed:
        raise typer.Exit(Exit.FAILED)


@bench_app.command("compare", short_help="Tell whether anything got slower.")
def compare_command(
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="BEFORE.json AFTER.json | -- RUN-ARGUMENTS...", show_default=False)
    ] = None,
    ref: Annotated[
        str | None, typer.Option(metavar="COMMIT", help="Run this commit and this tree in turn, instead of two files.")
    ] = None,
    rounds: Annotated[int, typer.Option(min=1, metavar="N", help="With --ref: runs of each tree.")] = 3,
    threshold: Annotated[
        float, typer.Option(min=0.0, metavar="SHARE", help="Smallest change of a median that counts.")
    ] = 0.05,
    json: Json = False,
) -> None:
    """Compare two files of results; exit 1 if anything got slower.

    A time counts as slower when its median rose by more than the threshold and by more than the noise: the mean of the
    two interquartile distances, or the change of what does not depend on our kernels (a copy, plain torch).

    With --ref: the commit is checked out in a temporary git worktree, and `bench run` with the arguments after -- runs
    there and here in turn, e.g. replaystate bench compare --ref main -- steady --batch 8.
    """
    with errors_as_exit_codes():
        words = arguments or []
        if ref is not None:
            before, after = run_against(ref, words, rounds, output.note)
        elif len(words) == 2:
            before, after = (read_results(Path(word)) for word in words)
        else:
            raise ArgumentError(
                f"bench compare: expected two files of results, or --ref COMMIT, got {len(words)} files"
            )
        found = compare(before, after, threshold)
        if not found.same_device:
            output.note(f"the devices differ: {before.device}; {after.device}")
    if json:
        output.write_json(_comparison_json(found, before.source, after.source, threshold))
    else:
        output.print_comparison(found, before.source, after.source)
    if found.slower:
        raise typer.Exit(Exit.FAILED)


@bench_app.command("report", short_help="Draw results as one HTML page.")
def report_command(
    results: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Files of results.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="PAGE", help="The page to write.")],
    json: Json = False,
) -> None:
    """Draw files of results as one HTML page that needs nothing else: no network, no script, light and dark."""
    with errors_as_exit_codes():
        _check_out(out)
        found = [read_results(path) for path in results]
        try:
            out.write_text(page(found), encoding="utf-8")
        except OSError as error:
            raise ArgumentError(f"--out: {out} cannot be written: {error.strerror}") from error
    if json:
        times = [{"file": file.source, "device": file.device, "times": len(file.results)} for file in found]
        output.write_json({"command": "bench report", "page": str(out), "files": times})
    else:
        output.note(f"wrote {out}")


def _words(context: typer.Context) -> list[str]:
    """The arguments of this command line."""
    words = context.find_root().obj
    return list(words) if words is not None else ["bench", "run"]


def _comparison_json(found: Comparison, before: str, after: str, threshold: float) -> dict[str, Any]:
    return {
        "command": "bench compare",
        "ok": not found.slower,
        "before": before,
        "after": after,
        "threshold": threshold,
        "same_device": found.same_device,
        "drift": None if found.drift is None else round(found.drift, 4),
        "changes": [
            {
                "case": change.title,
                "before_us": change.before_us,
                "after_us": change.after_us,
                "change": round(change.change, 4),
                "noise": None if change.noise is None else round(change.noise, 4),
                "verdict": change.verdict,
            }
            for change in found.changes
        ],
        "only_before": list(found.only_before),
        "only_after": list(found.only_after),
    }


@contextmanager
def _progress() -> Iterator[Callable[[int, int, str], None]]:
    """A bar on stderr where that is a terminal, else a line for each step."""
    if not sys.stderr.isatty():
        yield lambda done, total, what: output.note(f"{done + 1} of {total}: {what}") if done < total else None
        return
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=output.progress_console(), transient=True) as bar:
        task = bar.add_task("bench")

        def show(done: int, total: int, what: str) -> None:
            bar.update(task, completed=done, total=total, description=what)

        yield show


def _check_out(out: Path | None) -> None:
    """Before anything slow happens: make the folder, and see that the file can be written."""
    if out is None:
        return
    if out.is_dir():
        raise ArgumentError(f"--out: {out} is a folder")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(f"--out: {out.parent} is no folder and cannot be made: {error.strerror}") from error
    there = out.exists()
    try:
        out.open("a").close()
    except OSError as error:
        raise ArgumentError(f"--out: {out} cannot be written: {error.strerror}") from error
    if not there:
        out.unlink()


def _split(text: str) -> list[str]:
    return [word for word in (part.strip() for part in text.split(",")) if word]


def _numbers(option: str, text: str) -> tuple[int, ...]:
    words = _split(text)
    if not words or not all(word.isdecimal() and int(word) >= 1 for word in words):
        raise ArgumentError(f"{option}: expected numbers of 1 or more with commas between, got {text!r}")
    return tuple(dict.fromkeys(map(int, words)))


def _variants(text: str) -> tuple[str, ...]:
    names = tuple(dict.fromkeys(_split(text)))
    if not names:
        raise ArgumentError("--variants: expected at least one name")
    return names


def _dtypes(io: str, state: str, ring: str) -> tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]:
    found = []
    for io_dtype, state_dtype, ring_name in product(_dtype("--io", io), _dtype("--state", state), _split(ring)):
        if ring_name == "auto":
            ring_dtype = torch.float32 if state_dtype == torch.float32 else torch.float16
        else:
            ring_dtype = _dtype("--ring", ring_name)[0]
        found.append((io_dtype, state_dtype, ring_dtype))
    if not found:
        raise ArgumentError("--ring: expected at least one dtype")
    return tuple(dict.fromkeys(found))


def _dtype(option: str, text: str) -> list[torch.dtype]:
    words = _split(text)
    if not words or any(word not in DTYPES for word in words):
        raise ArgumentError(f"{option}: expected some of {', '.join(DTYPES)} with commas between, got {text!r}")
    return [DTYPES[word] for word in words]


def _custom(text: str) -> tuple[Layer, ...]:
    words = _split(text)
    if len(words) != 4 or not all(word.isdecimal() for word in words):
        raise ArgumentError(f"--shape: expected four numbers H,HV,K,V, got {text!r}")
    H, HV, K, V = map(int, words)
    return (Layer(f"H={H} HV={HV} K={K} V={V}", 1, GDNShape(H, HV, K, V), 1),)


def _layers(names: Sequence[str], tps: Sequence[int]) -> tuple[Layer, ...]:
    """Each model on each number of devices."""
    if not names:
        raise ArgumentError("--model: expected at least one name")
    models = [load_model_shape(name) for name in names]
    return tuple(Layer(model.name, tp, model.shard(tp).gdn, model.num_gdn_layers) for model in models for tp in tps)


def _generate(folder: Path, device: torch.device, new_tokens: int, repeats: int, warmup: int, report: Report) -> None:
    """Load the model and time it."""
    check_folder("--model-folder", folder)
    with quiet_transformers():
        hf = integration()
        tokenizer = load_tokenizer("--model-folder", folder)
        dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
        model = load_model("--model-folder", folder, dtype, device, only_gdn=True)
        ids = tokenizer(PROMPT, return_tensors="pt").to(device)["input_ids"]
        name = folder.resolve().name if folder.resolve().name != "model" else folder.resolve().parent.name
        run_generate(
            model, hf, ids, report, about={"model": name, "io": str(dtype).removeprefix("torch.")},
            new_tokens=new_tokens, window=16, max_query_len=8, repeats=repeats, warmup=warmup,
        )  # fmt: skip

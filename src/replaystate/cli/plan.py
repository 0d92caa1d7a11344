"""`replaystate plan`: its options, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from ..errors import ArgumentError
from ..models import MODELS, load_model_shape
from ..plan import CACHE_BYTES, DEVICES, DTYPES, WEIGHT_BYTES, Plan, Setting, concurrency_chart, find_device, make_plan
from . import output
from .common import Json, errors_as_exit_codes

MIB = 2**20

Model = Annotated[
    str, typer.Option(metavar="NAME", help=f"{', '.join(MODELS)}, or the path of a config.json or its folder.")
]
DeviceName = Annotated[str, typer.Option("--device", metavar="NAME", help=f"{', '.join(DEVICES)}.")]
Tp = Annotated[int, typer.Option(metavar="N", help="Devices that the model is split over.")]
Drafts = Annotated[int, typer.Option(metavar="D", help="Drafted tokens a step; a step runs D + 1 a row.")]
Acceptance = Annotated[
    str,
    typer.Option(metavar="P[,P...]", help="Probability that a draft is accepted, by position; the last one repeats."),
]
StateDtype = Annotated[str, typer.Option(metavar="DTYPE", help=f"Checkpoints: {', '.join(DTYPES)}.")]
NativeStateDtype = Annotated[
    str | None, typer.Option(metavar="DTYPE", help="States without replay; default: as --state-dtype.")
]
RingDtype = Annotated[str, typer.Option(metavar="DTYPE", help="k and u rings.")]
KvDtype = Annotated[str, typer.Option(metavar="DTYPE", help=f"Attention KV cache: {', '.join(CACHE_BYTES)}.")]
WeightDtype = Annotated[str, typer.Option(metavar="DTYPE", help=f"Weights: {', '.join(WEIGHT_BYTES)}.")]
Window = Annotated[int | None, typer.Option(metavar="W", help="Tokens between folds; default: the best one.")]
MemoryShare = Annotated[float, typer.Option(metavar="X", help="Part of the memory for weights and requests.")]
MemoryGb = Annotated[float | None, typer.Option(metavar="GB", help="Memory of a device, instead of the table's.")]
BandwidthShare = Annotated[
    float, typer.Option(metavar="X", help="Part of peak bandwidth that kernels reach; 1: times are lower bounds.")
]
OverheadUs = Annotated[
    float, typer.Option(metavar="US", help="Time of a step that bytes do not explain: launches, drafting, sampling.")
]


def plan_command(
    model: Model,
    device: DeviceName,
    tp: Tp = 1,
    context: Annotated[int, typer.Option(metavar="TOKENS", help="Tokens that a request holds.")] = 8192,
    drafts: Drafts = 3,
    acceptance: Acceptance = "0.7",
    state_dtype: StateDtype = "float16",
    ring_dtype: RingDtype = "float16",
    native_state_dtype: NativeStateDtype = None,
    kv_dtype: KvDtype = "bfloat16",
    weight_dtype: WeightDtype = "bfloat16",
    window: Window = None,
    batch: Annotated[
        int | None, typer.Option(metavar="ROWS", help="Compare with so many requests; default: as many as fit.")
    ] = None,
    memory_share: MemoryShare = 0.9,
    memory_gb: MemoryGb = None,
    bandwidth_share: BandwidthShare = 1.0,
    overhead_us: OverheadUs = 0.0,
    plot: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw concurrency against draft length, as SVG.")
    ] = None,
    json: Json = False,
) -> None:
    """Say what a model's requests take on a device, how many fit, how fast steps can be, and whether replay pays.

    "native" is an engine that keeps a state per draft. Times are a roofline: bytes over bandwidth, or operations over
    peak arithmetic, whichever is longer. Nothing is measured or downloaded.
    """
    with errors_as_exit_codes():
        setting = read_setting(
            model,
            device,
            acceptance,
            memory_gb=memory_gb,
            tp=tp,
            context_tokens=context,
            drafts=drafts,
            state_dtype=state_dtype,
            ring_dtype=ring_dtype,
            native_state_dtype=native_state_dtype or state_dtype,
            kv_dtype=kv_dtype,
            weight_dtype=weight_dtype,
            memory_share=memory_share,
            bandwidth_share=bandwidth_share,
            overhead_us=overhead_us,
        )
        plan = make_plan(setting, window=window, rows=batch)
        if plot is not None:
            _write(plot, concurrency_chart(plan))
    if json:
        output.write_json(plan.as_json())
    else:
        print_plan(plan)


def read_setting(
    model: str,
    device: str,
    acceptance: str,
    *,
    memory_gb: float | None,
    drafts: int,
    window: int | None = None,
    **options: Any,
) -> Setting:
    """A setting from options as they are written on the command line.

    Raises:
        ArgumentError: what no plan can be made for, named.
    """
    chosen = find_device(device)
    if memory_gb is not None:
        if not 0 < memory_gb < 1e9:
            raise ArgumentError(f"plan: memory_gb: expected a positive number of gigabytes, got {memory_gb:g}")
        chosen = replace(chosen, memory_bytes=memory_gb * 1e9)
    if drafts < 0:
        raise ArgumentError(f"plan: drafts: expected at least 0, got {drafts}")
    if window is None:
        window = 1 << drafts.bit_length()  # the smallest that holds a step; the caller looks for the best one
    shape, accepts = load_model_shape(model), numbers("acceptance", acceptance)
    return Setting(shape, chosen, drafts=drafts, acceptance=accepts, window=window, **options)


def numbers(name: str, text: str) -> tuple[float, ...]:
    """Numbers with commas between.

    Raises:
        ArgumentError: something else.
    """
    try:
        return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise ArgumentError(f"{name}: expected numbers with commas between, got {text!r}") from None


def print_plan(plan: Plan) -> None:
    """The plan for people."""
    s, console = plan.setting, output.results()
    devices = f"{s.tp} x {s.device.name}" if s.tp > 1 else s.device.name
    console.print(f"{s.model.name} on {devices}", style="bold", markup=False)
    console.print(
        f"{s.context_tokens} tokens a request; {s.drafts} drafts, {s.tokens_per_step:.2f} tokens kept of a step\n"
        f"window {s.window}, ring of {s.ring_slots}; states {s.state_dtype}, native {s.native_state_dtype}, "
        f"rings {s.ring_dtype}",
        markup=False,
        soft_wrap=True,
    )
    console.print()
    _print_sides(console, plan)
    _print_windows(console, plan)
    _print_lengths(console, plan)
    word = "worth it" if plan.verdict.worth else "NOT worth it"
    console.print(f"Replay is {word}:", style="bold green" if plan.verdict.worth else "bold red")
    for reason in plan.verdict.reasons:
        console.print(f"  {reason}", markup=False, soft_wrap=True)
    if plan.break_even_rows is None:
        console.print("  no batch that native can hold gains 3 %")
    else:
        console.print(f"  steps are 3 % faster from {plan.break_even_rows} requests on")
    console.print("Times are a roofline, not measured; see `replaystate plan --help`.")


def _print_sides(console: Console, plan: Plan) -> None:
    native, replay, sizes = plan.native, plan.replay, plan.bytes
    weights, left = _gb(plan.weight_bytes), _gb(plan.request_memory_bytes)
    output.print_rows(
        console,
        ("", "native", "replay"),
        (
            ("weights" + (", each device" if plan.setting.tp > 1 else ""), weights, weights),
            ("left for requests", left, left),
            ("one request", _mib(sizes.native), _mib(sizes.replay)),
            ("  attention KV", _mib(sizes.kv), _mib(sizes.kv)),
            ("  convolutions", _mib(sizes.conv), _mib(sizes.conv)),
            ("  states", _mib(sizes.native_states), _mib(sizes.checkpoint)),
            ("  rings", "-", _mib(sizes.rings)),
            ("requests that fit", f"{native.max_requests}", f"{replay.max_requests}"),
            ("a step with requests", f"{native.rows}", f"{replay.rows}"),
            ("  its time", _ms(native.step_us), _ms(replay.step_us)),
            ("  its Gated DeltaNet part", _ms(native.gdn_us), _ms(replay.gdn_us)),
            ("  tokens/s", f"{native.tokens_per_s:,.0f}", f"{replay.tokens_per_s:,.0f}"),
            ("  tokens/s of that part", f"{native.gdn_tokens_per_s:,.0f}", f"{replay.gdn_tokens_per_s:,.0f}"),
            ("tokens/s, all that fit", f"{native.most_tokens_per_s:,.0f}", f"{replay.most_tokens_per_s:,.0f}"),
        ),
    )


def _print_windows(console: Console, plan: Plan) -> None:
    output.print_rows(
        console,
        ("window", "rings", "steps that fold", "GDN bytes a token", "fit"),
        (
            (
                f"{'* ' if choice.window == plan.setting.window else ''}{choice.window}",
                _mib(choice.ring_bytes),
                f"{choice.fold_share:.1%}",
                _mib(choice.gdn_bytes_per_token),
                f"{choice.max_requests}",
            )
            for choice in plan.windows
        ),
    )


def _print_lengths(console: Console, plan: Plan) -> None:
    output.print_rows(
        console,
        ("drafts", "tokens/step", "fit: native", "replay", "tokens/s: native", "replay"),
        (
            (
                f"{'* ' if length.drafts == plan.best_drafts else ''}{length.drafts}",
                f"{length.tokens_per_step:.2f}",
                f"{length.native.max_requests}",
                f"{length.replay.max_requests}",
                f"{length.native.most_tokens_per_s:,.0f}",
                f"{length.replay.most_tokens_per_s:,.0f}",
            )
            for length in plan.draft_lengths
        ),
    )


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ArgumentError(f"plot: {path}: {error.strerror or error}") from None


def _gb(count: float) -> str:
    return f"{count / 1e9:.1f} GB"


def _mib(count: float) -> str:
    return f"{count / MIB:.1f} MiB"


def _ms(microseconds: float) -> str:
    return f"{microseconds / 1e3:.2f} ms"

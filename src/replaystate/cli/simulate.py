"""`replaystate simulate`: its options, and what it prints."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer

from ..errors import ArgumentError
from ..plan import best_window
from . import output
from .common import Json, errors_as_exit_codes
from .plan import (
    Acceptance,
    BandwidthShare,
    DeviceName,
    Drafts,
    KvDtype,
    MemoryGb,
    MemoryShare,
    Model,
    NativeStateDtype,
    OverheadUs,
    RingDtype,
    StateDtype,
    Tp,
    WeightDtype,
    Window,
    read_setting,
)

SYNTHETIC_REQUESTS = 10_000
WINDOW_CONTEXT = 1
"""The context of the setting: the simulation counts the tokens of each request instead."""


def simulate_command(
    model: Model,
    device: DeviceName,
    trace: Annotated[
        str,
        typer.Option(metavar="NAME|FILE", help="chat, code, documents, reasoning (made up), or a file of JSON lines."),
    ] = "chat",
    rate: Annotated[
        float | None,
        typer.Option(metavar="R", help="Requests a second, as a Poisson stream; default: the file's times."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(metavar="N", help=f"Requests; default: {SYNTHETIC_REQUESTS}, or the whole file.")
    ] = None,
    replicas: Annotated[int, typer.Option(metavar="N", help="Copies of the model, of --tp devices each.")] = 1,
    router: Annotated[str, typer.Option(metavar="NAME", help="least-loaded or round-robin.")] = "least-loaded",
    max_rows: Annotated[int, typer.Option(metavar="N", help="Requests that run at once in a replica.")] = 256,
    token_budget: Annotated[int, typer.Option(metavar="N", help="Tokens of a step, decoded and of prompts.")] = 8192,
    ttft_ms: Annotated[
        float | None, typer.Option(metavar="MS", help="With --tpot-ms: look for the fewest replicas that keep both.")
    ] = None,
    tpot_ms: Annotated[float | None, typer.Option(metavar="MS", help="Limit of the time per token.")] = None,
    percentile: Annotated[int, typer.Option(metavar="P", help="Of the two limits: 50, 90 or 99.")] = 99,
    step_times: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Measured step times, for both designs, instead of the roofline."),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="Of arrivals, lengths and acceptances.")] = 0,
    tp: Tp = 1,
    drafts: Drafts = 3,
    acceptance: Acceptance = "0.7",
    state_dtype: StateDtype = "float16",
    ring_dtype: RingDtype = "float16",
    native_state_dtype: NativeStateDtype = None,
    kv_dtype: KvDtype = "bfloat16",
    weight_dtype: WeightDtype = "bfloat16",
    window: Window = None,
    memory_share: MemoryShare = 0.9,
    memory_gb: MemoryGb = None,
    bandwidth_share: BandwidthShare = 1.0,
    overhead_us: OverheadUs = 0.0,
    json: Json = False,
) -> None:
    """Simulate a fleet that serves a model, with replay and without, request by request.

    Continuous batching with a token budget, prefix hits, memory limits with preemption, a router before the replicas.
    The same options and seed give the same figures to the bit. With --ttft-ms and --tpot-ms: the replicas, and so the
    GPUs, that a load needs.
    """
    with errors_as_exit_codes():
        from .. import simulate as sim  # needs an extra of its own

        setting = read_setting(
            model,
            device,
            acceptance,
            memory_gb=memory_gb,
            tp=tp,
            context_tokens=WINDOW_CONTEXT,
            drafts=drafts,
            state_dtype=state_dtype,
            ring_dtype=ring_dtype,
            native_state_dtype=native_state_dtype or state_dtype,
            kv_dtype=kv_dtype,
            weight_dtype=weight_dtype,
            memory_share=memory_share,
            bandwidth_share=bandwidth_share,
            overhead_us=overhead_us,
            window=window,
        )
        if window is None:
            setting = replace(setting, window=best_window(setting))
        study = sim.Study(
            _workload(sim, trace, rate, requests, seed),
            setting,
            replay=True,
            seed=seed,
            max_rows=max_rows,
            token_budget=token_budget,
            router=router,
            times=None if step_times is None else sim.read_measured(step_times),
        )
        found: dict[str, Any] = {}
        for name, side in zip(("native", "replay"), sim.both(study), strict=True):
            if ttft_ms is None and tpot_ms is None:
                found[name] = side.run(replicas)
            elif ttft_ms is None or tpot_ms is None:
                raise ArgumentError("simulate: expected both --ttft-ms and --tpot-ms, or neither")
            else:
                found[name] = side.replicas_for(ttft_s=ttft_ms / 1e3, tpot_s=tpot_ms / 1e3, percentile=percentile)
    if json:
        output.write_json(
            {
                "command": "simulate",
                "model": setting.model.name,
                "device": setting.device.name,
                "tp": tp,
                "drafts": drafts,
                "acceptance": list(setting.acceptance),
                "window": setting.window,
                "trace": study.workload.name,
                "seed": seed,
                "limits": None
                if ttft_ms is None
                else {"ttft_ms": ttft_ms, "tpot_ms": tpot_ms, "percentile": percentile},
                **{name: None if it is None else it.as_json() for name, it in found.items()},
            }
        )
    else:
        _print(f"{setting.model.name} on {device}, {study.workload.name}", found)


def _workload(sim: Any, trace: str, rate: float | None, requests: int | None, seed: int) -> Any:
    if requests is not None and requests < 1:
        raise ArgumentError(f"simulate: requests: expected at least 1, got {requests}")
    if not 0 <= seed < 2**62:
        raise ArgumentError(f"simulate: seed: expected a number from 0 to 2**62 - 1, got {seed}")
    if trace in sim.TRACES:
        if rate is None:
            raise ArgumentError(f"simulate: rate: expected requests a second with the made-up trace {trace!r}")
        return sim.synthetic(trace, requests or SYNTHETIC_REQUESTS, rate, seed)
    return sim.read_trace(Path(trace), rate=rate, requests=requests, seed=seed)


def _print(title: str, found: dict[str, Any]) -> None:
    console = output.results()
    console.print(title, style="bold", markup=False, soft_wrap=True)
    sides = [it.as_json() if it is not None else None for it in found.values()]

    def row(name: str, show: Any) -> tuple[str, ...]:
        return (name, *("-" if side is None else show(side) for side in sides))

    rows = [
        row("replicas", lambda s: f"{s['replicas']}"),
        row("GPUs", lambda s: f"{s['gpus']}"),
        row("requests", lambda s: f"{s['requests']}"),
        row("  that no replica can hold", lambda s: f"{s['rejected']}"),
        row("time simulated", lambda s: f"{s['seconds']:.1f} s"),
        row("tokens/s", lambda s: f"{s['tokens_per_s']:,.0f}"),
        row("  of a GPU", lambda s: f"{s['tokens_per_s_per_gpu']:,.0f}"),
    ]
    for key, name in (
        ("ttft_s", "time to first token"),
        ("itl_s", "between deliveries"),
        ("tpot_s", "time per token"),
        ("latency_s", "whole request"),
    ):
        for part in ("p50", "p99"):
            rows.append(row(f"{name}, {part}", lambda s, k=key, p=part: f"{s[k][p] * 1e3:,.1f} ms"))
    rows += [
        row("preemptions", lambda s: f"{s['preemptions']}"),
        row("prefix hits", lambda s: f"{s['prefix_hit_rate']:.0%}"),
        row("requests in a step", lambda s: f"{s['rows_per_step']:.1f}"),
        row("replicas are busy", lambda s: f"{s['busy_share']:.0%}"),
    ]
    output.print_rows(console, ("", *found), rows)
    if None in found.values():
        console.print("-: no number of replicas that was tried keeps the limits")

"""`replaystate bench run`: every workload at every size, checked first, then all variants timed in turn."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import BackendError, ReplayStateError
from ..kernels import Call, select
from ..shapes import GDNShape
from .cases import Case, Settings
from .gate import Error
from .report import Check, Report
from .timer import Candidate, Timing, measure, measure_graphs, pinned_threads
from .workloads import RECURRENCE, Workload, workload

COPY = "copy"
AUTO = "auto"
HIGHEST = 1e30
"""Written for an infinite error: JSON has no infinity."""


@dataclass(frozen=True)
class Layer:
    """Sizes to run at: a model's GDN layer on one of `tp` devices.

    Args:
        model: the model's name.
        tp: over how many devices its heads are split.
        shape: what one of them holds.
        layers: GDN layers of the model.
    """

    model: str
    tp: int
    shape: GDNShape
    layers: int


@dataclass(frozen=True)
class Plan:
    """What to run.

    Args:
        workloads: names.
        layers: sizes.
        batches: numbers of rows.
        dtypes: (io, state, ring), each combination.
        variants: names of backends, "auto" for the best that can, and "recurrence" for the baseline.
        device: of torch.
        threads: CPU threads.
        repeats, warmup: timed rounds, and rounds before them.
        cold_bytes: slots rotate over at least so many bytes.
        prompt_tokens: of each prompt of the workload prefill.
        seed: of the made-up values.
    """

    workloads: tuple[str, ...]
    layers: tuple[Layer, ...]
    batches: tuple[int, ...]
    dtypes: tuple[tuple[torch.dtype, torch.dtype, torch.dtype], ...]
    variants: tuple[str, ...]
    device: torch.device
    threads: int
    repeats: int
    warmup: int
    cold_bytes: int
    prompt_tokens: int
    seed: int = 0

    def points(self) -> Iterator[tuple[Workload, Layer, Settings]]:
        """One for each line of interleaved variants."""
        for name in self.workloads:
            for layer in self.layers:
                for io, state, ring in self.dtypes:
                    for rows in self.batches:
                        yield (
                            workload(name), layer,
                            Settings(layer.shape, layer.layers, rows, io, state, ring, self.device, self.cold_bytes,
                                     self.prompt_tokens),
                        )  # fmt: skip


def run(plan: Plan, report: Report, progress: Callable[[int, int, str], None] | None = None) -> None:
    """Check and time everything of the plan, into the report.

    A variant that fails its gate is not timed, and becomes a check that is not met; the gate of one that passes stands
    beside its time. One that cannot run here is listed under `skipped` with its reason.

    Args:
        plan: what to run.
        report: gets results, checks and skipped.
        progress: called with (points done, points in all, what comes next).

    Raises:
        ArgumentError: an unknown workload or backend, or more threads than CPUs.
        BackendError: nothing at all could run.
    """
    points = list(plan.points())
    with pinned_threads(plan.threads) if plan.device.type == "cpu" else nullcontext():
        report.threads = torch.get_num_threads()
        for number, (work, layer, settings) in enumerate(points):
            if progress is not None:
                progress(number, len(points), f"{work.name}, {layer.model} tp {layer.tp}, {settings.rows} rows")
            torch.manual_seed(plan.seed)
            _run_point(plan, work, layer, settings, report)
    if progress is not None:
        progress(len(points), len(points), "done")
    if not report.results and not report.checks:
        reasons = dict.fromkeys(skip["reason"] for skip in report.skipped)
        raise BackendError(f"bench run: nothing could run: {'; '.join(reasons)}")


def _run_point(plan: Plan, work: Workload, layer: Layer, settings: Settings, report: Report) -> None:
    H, HV, K, V = settings.shape.sizes
    about: dict[str, Any] = {
        "model": layer.model, "tp": layer.tp, "H": H, "HV": HV, "K": K, "V": V, "rows": settings.rows,
        "io": _name(settings.io), "state": _name(settings.state), "ring": _name(settings.ring), **work.parameters,
    }  # fmt: skip
    if work.name == "commit":
        about["layers"] = settings.layers
    if work.name == "prefill":
        about["prompt_tokens"] = settings.prompt_tokens
    cases: dict[str, Case] = {}
    gates: dict[str, Error] = {}
    for variant in plan.variants:
        if variant == RECURRENCE and work.baseline is None:
            continue
        try:
            name, case = _make(work, settings, variant)
            errors = case.check()
        except (BackendError, torch.OutOfMemoryError, _TooLargeError) as error:
            reason = " ".join(str(error).split())
            report.skipped.append({"name": work.name, **about, "what": variant, "reason": reason})
            continue
        worst = max(errors, key=lambda error: error.error / max(error.limit, 1e-30))
        if worst.ok:
            cases[name], gates[name] = case, worst
        else:
            title = f"{work.name}, {layer.model} tp {layer.tp}, {settings.rows} rows, {name}: {worst.quantity} error"
            report.checks.append(Check(title, f"<= {worst.limit:.3g}", min(worst.error, HIGHEST), False))
    if not cases:
        return
    times, copy = _time(plan, settings, cases)
    for name, case in cases.items():
        speed = case.model.total / times[name].median_us / 1e3
        report.add(
            work.name, what=name, device=settings.device.type, **about, time=times[name], bytes=case.model,
            model_bytes=case.model.total, gb_per_s=_digits(speed), copy_gb_per_s=_digits(copy),
            of_copy=_digits(speed / copy), gate=dict(gates[name]._asdict()), groups=case.groups,
        )  # fmt: skip


class _TooLargeError(ReplayStateError):
    """The buffers of a case would not leave half of the memory free."""


def _make(work: Workload, settings: Settings, variant: str) -> tuple[str, Case]:
    """The case and the name of its variant: "auto" becomes the backend's."""
    if variant == RECURRENCE and work.baseline is not None:
        _check_memory(settings, 4 * int(work.parameters.get("T", 1)))
        return RECURRENCE, work.baseline(settings)
    _check_memory(settings, 2 * settings.state.itemsize)
    H, HV, K, V = settings.shape.sizes
    sizes, io, state, ring = (H, HV, K, V), settings.io, settings.state, settings.ring
    T, W = int(work.parameters.get("T", 0)), int(work.parameters.get("W", 0))
    op, wanted = ("replay_step", AUTO) if work.op == "adapter" else (work.op, variant)
    backend = select(wanted, Call(op, settings.device.type, io, state, ring, sizes, W, T)).NAME
    if work.op == "adapter" and variant not in (AUTO, backend):
        raise BackendError(f"the adapter takes backend {backend!r} here, not {variant!r}")
    if backend == "torch" and settings.device.type == "cuda":
        raise BackendError("backend 'torch' waits for the host and cannot be captured in a CUDA graph")
    return backend, work.make(settings, backend)


def _check_memory(settings: Settings, bytes_per_element: int) -> None:
    """Refuse what would swap: two groups of slots are the least that a case rotates over."""
    _, HV, K, V = settings.shape.sizes
    needed = max(2 * settings.rows * HV * K * V * bytes_per_element, 2 * settings.cold_bytes)
    free = free_memory(settings.device)
    if free is not None and needed > 0.7 * free:
        raise _TooLargeError(f"needs about {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free")


def free_memory(device: torch.device) -> int | None:
    """Bytes; None where the system does not say."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    try:
        with open("/proc/meminfo") as lines:
            return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable"))
    except (OSError, StopIteration):
        return None


DEVICE_COPY_BYTES = 4 << 30
"""Read and written by the copy on a GPU, where a small one does not reach the bandwidth: 0.5 GB reach 3.7 TB/s of an
H200, 4 GB 4.2."""


def _time(plan: Plan, settings: Settings, cases: dict[str, Case]) -> tuple[dict[str, Timing], float]:
    """All cases and a copy of memory, in turn; and the copy's GB/s, bytes read and written."""
    on_gpu = settings.device.type == "cuda"
    moved = min(DEVICE_COPY_BYTES, (free_memory(settings.device) or 0) // 4) if on_gpu else plan.cold_bytes
    source = torch.ones(max(1 << 14, moved // 8), device=settings.device)
    target = torch.empty_like(source)
    if on_gpu:
        graphs: dict[str, tuple[Callable[[], object], int]] = {
            name: (_all_groups(case), case.groups) for name, case in cases.items()
        }
        graphs[COPY] = (lambda: torch.mul(source, 1.5, out=target), 1)
        times = measure_graphs(graphs, repeats=plan.repeats, warmup=plan.warmup)
    else:
        calls: dict[str, Candidate] = {name: (case.prepare, case.run) for name, case in cases.items()}
        calls[COPY] = lambda _: target.copy_(source)
        times = measure(calls, repeats=plan.repeats, warmup=plan.warmup)
    return times, 2 * source.nbytes / times[COPY].median_us / 1e3


def _all_groups(case: Case) -> Callable[[], None]:
    def every() -> None:
        case.prepare_all()
        for i in range(case.groups):
            case.run(i)

    return every


def _digits(x: float) -> float:
    return float(f"{x:.4g}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def default_threads() -> int:
    """The CPUs that this process may use, at most torch's threads."""
    cpus = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(torch.get_num_threads(), cpus))

"""Run the checks of every usable backend and collect what they found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, BackendError
from ..kernels import backends
from ..shapes import GDNShape
from .checks import FLOOR, Case, Run, cases
from .scenario import Dtypes

CANNOT = "cannot run this call: "
"""What `replaystate.kernels.select` says before a backend's own reason."""


@dataclass(frozen=True)
class Check:
    """One op at one width in one set of dtypes on one backend, over all shapes.

    Args:
        backend, op: what ran.
        dtypes: of inputs and outputs, checkpoints, and k and u rings.
        width: tokens per row; None for ops without steps.
        quantity: "output" or "state".
        error: largest relative error against float64; infinite when the op raised or wrote what it must not.
        limit: twice the error of plain torch, over all widths and shapes, plus `FLOOR`.
        place: the layer's sizes and the slot where the error was largest.
    """

    backend: str
    op: str
    dtypes: Dtypes
    width: int | None
    quantity: str
    error: float
    limit: float
    place: str

    @property
    def ok(self) -> bool:
        """Whether the error is within the limit."""
        return self.error <= self.limit


@dataclass(frozen=True)
class Skip:
    """An op that a backend says it cannot run, and its reason. Not a failure."""

    backend: str
    op: str
    dtypes: Dtypes
    reason: str


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    device: str
    checks: tuple[Check, ...]
    skipped: tuple[Skip, ...]
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether something ran and every error is within its limit."""
        return bool(self.checks) and all(check.ok for check in self.checks)

    @property
    def failures(self) -> tuple[Check, ...]:
        """The checks that missed their limits."""
        return tuple(check for check in self.checks if not check.ok)


def verify(backend: str | None = None, device: str = "cpu", progress: Callable[[str], None] | None = None) -> Report:
    """Check the numerics of backends against float64.

    Args:
        backend: name of one of `replaystate.backends()`; None: every one that is usable here.
        device: where the backends run, e.g. "cuda". The truth is always computed on the CPU.
        progress: called with a line of text before each group of checks.

    Returns:
        The errors and their limits.

    Raises:
        ArgumentError: no backend of this name, or no such device in torch.
        BackendError: the backend asked for, or the device, is not usable on this machine.

    Notes: deterministic (fixed seeds), and about 10 s on one CPU core. torch runs on one thread meanwhile: the tensors are
    small, and threads that wait for each other on a busy machine take minutes.

    >>> report = verify("torch")  # doctest: +SKIP
    >>> report.ok, max(check.error / check.limit for check in report.checks) < 1  # doctest: +SKIP
    (True, True)
    """
    begin = time.perf_counter()
    where = _device(device)
    names = _names(backend)
    checks: list[Check] = []
    skipped: dict[Skip, None] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            finished: list[Case] = []
            last = ""
            for case, run in cases():
                if progress is not None and case.op != last:
                    last = case.op
                    progress(f"verify: backend {name} on {device}: {last}")
                reason = _run(run, case, name, where)
                if reason is None:
                    finished.append(case)
                else:
                    skipped[Skip(name, case.op, case.dtypes, reason)] = None
            checks += _checks(name, finished)
    finally:
        torch.set_num_threads(threads)
    return Report(str(where), tuple(checks), tuple(skipped), time.perf_counter() - begin)


def _run(run: Run, case: Case, backend: str, device: torch.device) -> str | None:
    """Run one case; None, or why the backend says that it cannot run it. Anything else that it raises fails the case."""
    try:
        run(case, backend, device)
    except BackendError as error:
        reason = str(error).partition(CANNOT)[2]
        if reason:
            return reason
        case.fail(f"raised BackendError: {error}")
    except Exception as error:  # a kernel may raise anything, and the other cases must still be run
        case.fail(f"raised {type(error).__name__}: {error}")
    return None


def _names(backend: str | None) -> list[str]:
    known = {info.name: info.reason for info in backends()}
    if backend is None:
        return [name for name, reason in known.items() if reason is None]
    if backend not in known:
        raise ArgumentError(f"verify: backend: expected one of {', '.join(known)}, got {backend!r}")
    reason = known[backend]
    if reason is not None:
        raise BackendError(f"verify: backend {backend!r} is not usable here: {reason}")
    return [backend]


def _device(device: str) -> torch.device:
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(
            f"verify: device: expected a device of torch, e.g. 'cpu' or 'cuda', got {device!r}"
        ) from error
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise BackendError(f"verify: device {device!r} is not usable here: {reason}") from error
    return where


def _checks(backend: str, finished: list[Case]) -> list[Check]:
    """One check for each (op, dtypes, width, quantity): the worst shape against the group's limit."""
    eager: dict[tuple[str, Dtypes, str], float] = {}
    for case in finished:
        for quantity, error in case.eager_errors.items():
            group = (case.op, case.dtypes, quantity)
            eager[group] = max(eager.get(group, 0.0), error)
    worst: dict[tuple[str, Dtypes, int | None, str], Case] = {}
    for case in finished:
        for quantity, error in case.errors.items():
            key = (case.op, case.dtypes, case.width, quantity)
            if key not in worst or error > worst[key].errors[quantity]:
                worst[key] = case
    return [
        Check(
            backend,
            op,
            dtypes,
            width,
            quantity,
            case.errors[quantity],
            2 * eager.get((op, dtypes, quantity), 0.0) + FLOOR,
            f"{_sizes(case.shape)}: {case.places[quantity]}",
        )
        for (op, dtypes, width, quantity), case in worst.items()
    ]


def _sizes(shape: GDNShape) -> str:
    H, HV, K, V = shape.sizes
    return f"H={H} HV={HV} K={K} V={V}"

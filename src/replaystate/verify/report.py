"""Run the checks of every usable backend and collect what they found."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..errors import ArgumentError, BackendError
from ..kernels import Call, backends, select
from ..shapes import GDNShape
from .checks import FLOOR, Case, Run, cases
from .scenario import WINDOW, Dtypes

CANNOT = "cannot run this call: "
"""What `replaystate.kernels.select` says before a backend's own reason."""

EVERY_OP = "every op"


@dataclass(frozen=True)
class Check:
    """One op at one width in one set of dtypes on one backend and device, over all shapes.

    Args:
        backend: what ran.
        device: where.
        op: which op.
        dtypes: of inputs and outputs, checkpoints, and k and u rings.
        width: tokens per row; None for ops without steps.
        quantity: "output" or "state".
        error: largest relative error against float64; infinite when the op raised or wrote what it must not.
        limit: twice the error of plain torch, over all widths and shapes, plus `FLOOR`.
        place: the layer's sizes and the slot where the error was largest.
    """

    backend: str
    device: str
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
    """What a backend says it cannot run, and its reason. Not a failure.

    Args:
        backend: which.
        device: where.
        op: an op, or `EVERY_OP`.
        dtypes: those of the calls; None for `EVERY_OP`.
        reason: the backend's own words.
    """

    backend: str
    device: str
    op: str
    dtypes: Dtypes | None
    reason: str


@dataclass(frozen=True)
class Report:
    """What `verify` found."""

    devices: tuple[str, ...]
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


def verify(
    backend: str | None = None, device: str | None = None, progress: Callable[[str], None] | None = None
) -> Report:
    """Check the numerics of backends against float64.

    Args:
        backend: name of one of `replaystate.backends()`; None: every one that is usable here.
        device: where the backends run, e.g. "cuda"; None: on the CPU, and on the CUDA device where there is one, each
            backend where it can. The truth is always computed on the CPU.
        progress: called with a line of text before each group of checks.

    Returns:
        The errors and their limits.

    Raises:
        ArgumentError: no backend of this name, or no such device in torch.
        BackendError: the backend asked for, or the device, is not usable on this machine.

    Notes: deterministic (fixed seeds), and about 10 s on one CPU core for each backend. torch runs on one thread
    meanwhile: the tensors are small, and threads that wait for each other on a busy machine take minutes.

    >>> report = verify("torch")  # doctest: +SKIP
    >>> report.ok, max(check.error / check.limit for check in report.checks) < 1  # doctest: +SKIP
    (True, True)
    """
    begin = time.perf_counter()
    devices = _devices(device)
    names = _names(backend)
    checks: list[Check] = []
    skipped: dict[Skip, None] = {}
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name in names:
            for where in devices:
                finished, skips = _run_all(name, where, progress)
                checks += _checks(name, where, finished)
                skipped.update(dict.fromkeys(skips))
    finally:
        torch.set_num_threads(threads)
    if device is None:  # a backend that belongs to one device has no business on another
        ran = {check.backend for check in checks}
        skipped = {skip: None for skip in skipped if skip.op != EVERY_OP or skip.backend not in ran}
    return Report(tuple(map(str, devices)), tuple(checks), tuple(skipped), time.perf_counter() - begin)


def _run_all(
    backend: str, device: torch.device, progress: Callable[[str], None] | None
) -> tuple[list[Case], list[Skip]]:
    """Every case on one backend and device: those that ran, and what could not."""
    try:
        select(backend, Call("commit", device.type, None, None, None, (0, 0, 0, 0), WINDOW))
    except BackendError as error:
        return [], [Skip(backend, str(device), EVERY_OP, None, str(error).partition(CANNOT)[2])]
    finished: list[Case] = []
    skips: list[Skip] = []
    last = ""
    for case, run in cases():
        if progress is not None and case.op != last:
            last = case.op
            progress(f"verify: backend {backend} on {device}: {last}")
        reason = _run(run, case, backend, device)
        if reason is None:
            finished.append(case)
        else:
            skips.append(Skip(backend, str(device), case.op, case.dtypes, reason))
    return finished, skips


def _run(run: Run, case: Case, backend: str, device: torch.device) -> str | None:
    """Run one case; None, or why the backend says that it cannot. Anything else that it raises fails the case."""
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


def _devices(device: str | None) -> list[torch.device]:
    if device is not None:
        return [_device(device)]
    return [torch.device("cpu"), *([torch.device("cuda")] if torch.cuda.is_available() else [])]


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


def _checks(backend: str, device: torch.device, finished: list[Case]) -> list[Check]:
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
            str(device),
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

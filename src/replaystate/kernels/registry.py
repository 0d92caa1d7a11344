"""Which backend runs a call, and why not a better one.

A backend says of every call either nothing (it can) or why it cannot. The first in order of preference that can is
taken; the choice is logged once per kind of call. A backend asked for by name either runs or raises with its reason.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, cast

import torch
from torch import Tensor

from ..errors import ArgumentError, BackendError
from . import cpu_backend, cuda, torch_backend

logger = logging.getLogger("replaystate")


@dataclass(frozen=True)
class Call:
    """What a backend must know to say whether it can run an op.

    Args:
        op: name of the op, e.g. "replay_step".
        device_type: "cpu", "cuda", ...
        io_dtype: dtype of q, k, v and the output; None for ops without them.
        state_dtype: dtype of the checkpoints; None for ops without them.
        ring_dtype: dtype of the k and u rings; None for ops without them.
        sizes: (H, HV, K, V).
        window: W; 0 for ops without one.
        executed_width: launch width of a step; 0 for ops without one.
    """

    op: str
    device_type: str
    io_dtype: torch.dtype | None
    state_dtype: torch.dtype | None
    ring_dtype: torch.dtype | None
    sizes: tuple[int, int, int, int]
    window: int = 0
    executed_width: int = 0


class Backend(Protocol):
    """The functions of a backend. Their arguments are those of the ops of the same name, already checked."""

    NAME: str

    def supports(self, call: Call) -> str | None:
        """None when this backend can run the call, else the reason why not."""

    def usable(self) -> str | None:
        """None when this backend runs on this machine, else the reason why not."""

    def replay_step(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        u_ring: Tensor,
        k_ring: Tensor,
        g_ring: Tensor,
        ring_start: Tensor,
        num_committed: Tensor,
        step_records: Tensor,
        status: Tensor,
        out: Tensor,
        state_indices: Tensor,
        query_start_loc: Tensor,
        layer: int,
        executed_width: int,
        window: int,
        null_slot: int,
        scale: float,
    ) -> None:
        """One step of one layer: outputs, appends, folds, step records."""

    def ucache_flush(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        state: Tensor,
        u_cache: Tensor,
        k_cache: Tensor,
        g_cache: Tensor,
        state_indices: Tensor,
        hist_len: Tensor,
        cache_base: Tensor,
        output: Tensor,
        flush_min: int,
        window: int,
        scale: float,
    ) -> None:
        """The same step from padded rows with per-row cursors."""

    def fold_slots(
        self,
        states: list[Tensor],
        u_rings: list[Tensor],
        k_rings: list[Tensor],
        g_rings: list[Tensor],
        src_slots: Tensor,
        dst_slots: Tensor,
        start: Tensor,
        count: Tensor,
        window: int,
        status: Tensor | None,
    ) -> None:
        """Into slot dst of every layer, the state after `count` window rows of slot src; negative slots skip."""

    def read_state(
        self,
        state: Tensor,
        u_ring: Tensor,
        k_ring: Tensor,
        g_ring: Tensor,
        slots: Tensor,
        start: Tensor,
        count: Tensor,
        window: int,
        out: Tensor,
    ) -> None:
        """Into out, float32, the state after `count` window rows of each slot; negative slots skip."""

    def commit(
        self,
        state_indices: Tensor,
        num_accepted: Tensor,
        ring_start: Tensor,
        num_committed: Tensor,
        step_records: Tensor,
        status: Tensor,
        window: int,
        ring_slots: int,
        null_slot: int,
    ) -> None:
        """Publish the cursors of a step."""

    def gated_delta_rule(
        self,
        mixed_qkv: Tensor,
        a: Tensor,
        b: Tensor,
        A_log: Tensor,
        dt_bias: Tensor,
        initial_state: Tensor | None,
        query_start_loc: Tensor,
        out: Tensor,
        final_state: Tensor,
        scale: float,
    ) -> None:
        """Prefill of whole prompts."""


def fused(backend: Backend, op: str) -> Any:
    """The backend's own form of a whole op, cursors and all, or None where it leaves them to the op.

    A device backend has `materialize`, `flush`, `prefix_materialize`, `read_slots`, `adapter_step`, `upkeep` and
    `warmup`, so that no call waits for the host.
    """
    return getattr(backend, op, None)


@dataclass(frozen=True)
class BackendInfo:
    """A backend's name, and why it cannot be used on this machine (None when it can).

    >>> BackendInfo("abacus", "no beads").usable
    False
    """

    name: str
    reason: str | None

    @property
    def usable(self) -> bool:
        """Whether the backend runs here."""
        return self.reason is None


BY_PREFERENCE: tuple[Backend, ...] = (cast("Backend", cuda), cpu_backend, torch_backend)


def backends() -> list[BackendInfo]:
    """Every backend, best first, each with the reason why it is not usable here (None when it is).

    >>> [info.name for info in backends()]
    ['cuda', 'cpu', 'torch']
    """
    return [BackendInfo(backend.NAME, backend.usable()) for backend in BY_PREFERENCE]


def select(name: str, call: Call) -> Backend:
    """The backend that runs the call: the one asked for, or for "auto" the best that can.

    Raises:
        ArgumentError: no backend has this name.
        BackendError: the one asked for, or every one, cannot run the call; with the reasons.
    """
    return _select(name, call)


@lru_cache(maxsize=4096)
def _select(name: str, call: Call) -> Backend:
    if name != "auto":
        for backend in BY_PREFERENCE:
            if backend.NAME == name:
                reason = backend.usable() or backend.supports(call)
                if reason:
                    raise BackendError(f"{call.op}: backend {name!r} was asked for but cannot run this call: {reason}")
                return backend
        known = ", ".join(repr(backend.NAME) for backend in BY_PREFERENCE)
        raise ArgumentError(f"{call.op}: backend: expected 'auto' or one of {known}, got {name!r}")
    passed_over: list[str] = []
    for backend in BY_PREFERENCE:
        reason = backend.usable() or backend.supports(call)
        if reason is None:
            why = f" ({'; '.join(passed_over)})" if passed_over else ""
            logger.info("%s on %s runs on backend %r%s", call.op, call.device_type, backend.NAME, why)
            return backend
        passed_over.append(f"{backend.NAME}: {reason}")
    raise BackendError(f"{call.op}: no backend can run this call: {'; '.join(passed_over)}")

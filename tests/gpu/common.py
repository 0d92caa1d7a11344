"""What the GPU tests share: a cache on the GPU beside one on the CPU that is taken through the same calls.

The CPU cache runs the torch backend with device semantics (clamp and flag instead of raise), so cursors, status words
and records must be equal, and outputs, rings and states close. Before each call the CPU copy is refreshed from the GPU,
so that a tolerance covers one step's arithmetic, never a history of roundings.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, replay_step

# Relative errors (Frobenius) allowed between the two: a few times the rounding of the dtype.
EPS = {torch.float32: 3e-6, torch.float16: 8e-4, torch.bfloat16: 6e-3}


@contextmanager
def device_semantics() -> Iterator[None]:
    """On the CPU too, values are clamped and flagged instead of raising."""
    asking = [m for name, m in list(sys.modules.items()) if name.startswith("replaystate.") and hasattr(m, "on_host")]
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(ReplayCache, "_on_host", return_value=False))
        for module in asking:
            stack.enter_context(mock.patch.object(module, "on_host", return_value=False))
        yield


def relative(x: Tensor, truth: Tensor) -> float:
    x, truth = x.detach().cpu().double(), truth.detach().cpu().double()
    both = torch.isnan(x) & torch.isnan(truth)
    x, truth = torch.where(both, 0.0, x), torch.where(both, 0.0, truth)
    same = x == truth  # infinities of one sign
    x, truth = torch.where(same & torch.isinf(x), 0.0, x), torch.where(same & torch.isinf(truth), 0.0, truth)
    return float((x - truth).norm() / truth.norm().clamp(min=1e-30))


def inputs(
    shape: GDNShape, tokens: int, dtype: torch.dtype, gate_dtype: torch.dtype | None = None, seed: int = 0
) -> list[Tensor]:
    rng = torch.Generator().manual_seed(seed)

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng)

    HV = shape.num_v_heads
    gate = gate_dtype or dtype
    return [
        normal(tokens, shape.qkv_dim).to(dtype),
        (normal(tokens, HV) - 1).to(gate),
        normal(tokens, HV).to(gate),
        (normal(HV) * 0.5 - 1).float(),
        normal(HV).float(),
    ]


def bounds_of(lengths: Sequence[int]) -> Tensor:
    return torch.tensor([0, *lengths]).cumsum(0).int()


def pools(cache: ReplayCache, layer: int) -> tuple[Tensor, ...]:
    return (cache.checkpoint(layer), *cache.rings(layer))


def words(cache: ReplayCache) -> dict[str, Tensor]:
    return {
        "ring_start": cache.ring_start,
        "num_committed": cache.num_committed,
        "status": cache.status,
        "records": cache._step_records,
    }


def snapshot(cache: ReplayCache) -> dict[str, Tensor]:
    held = {name: x.clone() for name, x in words(cache).items()}
    for layer in range(cache.num_layers):
        for name, x in zip("state u k g".split(), pools(cache, layer), strict=True):
            held[f"{name}{layer}"] = x.clone()
    return held


def same_bits(x: Tensor, y: Tensor) -> bool:
    view = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return torch.equal(x.contiguous().view(view), y.contiguous().view(view))


class Pair:
    """A GPU cache and its CPU double."""

    def __init__(self, shape: GDNShape, num_layers: int, num_slots: int, **options: Any) -> None:
        self.shape = shape
        self.gpu = ReplayCache(shape, num_layers, num_slots, device="cuda", **options)
        self.cpu = ReplayCache(shape, num_layers, num_slots, **options)

    def fill(self, seed: int = 0, *, nan: bool = True) -> None:
        """Random checkpoints and windows in every slot; what lies outside the windows is NaN."""
        rng = torch.Generator().manual_seed(seed)
        cache = self.cpu
        cache.ring_start.copy_(torch.randint(0, cache.ring_slots, (cache.num_slots,), generator=rng))
        cache.num_committed.copy_(torch.randint(0, cache.window + 1, (cache.num_slots,), generator=rng))
        row = (torch.arange(cache.ring_slots) - cache.ring_start[:, None]) % cache.ring_slots
        live = row < cache.num_committed[:, None]
        for layer in range(cache.num_layers):
            state, u, k, g = pools(cache, layer)
            state.copy_(torch.randn(state.shape, generator=rng))
            u.copy_(torch.randn(u.shape, generator=rng))
            key = torch.randn(k.shape, generator=rng)
            k.copy_(key / key.norm(dim=-1, keepdim=True))
            g.copy_(-torch.rand(g.shape, generator=rng) * 0.5)
            if nan:
                u[~live[:, None].expand(u.shape[:3])] = float("nan")
                k[~live[:, None].expand(k.shape[:3])] = float("nan")
                g[~live[:, None].expand(g.shape[:3])] = float("nan")
        self.push()

    def push(self) -> None:
        """CPU to GPU."""
        for name, x in words(self.cpu).items():
            words(self.gpu)[name].copy_(x)
        for layer in range(self.cpu.num_layers):
            for x, y in zip(pools(self.gpu, layer), pools(self.cpu, layer), strict=True):
                x.copy_(y)

    def pull(self) -> None:
        """GPU to CPU."""
        for name, x in words(self.gpu).items():
            words(self.cpu)[name].copy_(x)
        for layer in range(self.cpu.num_layers):
            for x, y in zip(pools(self.gpu, layer), pools(self.cpu, layer), strict=True):
                y.copy_(x)

    def step(
        self, args: list[Tensor], layer: int, slots: Sequence[int], bounds: Tensor, width: int, factor: float = 1.0
    ) -> Tensor:
        """The same step on both; returns the GPU's output after comparing everything."""
        self.pull()
        slot = torch.tensor(slots, dtype=torch.int32)
        with device_semantics():
            expected = replay_step(*args, self.cpu, layer, slot, bounds, executed_width=width, backend="torch")
        got = replay_step(
            *(x.cuda() for x in args), self.gpu, layer, slot.cuda(), bounds.cuda(), executed_width=width, backend="cuda"
        )
        self.compare(factor)
        assert_close(got, expected, factor * max(EPS[got.dtype], self.tolerance), "out")
        return got

    @property
    def tolerance(self) -> float:
        """One step's: keys may be rounded to a 16-bit dtype for the tensor cores where the state is 16 bit."""
        return EPS[self.cpu.state_dtype]

    def compare(self, factor: float = 1.0) -> None:
        for name, x in words(self.gpu).items():
            assert torch.equal(x.cpu(), words(self.cpu)[name]), (name, x.tolist(), words(self.cpu)[name].tolist())
        for layer in range(self.cpu.num_layers):
            for name, x, y in zip("state u k g".split(), pools(self.gpu, layer), pools(self.cpu, layer), strict=True):
                tolerance = EPS[torch.float32] if name == "g" else max(EPS[x.dtype], self.tolerance)
                assert_close(x, y, factor * tolerance, f"layer {layer} {name}")


def assert_close(x: Tensor, y: Tensor, tolerance: float, what: str) -> None:
    error = relative(x, y)
    assert error <= tolerance, f"{what}: relative error {error:.3g}, expected at most {tolerance:g}"

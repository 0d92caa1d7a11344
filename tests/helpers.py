"""What the tests share: inputs, pools full of NaN, snapshots compared bit by bit, and the float64 truth of a step.

The truth is always computed from what the cache under test holds *before* a call (its checkpoint, its live ring rows,
its cursors) with `replaystate.reference` in float64. So a test compares one step's arithmetic, not a history of
roundings, and its tolerance stays at a few units in the last place of the storage dtypes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, reference, replay_step
from replaystate.kernels import registry, torch_backend
from replaystate.reference import Window

# H != HV, K != V, and none of them a multiple of a vector register: a swapped dim or head cannot go unnoticed.
SHAPE = GDNShape(num_k_heads=2, num_v_heads=4, head_k_dim=12, head_v_dim=10)

_INT_OF_SIZE = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


# --- inputs --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Inputs:
    """The five tensors that every step and prefill takes first, in that order: `replay_step(*inputs, cache, ...)`."""

    mixed_qkv: Tensor
    a: Tensor
    b: Tensor
    A_log: Tensor
    dt_bias: Tensor

    def __iter__(self) -> Iterator[Tensor]:
        return iter((self.mixed_qkv, self.a, self.b, self.A_log, self.dt_bias))

    def __len__(self) -> int:
        return self.mixed_qkv.shape[0]

    def rows(self, index: Any) -> Inputs:
        """The tokens chosen by a slice, a list or an index tensor; the layer parameters stay."""
        return replace(self, mixed_qkv=self.mixed_qkv[index], a=self.a[index], b=self.b[index])

    def double(self) -> Inputs:
        """The same values in float64, for the reference."""
        return Inputs(*(x.detach().double() for x in self))

    def clone(self) -> Inputs:
        return Inputs(*(x.clone() for x in self))


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def random_inputs(
    shape: GDNShape = SHAPE,
    tokens: int = 1,
    *,
    dtype: torch.dtype = torch.float32,
    gate_dtype: torch.dtype | None = None,
    seed: int = 0,
) -> Inputs:
    """Tokens as a model makes them: decays from nearly none to about e^-3 a token, betas on both sides of 1/2."""
    rng = generator(seed)
    H, HV, K, V = shape.sizes
    gate_dtype = dtype if gate_dtype is None else gate_dtype

    def normal(*size: int) -> Tensor:
        return torch.randn(*size, generator=rng, dtype=torch.float64)

    return Inputs(
        normal(tokens, shape.qkv_dim).to(dtype),
        (normal(tokens, HV) - 1).to(gate_dtype),
        normal(tokens, HV).to(gate_dtype),
        (normal(HV) * 0.5 - 1).float(),
        normal(HV).float(),
    )


def random_state(
    shape: GDNShape = SHAPE, rows: int = 1, *, dtype: torch.dtype = torch.float32, seed: int = 1
) -> Tensor:
    """[rows, HV, V, K], unit normal: far from zero, so that a state that is lost or doubled shows."""
    H, HV, K, V = shape.sizes
    return torch.randn(rows, HV, V, K, generator=generator(seed), dtype=torch.float64).to(dtype)


def bounds_of(lengths: Sequence[int]) -> Tensor:
    """query_start_loc of rows with these lengths: [2, 0, 3] -> [0, 2, 2, 5], int32."""
    return torch.tensor([0, *torch.tensor(lengths, dtype=torch.int64).cumsum(0).tolist()], dtype=torch.int32)


# --- caches --------------------------------------------------------------------------------------------------------


def layer_tensors(cache: ReplayCache, layer: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(checkpoint, u ring, k ring, g ring) of a layer: the cache's own tensors."""
    return cache.checkpoint(layer), *cache.rings(layer)


def fill_with_nan(cache: ReplayCache) -> ReplayCache:
    """Every checkpoint and ring row of every slot becomes NaN; cursors stay. Whatever reads a stale bit then shows."""
    for layer in range(cache.num_layers):
        for x in layer_tensors(cache, layer):
            x.fill_(float("nan"))
    return cache


def nan_cache(shape: GDNShape = SHAPE, num_layers: int = 1, num_slots: int = 6, **options: Any) -> ReplayCache:
    """A fresh cache whose pools are full of NaN. Slots must be reset, loaded or filled before use."""
    return fill_with_nan(ReplayCache(shape, num_layers, num_slots, **options))


def put_window(cache: ReplayCache, slot: int, count: int, start: int = 0, *, seed: int = 2) -> None:
    """Give a slot a random checkpoint and `count` random window rows from `start` on; all other rows stay as they are.

    Keys are normalised, corrections about as large as the state's, decays between e^-0.05 and e^-1.5 a token.
    """
    rng = generator(seed)
    H, HV, K, V = cache.shape.sizes
    at = [(start + j) % cache.ring_slots for j in range(count)]
    for layer in range(cache.num_layers):
        state, u, k, g = layer_tensors(cache, layer)
        state[slot] = torch.randn(HV, V, K, generator=rng).to(state.dtype)
        u[slot, :, at] = torch.randn(HV, count, V, generator=rng).to(u.dtype)
        k[slot, :, at] = reference.normalize(torch.randn(H, count, K, generator=rng)).to(k.dtype)
        g[slot, :, at] = -torch.exp(torch.rand(HV, count, generator=rng) * 3.4 - 3)
    cache.ring_start[slot], cache.num_committed[slot] = start, count


def canary_pool(
    slots: int, *size: int, dtype: torch.dtype, gap: int = 7, fill: float = 12345.0
) -> tuple[Tensor, Tensor]:
    """(pool [slots, *size], all of the buffer it lies in): slots are `gap` elements apart, with canaries in the gaps.

    The pool starts as canaries too, at an odd storage offset. Compare the buffer's bits before and after a call.
    """
    inside = 1
    for n in size:
        inside *= n
    buffer = torch.full((1 + slots * (inside + gap),), fill, dtype=dtype)
    strides, step = [], inside
    for n in size:
        step //= n
        strides.append(step)
    return buffer.as_strided((slots, *size), (inside + gap, *strides), storage_offset=1), buffer


def canary_cache(
    shape: GDNShape = SHAPE,
    num_layers: int = 1,
    num_slots: int = 6,
    *,
    window: int = 16,
    max_query_len: int = 8,
    ring_slots: int = 32,
    state_dtype: torch.dtype = torch.float32,
    ring_dtype: torch.dtype = torch.float32,
    null_slot: int | None = 0,
    **options: Any,
) -> tuple[ReplayCache, list[Tensor]]:
    """(cache over strided pools that an engine owns, the buffers with canaries between the slots)."""
    H, HV, K, V = shape.sizes
    states, rings, buffers = [], [], []
    for _ in range(num_layers):
        pools = [
            canary_pool(num_slots, HV, V, K, dtype=state_dtype),
            canary_pool(num_slots, HV, ring_slots, V, dtype=ring_dtype),
            canary_pool(num_slots, H, ring_slots, K, dtype=ring_dtype),
            canary_pool(num_slots, HV, ring_slots, dtype=torch.float32),
        ]
        (state, *ring), buffer = [pool for pool, _ in pools], [buffer for _, buffer in pools]
        states.append(state)
        rings.append(tuple(ring))
        buffers += buffer
    words = (torch.zeros(num_slots, dtype=torch.int32), torch.zeros(num_slots, dtype=torch.int32))
    cache = ReplayCache.from_tensors(
        shape, states, rings, *words, window=window, max_query_len=max_query_len, null_slot=null_slot, **options
    )
    return cache, buffers


def run_step(
    cache: ReplayCache,
    slots: Sequence[int],
    lengths: Sequence[int],
    *,
    width: int | None = None,
    accepted: Sequence[int] | int | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 3,
) -> list[Tensor]:
    """One model step: every layer with inputs of its own, then the commit (skipped when accepted is None)."""
    outs = []
    for layer in range(cache.num_layers):
        inputs = random_inputs(cache.shape, sum(lengths), dtype=dtype, seed=seed + 1009 * layer)
        outs.append(replay_step(*inputs, cache, layer, list(slots), bounds_of(lengths), executed_width=width))
    if accepted is not None:
        cache.commit(list(slots), accepted)
    return outs


# --- the truth -----------------------------------------------------------------------------------------------------


def truth_window(cache: ReplayCache, layer: int, slot: int) -> tuple[Tensor, Window]:
    """(checkpoint, live window) of one slot in float64, read by the cache's cursors."""
    state, u, k, g = (x[slot].double() for x in layer_tensors(cache, layer))
    return state, reference.window_of(u, k, g, int(cache.ring_start[slot]), int(cache.num_committed[slot]))


def truth_state(cache: ReplayCache, layer: int, slot: int, count: int | None = None) -> Tensor:
    """float64 state of a slot after `count` window rows (all when None), [HV, V, K]."""
    return reference.fold(*truth_window(cache, layer, slot), count)


def truth_step(
    cache: ReplayCache, layer: int, slot: int, inputs: Inputs, *, scale: float | None = None
) -> tuple[Tensor, Window]:
    """float64 outputs [T, HV, V] and appended rows of one row's step, from what the cache holds now."""
    return reference.replay(*inputs.double(), cache.shape, *truth_window(cache, layer, slot), scale=scale)


# --- comparing -----------------------------------------------------------------------------------------------------


def bits(x: Tensor) -> Tensor:
    """The tensor's bit patterns as ints: NaN equals NaN with the same payload, and 0 differs from -0."""
    x = x.detach().contiguous()
    return x.view(_INT_OF_SIZE[x.element_size()]) if x.is_floating_point() else x


def same_bits(x: Tensor, y: Tensor) -> bool:
    return x.dtype == y.dtype and x.shape == y.shape and torch.equal(bits(x), bits(y))


def assert_same_bits(x: Tensor, y: Tensor, what: str = "tensors") -> None:
    assert (x.dtype, x.shape) == (y.dtype, y.shape), f"{what}: {x.dtype}{list(x.shape)} != {y.dtype}{list(y.shape)}"
    differ = (bits(x) != bits(y)).nonzero()
    assert not len(differ), f"{what} differ in {len(differ)} of {x.numel()} elements, first at {differ[0].tolist()}"


def relative_error(x: Tensor, truth: Tensor) -> float:
    """Frobenius norm of the difference over that of the truth; NaN anywhere gives NaN."""
    return float((x.double() - truth.double()).norm() / truth.double().norm().clamp(min=1e-300))


def assert_close(x: Tensor, truth: Tensor, tolerance: float, what: str = "result") -> None:
    """Relative error in the Frobenius norm; fails on NaN."""
    error = relative_error(x, truth)
    assert error <= tolerance, f"{what}: relative error {error:.3g}, expected at most {tolerance:g}"


def snapshot(cache: ReplayCache) -> dict[str, Any]:
    """Clones of everything that the cache holds: pools, cursors, status, records and its free list."""
    held: dict[str, Any] = {}

    def collect(name: str, value: Any) -> None:
        if isinstance(value, Tensor):
            held[name] = value.clone()
        elif isinstance(value, (list, tuple)):
            held[f"len {name}"] = len(value)
            for i, item in enumerate(value):
                collect(f"{name}[{i}]", item)
        elif isinstance(value, (int, str)) or value is None:
            held[name] = value

    for name, value in vars(cache).items():
        collect(name, value)
    assert {"ring_start", "num_committed", "status"} <= set(held)
    for layer in range(cache.num_layers):
        for name, x in zip("state u k g".split(), layer_tensors(cache, layer), strict=True):
            held[f"layer {layer} {name}"] = x.clone()
    return held


def assert_unchanged(cache: ReplayCache, before: dict[str, Any], *, but: Sequence[str] = ()) -> None:
    """Nothing that `snapshot` saw has another bit now, except the attributes named."""
    after = snapshot(cache)
    assert after.keys() == before.keys()
    for name, value in before.items():
        if name in but:
            continue
        if isinstance(value, Tensor):
            assert_same_bits(after[name], value, name)
        else:
            assert after[name] == value, name


@contextmanager
def device_semantics() -> Iterator[None]:
    """Run checks as on a device: values are not read on the host, so kernels clamp and set status bits.

    Patches the one question that the library asks, "do these values lie on the host?", wherever it is asked. Calls run
    on the torch backend, the one that also serves devices without kernels of their own.
    """
    asking = [
        module
        for name, module in list(sys.modules.items())
        if name.startswith("replaystate.") and hasattr(module, "on_host")
    ]
    assert asking
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(registry, "BY_PREFERENCE", (torch_backend,)))
        stack.enter_context(mock.patch.object(registry, "_select", registry._select.__wrapped__))
        stack.enter_context(mock.patch.object(ReplayCache, "_on_host", return_value=False))
        for module in asking:
            stack.enter_context(mock.patch.object(module, "on_host", return_value=False))
        yield


def raises_nothing_changed(cache: ReplayCache, error: type[Exception], match: str, call: Callable[[], Any]) -> None:
    """The call raises this very error class with this message, and the cache is as it was, bit for bit."""
    before = snapshot(cache)
    with pytest.raises(error, match=match) as caught:
        call()
    assert type(caught.value) is error, f"expected {error.__name__}, got {type(caught.value).__name__}"
    assert_unchanged(cache, before)

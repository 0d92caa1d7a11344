"""10,000 malformed calls at the raw ops: each ends in a typed error or does its work; none crashes or writes elsewhere.

How this tests: a valid call of every op, with one to three arguments spoiled (dtype, shape, strides, device, values out
of every range). All tensors lie in buffers with canaries at both ends, which are compared afterwards. A crash ends the
process, so the test needs no more than to come to its end. An error names its class, or is the dispatcher's own for
what is no tensor of a CPU.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate.errors import ReplayStateError
from replaystate.kernels import cpu_backend

ROUNDS = 10_000
H, HV, K, V, R, W, T, POOL, LAYERS = 2, 4, 8, 12, 32, 16, 4, 5, 2
EXTREMES = [-(2**63), -(2**31) - 1, -(2**31), -1000, -2, -1, 0, 1, 2, 7, 31, 32, 33, 1000, 2**31 - 1, 2**31, 2**63 - 1]
CANARY = 0x5A
OURS = re.compile(r"\b(ShapeError|DTypeError|ArgumentError|SlotError): \w+: ")


class Memory:
    """Tensors in buffers of bytes with canaries before and behind."""

    def __init__(self) -> None:
        self.buffers: list[tuple[Tensor, int, int]] = []

    def put(self, x: Tensor) -> Tensor:
        size, margin = x.numel() * x.element_size(), 64
        buffer = torch.full((size + 2 * margin,), CANARY, dtype=torch.uint8)
        inside = buffer[margin : margin + size].view(x.dtype).view(x.shape)
        inside.copy_(x)
        self.buffers.append((buffer, margin, margin + size))
        return inside

    def check(self) -> None:
        for buffer, begin, end in self.buffers:
            assert bool((buffer[:begin] == CANARY).all())
            assert bool((buffer[end:] == CANARY).all())


def valid_calls(rng: random.Random, put: Callable[[Tensor], Tensor]) -> dict[str, list[Any]]:
    """Arguments of one good call of each op."""
    dtype = rng.choice([torch.float32, torch.float16, torch.bfloat16])
    lengths = [rng.randint(0, T) for _ in range(3)]
    N, bounds = sum(lengths), [0, *torch.tensor(lengths).cumsum(0).tolist()]
    index = rng.choice([torch.int32, torch.int64])
    state, out = put(torch.randn(POOL, HV, V, K).to(dtype)), put(torch.zeros(N, HV, V))
    u, k = put(torch.randn(POOL, HV, R, V).to(dtype)), put(torch.randn(POOL, H, R, K).to(dtype))
    g = put(-torch.rand(POOL, HV, R))
    starts, counts = (put(torch.randint(0, n, (POOL,), dtype=torch.int32)) for n in (R, W + 1))
    records, status = put(torch.zeros(POOL, LAYERS, dtype=torch.int32)), put(torch.zeros(POOL, dtype=torch.int32))
    pending = put(torch.full((POOL, LAYERS), (T << 16) | 2, dtype=torch.int32))
    slots = put(torch.tensor(rng.sample(range(POOL), 3), dtype=index))
    others = put(torch.tensor([-1, *rng.sample(range(POOL), 2)], dtype=index))
    qkv, a, b = put(torch.randn(N, 2 * H * K + HV * V)), put(torch.randn(N, HV)), put(torch.randn(N, HV))
    A_log, dt_bias = put(torch.randn(HV)), put(torch.randn(HV))
    q, kk, v = put(torch.randn(3, T, H, K)), put(torch.randn(3, T, H, K)), put(torch.randn(3, T, HV, V))
    wide_a, wide_b, wide_out = put(torch.randn(3, T, HV)), put(torch.randn(3, T, HV)), put(torch.zeros(3, T, HV, V))
    hist, base = (put(torch.randint(0, n, (3,), dtype=torch.int32)) for n in (W + 1, R))
    first, some = put(torch.randint(0, R, (3,))), put(torch.randint(0, W + 1, (3,)))
    loc = put(torch.tensor(bounds, dtype=index))
    return {
        "replay_step": [
            qkv,
            a,
            b,
            A_log,
            dt_bias,
            state,
            u,
            k,
            g,
            starts,
            counts,
            records,
            status,
            out,
            slots,
            loc,
            0,
            T,
            W,
            0,
            0.5,
        ],
        "ucache_flush": [
            q,
            kk,
            v,
            wide_a,
            wide_b,
            A_log,
            dt_bias,
            state,
            u,
            k,
            g,
            slots,
            hist,
            base,
            wide_out,
            13,
            W,
            0.5,
        ],
        "fold_slots": [[state], [u], [k], [g], slots, slots, first, some, W, status],
        "read_state": [state, u, k, g, others, first, some, W, put(torch.zeros(3, HV, V, K))],
        "commit": [slots, put(torch.tensor([0, 1, 2])), starts, counts, pending, status, W, R, 0],
        "gated_delta_rule": [qkv, a, b, A_log, dt_bias, True, loc, out, put(torch.zeros(3, HV, V, K)), 0.5],
    }


def spoil_tensor(rng: random.Random, x: Tensor) -> Any:
    """One way in which a tensor can be wrong."""
    kind = rng.randrange(12)
    if kind == 0:
        return x.to(rng.choice([torch.float64, torch.int8, torch.bool, torch.int32, torch.int64, torch.complex64]))
    if kind == 1 and x.dim():
        return x.narrow(rng.randrange(x.dim()), 0, 0)
    if kind == 2 and x.dim():
        dim = rng.randrange(x.dim())
        return x.narrow(dim, 0, max(x.shape[dim] - 1, 0))
    if kind == 3:
        return torch.cat([x, x]) if x.dim() else x.reshape(1)
    if kind == 4:
        return x[None]
    if kind == 5 and x.dim() > 1:
        return x.transpose(0, -1)
    if kind == 6 and x.dim():
        return x[:1].expand(x.shape) if x.shape[0] else x
    if kind == 7:
        return x.to("meta")
    if kind == 8:
        return x.flatten()
    if kind == 9 and not x.is_floating_point() and x.numel():
        info = torch.iinfo(x.dtype)
        x.view(-1)[rng.randrange(x.numel())] = max(min(rng.choice(EXTREMES), info.max), info.min)
        return x
    if kind == 10 and x.is_floating_point() and x.numel():
        x.view(-1)[rng.randrange(x.numel())] = rng.choice([float("nan"), float("inf"), -float("inf"), 3e38])
        return x
    sparse, sliced = (x.to_sparse(), x[..., ::2]) if x.dim() else (x, x)
    return rng.choice([None, 3, sliced, sparse if x.is_floating_point() else sliced])


def spoil(rng: random.Random, value: Any) -> Any:
    if isinstance(value, Tensor):
        return spoil_tensor(rng, value)
    if isinstance(value, list):
        kind = rng.randrange(4)
        return [] if kind == 0 else value + value if kind == 1 else [spoil_tensor(rng, x) for x in value]
    if isinstance(value, float):
        return rng.choice([float("nan"), float("inf"), 0.0, -1.0])
    if isinstance(value, bool):
        return not value
    return rng.choice(EXTREMES)


@pytest.mark.usefixtures("restore_threads")
def test_malformed_calls_are_refused() -> None:
    torch.set_num_threads(1)
    rng, refused, raw = random.Random(0), 0, torch.ops.replaystate_cpu
    for _ in range(ROUNDS):
        memory = Memory()
        calls = valid_calls(rng, memory.put)
        op = rng.choice(list(calls))
        arguments = calls[op]
        for at in rng.sample(range(len(arguments)), rng.randint(1, 3)):
            arguments[at] = spoil(rng, arguments[at])
        try:
            getattr(raw, op)(*arguments)
        except NotImplementedError:  # a tensor of another device or layout: the dispatcher has no kernel for it
            refused += 1
        except RuntimeError as error:
            # ours carries the class that the Python side raises, the dispatcher's the schema that the call does not fit
            refused += 1
            if not OURS.search(str(error)) and "replaystate_cpu::" not in str(error):
                raise
        memory.check()
    assert refused > ROUNDS // 2


@pytest.mark.parametrize(
    "op", ["replay_step", "ucache_flush", "fold_slots", "read_state", "commit", "gated_delta_rule"]
)
def test_the_call_that_is_spoiled_is_good(op: str) -> None:
    for seed in range(50):
        getattr(torch.ops.replaystate_cpu, op)(*valid_calls(random.Random(seed), Tensor.clone)[op])


def test_an_error_names_function_argument_and_numbers() -> None:
    arguments = valid_calls(random.Random(0), Tensor.clone)["replay_step"]
    arguments[14] = torch.tensor([1, 2, POOL])
    with pytest.raises(ReplayStateError, match=r"^replay_step: state_indices: expected slots below 5, got 5$"):
        cpu_backend.replay_step(*arguments)
    with pytest.raises(RuntimeError, match="SlotError: replay_step: state_indices"):
        torch.ops.replaystate_cpu.replay_step(*arguments)

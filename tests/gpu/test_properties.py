"""Promises of the CUDA backend that no single comparison shows: capture, batch invariance, isolation, no waiting.

How this tests: mostly bit equality between two ways of doing the same thing; the float64 reference where numbers count.
"""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, reference, replay_step
from replaystate.kernels.cuda import compiler
from replaystate.replayssm import load_gdn_replayssm_kernel, run_gdn_replayssm
from tests.gpu.common import (
    EPS,
    Pair,
    assert_close,
    bounds_of,
    device_semantics,
    inputs,
    pools,
    relative,
    same_bits,
    snapshot,
)

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
SHAPE = GDNShape(2, 4, 128, 128)
KINDS = [(BF16, F16, F16), (BF16, BF16, BF16), (F32, F32, F32)]


def twin(cache: ReplayCache) -> ReplayCache:
    """A second cache with the same bits."""
    copy = ReplayCache(
        cache.shape, cache.num_layers, cache.num_slots, window=cache.window, max_query_len=cache.max_query_len,
        state_dtype=cache.state_dtype, ring_dtype=cache.ring_dtype, device="cuda",
    )  # fmt: skip
    for layer in range(cache.num_layers):
        for x, y in zip(pools(copy, layer), pools(cache, layer), strict=True):
            x.copy_(y)
    for name in ("ring_start", "num_committed", "status", "_step_records"):
        getattr(copy, name).copy_(getattr(cache, name))
    return copy


def filled(num_layers: int, slots: int, kind: tuple[torch.dtype, ...], width: int = 4, seed: int = 0) -> ReplayCache:
    pair = Pair(SHAPE, num_layers, slots, max_query_len=width, state_dtype=kind[1], ring_dtype=kind[2])
    pair.fill(seed)
    return pair.gpu


def assert_same(x: ReplayCache, y: ReplayCache) -> None:
    for (name, a), (_, b) in zip(snapshot(x).items(), snapshot(y).items(), strict=True):
        assert same_bits(a, b), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_captured_step_replays_with_other_rows_and_cursors(kind: tuple[torch.dtype, ...]) -> None:
    cache = filled(2, 12, kind)
    rows, width, rng = 5, 4, random.Random(1)
    cache.warmup((kind[0],))
    slots = torch.full((rows,), -1, dtype=torch.int32, device="cuda")
    bounds = torch.zeros(rows + 1, dtype=torch.int32, device="cuda")
    accepted = torch.zeros(rows, dtype=torch.int32, device="cuda")
    args = [x.cuda() for x in inputs(SHAPE, rows * width, kind[0])]
    outs = [torch.empty(rows * width, 4, 128, dtype=kind[0], device="cuda") for _ in range(2)]

    def step(target: ReplayCache) -> None:
        for layer in range(2):
            replay_step(*args, target, layer, slots, bounds, out=outs[layer])
        target.commit(slots, accepted)

    eager = twin(cache)
    before = snapshot(cache)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(cache)
    for name, x in snapshot(cache).items():
        assert same_bits(x, before[name]), f"capture changed {name}"
    for _ in range(8):
        lengths = [rng.randint(0, width) for _ in range(rows)]
        slots.copy_(torch.tensor([*rng.sample(range(1, 12), rows - 1), -1]))
        bounds.copy_(bounds_of(lengths))
        accepted.copy_(torch.tensor([rng.randint(0, n) for n in lengths]))
        args[0].normal_()
        graph.replay()
        captured = [x.clone() for x in outs]
        step(eager)
        assert all(same_bits(x, y) for x, y in zip(captured, outs, strict=True))
        assert_same(cache, eager)


def test_nothing_compiles_after_warmup_and_warmup_changes_nothing() -> None:
    cache = filled(1, 70, KINDS[0], width=8)
    before = snapshot(cache)
    cache.warmup((BF16,))
    for name, x in snapshot(cache).items():
        assert same_bits(x, before[name]), name
    compiled = compiler.counters.compiled, compiler.counters.from_disk
    for width in range(1, 9):
        for rows in (1, 7, 64):
            for index in (torch.int32, torch.int64):
                args = [x.cuda() for x in inputs(SHAPE, rows * width, BF16)]
                slots = torch.arange(1, rows + 1, dtype=index, device="cuda")
                replay_step(*args, cache, 0, slots, bounds_of([width] * rows).cuda(), executed_width=width)
                cache.commit(slots, torch.zeros_like(slots))
    odd = torch.zeros(8 * SHAPE.qkv_dim + 1, dtype=BF16, device="cuda")[1:].view(8, -1)
    args = [x.cuda() for x in inputs(SHAPE, 8, BF16)]
    replay_step(odd, *args[1:], cache, 0, [1, 2], bounds_of([4, 4]).cuda())
    cache.commit([1, 2], 0)
    cache.flush([3])
    cache.materialize([1], [2], [0])
    cache.state(0, [1, 2])
    cache.fork([1, 2], [2, 1])
    cache.crop([4], [0])
    cache.reset([5])
    cache.load_state(0, [5], torch.zeros(1, 4, 128, 128, device="cuda"))
    assert (compiler.counters.compiled, compiler.counters.from_disk) == compiled


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("width", [1, 4, 8, 16])
def test_a_row_has_the_same_bits_alone_in_a_batch_and_beside_padding(kind: tuple[torch.dtype, ...], width: int) -> None:
    big = filled(1, 65, kind, width)
    alone, permuted = twin(big), twin(big)
    rng = random.Random(2)
    lengths = [rng.randint(1, width) for _ in range(64)]
    args = [x.cuda() for x in inputs(SHAPE, sum(lengths), kind[0])]
    slots = rng.sample(range(1, 65), 64)
    bounds = bounds_of(lengths)
    out = replay_step(*args, big, 0, torch.tensor(slots, dtype=torch.int32).cuda(), bounds.cuda())
    for i in range(0, 64, 7):
        tokens = slice(int(bounds[i]), int(bounds[i + 1]))
        mine = [x[tokens] for x in args[:3]]
        slot = torch.tensor([slots[i]], dtype=torch.int32).cuda()
        single = replay_step(*mine, *args[3:], alone, 0, slot, bounds_of([lengths[i]]).cuda())
        assert same_bits(single, out[tokens])
        for name, x, y in zip("state u k g".split(), pools(alone, 0), pools(big, 0), strict=True):
            assert same_bits(x[slots[i]], y[slots[i]]), name
    order = rng.sample(range(64), 64)
    index = torch.cat([torch.arange(int(bounds[i]), int(bounds[i + 1])) for i in order]).cuda()
    moved = replay_step(
        *(x[index] for x in args[:3]), *args[3:], permuted, 0,
        torch.tensor([-1, *(slots[i] for i in order), 0, 0]).cuda(),
        bounds_of([0, *(lengths[i] for i in order), 0, 0]).cuda(),
    )  # fmt: skip
    assert same_bits(moved, out[index])
    assert_same(permuted, big)


@pytest.mark.parametrize("kind", KINDS[:2])
def test_nan_stays_in_its_request_and_does_not_reach_earlier_tokens(kind: tuple[torch.dtype, ...]) -> None:
    cache = filled(1, 9, kind)
    clean = twin(cache)
    args = [x.cuda() for x in inputs(SHAPE, 12, kind[0])]
    slots, bounds = torch.tensor([1, 2, 3]).cuda(), bounds_of([4, 4, 4]).cuda()
    expected = replay_step(*args, clean, 0, slots, bounds)
    for x in args[:3]:
        x[6:8] = float("nan")
    got = replay_step(*args, cache, 0, slots, bounds)
    assert torch.isnan(got[6:8]).all()
    keep = [0, 1, 2, 3, 4, 5, 8, 9, 10, 11]
    assert same_bits(got[keep], expected[keep])
    for name, x, y in zip("state u k g".split(), pools(cache, 0), pools(clean, 0), strict=True):
        for slot in (1, 3):
            assert same_bits(x[slot], y[slot]), name
    assert same_bits(cache.checkpoint(0)[2], clean.checkpoint(0)[2])


def test_offsets_past_two_to_the_31() -> None:
    shape = GDNShape(16, 32, 128, 128)
    slots = 4200  # of 524288 elements
    big = ReplayCache(shape, 1, slots, device="cuda")
    small = ReplayCache(shape, 1, 3, device="cuda")
    args = [x.cuda() for x in inputs(shape, 8, BF16)]
    for x, y in zip(pools(small, 0), pools(big, 0), strict=True):
        x[1:].uniform_(-0.1, 0.0)
        y[slots - 2 :] = x[1:]
    for cache in (big, small):
        cache.num_committed[-2:] = torch.tensor([7, 15], dtype=torch.int32)
    outs = [
        replay_step(
            *args,
            cache,
            0,
            torch.tensor([cache.num_slots - 2, cache.num_slots - 1]).cuda(),
            bounds_of([4, 4]).cuda(),
            executed_width=4,
        )
        for cache in (big, small)
    ]
    assert same_bits(*outs)
    big.flush(torch.tensor([slots - 2]).cuda())
    small.flush(torch.tensor([1]).cuda())
    for x, y in zip(pools(small, 0), pools(big, 0), strict=True):
        assert same_bits(x[1:], y[slots - 2 :])
    assert same_bits(big.state(0, [slots - 1]), small.state(0, [2]))


def test_two_streams() -> None:
    caches = [filled(1, 65, KINDS[0], seed=s) for s in (0, 1)]
    twins = [twin(c) for c in caches]
    args = [x.cuda() for x in inputs(SHAPE, 256, BF16)]
    slots, bounds = torch.arange(1, 65, dtype=torch.int32).cuda(), bounds_of([4] * 64).cuda()
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in caches]
    for _ in range(10):
        for stream, cache in zip(streams, caches, strict=True):
            with torch.cuda.stream(stream):
                replay_step(*args, cache, 0, slots, bounds)
                cache.commit(slots, torch.full_like(slots, 3))
    torch.cuda.synchronize()
    for _ in range(10):
        for cache in twins:
            replay_step(*args, cache, 0, slots, bounds)
            cache.commit(slots, torch.full_like(slots, 3))
    for x, y in zip(caches, twins, strict=True):
        assert_same(x, y)


def test_compiled_by_torch() -> None:
    cache = filled(1, 9, KINDS[0])
    eager = twin(cache)
    args = [x.cuda() for x in inputs(SHAPE, 8, BF16)]
    slots, bounds = torch.tensor([1, 2], dtype=torch.int32).cuda(), bounds_of([4, 4]).cuda()
    accepted = torch.tensor([2, 4], dtype=torch.int32).cuda()

    def step(target: ReplayCache) -> Tensor:
        y = replay_step(*args, target, 0, slots, bounds)
        target.commit(slots, accepted)
        target.flush(slots)
        return y * 2

    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    assert same_bits(compiled(cache), step(eager))
    assert_same(cache, eager)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_no_call_waits_for_the_host() -> None:
    cache = filled(2, 20, KINDS[0])
    cache.warmup((BF16,))
    args = [x.cuda() for x in inputs(SHAPE, 12, BF16)]
    slots, bounds = torch.tensor([1, 2, -1], dtype=torch.int32).cuda(), bounds_of([4, 4, 4]).cuda()
    zeros, ones = torch.zeros_like(slots), torch.ones_like(slots)
    other, state = torch.tensor([5, 6, 7]).cuda(), torch.randn(3, 4, 128, 128, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for layer in range(2):
            replay_step(*args, cache, layer, slots, bounds)
        cache.commit(slots, ones)
        cache.crop(slots, zeros)
        cache.materialize(slots, other, zeros)
        cache.flush(slots)
        cache.state(0, slots)
        cache.fork(slots, other)
        cache.reset(other)
        cache.load_state(0, other, state)
        cache.invalidate(other)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("kind", KINDS)
def test_slot_upkeep(kind: tuple[torch.dtype, ...]) -> None:
    pair = Pair(SHAPE, 2, 12, max_query_len=4, state_dtype=kind[1], ring_dtype=kind[2])
    pair.fill()
    for x in pools(pair.cpu, 0)[1:] + pools(pair.cpu, 1)[1:]:
        x.nan_to_num_(0.5)
    pair.cpu.num_committed[5:8] = torch.tensor([0, 3, 0])
    pair.cpu.status[2] = 1
    pair.cpu._step_records[10, 1] = 3  # pending
    pair.cpu.status[11] = 4
    pair.push()
    state = torch.randn(4, 4, 128, 128, dtype=torch.float64) * 4e4
    calls = [
        lambda c, d: c.fork(
            torch.tensor([1, 1, 2, -1, 0, 3, 10, 11]).to(d), torch.tensor([2, 3, 1, 4, 5, 0, 8, 9]).to(d)
        ),
        lambda c, d: c.crop(torch.tensor([1, 2, 3, -1, 0, 10, 11]).to(d), torch.tensor([1, 99, -1, 3, 0, 0, 0]).to(d)),
        lambda c, d: c.load_state(1, torch.tensor([5, 6, -1, 7]).to(d), state.to(d)),
        lambda c, d: c.invalidate(torch.tensor([8, -1, 0]).to(d)),
        lambda c, d: c.reset(torch.tensor([8, 9, -3, 0, 9]).to(d)),
    ]
    for call in calls:
        with device_semantics():
            call(pair.cpu, "cpu")
        call(pair.gpu, "cuda")
        pair.compare(0.0)


@pytest.mark.parametrize("lengths", [[4, 4, 4, 4], [3, 0, 4, 1]])
def test_serving_adapter(lengths: list[int]) -> None:
    """run_gdn_replayssm straight from ragged rows equals the packed way on the CPU."""
    pair = Pair(SHAPE, 1, 9, max_query_len=4)
    pair.fill()
    args = inputs(SHAPE, sum(lengths), BF16)
    slots = torch.tensor([3, 0, 7, 1], dtype=torch.int32)
    indices = torch.tensor([4 * i + t for i, n in enumerate(lengths) for t in range(n)])
    results = []
    for device, cache in (("cpu", pair.cpu), ("cuda", pair.gpu)):
        state, u, k, g = pools(cache, 0)
        results.append(
            run_gdn_replayssm(
                kernel=load_gdn_replayssm_kernel("replaystate"), executed_width=4, mixed_qkv=args[0].to(device),
                a=args[1].to(device), b=args[2].to(device), A_log=args[3].to(device), dt_bias=args[4].to(device),
                checkpoint_state=state, replayssm_cache=(u, k, g), ring_start=cache.ring_start,
                num_committed=cache.num_committed, query_start_loc=bounds_of(lengths).to(device),
                state_indices=slots.to(device), output_indices=indices.to(device), num_k_heads=2, num_v_heads=4,
                head_k_dim=128, head_v_dim=128,
            )
        )  # fmt: skip
    assert_close(results[1], results[0], EPS[BF16], "out")
    assert_close(pair.gpu.checkpoint(0), pair.cpu.checkpoint(0), EPS[F16], "state")


@pytest.mark.parametrize(
    ("A_log", "a"), [(100.0, -100.0), (100.0, -float("inf")), (-100.0, 100.0), (100.0, 100.0), (-3.0, -20.0)]
)
@pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
def test_gate_extremes(kind: tuple[torch.dtype, ...], A_log: float, a: float) -> None:
    pair = Pair(SHAPE, 1, 5, max_query_len=4, state_dtype=kind[1], ring_dtype=kind[2])
    pair.fill()
    args = inputs(SHAPE, 8, kind[0])
    args[1][1::2] = a
    args[3][:], args[4][:] = A_log, 0.0
    out = pair.step(args, 0, [1, 2], bounds_of([4, 4]), 4, factor=2.0)
    assert not torch.isnan(out).any()


@pytest.mark.parametrize("width", [1, 4, 8, 16])
@pytest.mark.parametrize(
    "kind",
    [(io, s, r) for io in (BF16, F16, F32) for s, r in ((F16, F16), (BF16, BF16), (F16, BF16), (F32, F32), (F32, F16))],
)
def test_error_against_float64(kind: tuple[torch.dtype, ...], width: int) -> None:
    """At most twice the error of plain torch in the same dtypes, plus a small floor; all fp32 stays below 1e-5."""
    io, state_dtype, ring_dtype = kind
    pair = Pair(SHAPE, 1, 6, window=16, max_query_len=width, state_dtype=state_dtype, ring_dtype=ring_dtype)
    pair.fill(seed=3)
    pair.cpu.num_committed[1:] = torch.tensor([0, 5, 12, 16, 16])
    for x in pools(pair.cpu, 0)[1:3]:
        x.nan_to_num_(0.05)
    pools(pair.cpu, 0)[3].nan_to_num_(-0.05)
    pair.push()
    args = inputs(SHAPE, 5 * width, io, seed=4)
    truths, folded = [], []
    for i, slot in enumerate(range(1, 6)):
        state, u, k, g = (x[slot].double() for x in pools(pair.cpu, 0))
        window = reference.window_of(u, k, g, int(pair.cpu.ring_start[slot]), int(pair.cpu.num_committed[slot]))
        mine = [x[i * width : (i + 1) * width].double() for x in args[:3]] + [x.double() for x in args[3:]]
        truths.append(reference.replay(*mine, SHAPE, state, window)[0])
        folded.append(reference.fold(state, window, None))
    truth = torch.cat(truths)
    slots, bounds = torch.arange(1, 6, dtype=torch.int32), bounds_of([width] * 5)
    plain = replay_step(*args, pair.cpu, 0, slots, bounds, executed_width=width, backend="torch")
    got = replay_step(*(x.cuda() for x in args), pair.gpu, 0, slots.cuda(), bounds.cuda(), executed_width=width)
    error, allowed = relative(got, truth), 2 * relative(plain, truth)
    floor = 1e-6 if F32 in (io, state_dtype) else 3e-4  # keys and queries as float16 on the tensor cores
    assert error <= allowed + floor, f"out: {error:.3g} against {allowed / 2:.3g}"
    state_error, state_allowed = (
        relative(pair.gpu.checkpoint(0)[4], folded[3]),
        2 * relative(pair.cpu.checkpoint(0)[4], folded[3]),
    )
    assert state_error <= state_allowed + 1e-6, f"state: {state_error:.3g} against {state_allowed / 2:.3g}"
    if kind == (F32, F32, F32):
        assert max(error, state_error) < 1e-5

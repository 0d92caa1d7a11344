"""Every op on the GPU beside the same op in plain torch on the CPU.

How this tests: both caches hold the same bits before each call. After it, cursors, status and records are equal, and
outputs, rings and checkpoints agree to the rounding of their dtype. Rings outside the windows are NaN throughout.
"""

from __future__ import annotations

import random

import pytest
import torch

from replaystate import (
    GDNShape,
    ReplayCache,
    gated_delta_rule,
    gated_delta_rule_mtp_ucache_flush,
    gdn_prefix_materialize,
)
from tests.gpu.common import EPS, Pair, assert_close, bounds_of, device_semantics, inputs, pools, relative

pytestmark = pytest.mark.gpu

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

# (H, HV, K, V), window, width, (io, state, ring): the model's sizes in every dtype triple that serving uses, then each
# other size, ratio, width and window once.
CASES = [
    ((2, 4, 128, 128), 16, 4, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 4, (F16, F16, F16)),
    ((2, 4, 128, 128), 16, 4, (BF16, BF16, BF16)),
    ((2, 4, 128, 128), 16, 4, (BF16, F16, BF16)),
    ((2, 4, 128, 128), 16, 4, (BF16, BF16, F16)),
    ((2, 4, 128, 128), 16, 4, (F32, F32, F32)),
    ((2, 4, 128, 128), 16, 4, (BF16, F32, F16)),
    ((2, 4, 128, 128), 16, 4, (F32, F16, F16)),
    ((2, 4, 128, 128), 16, 1, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 2, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 3, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 8, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 6, (F16, BF16, F16)),
    ((2, 4, 128, 128), 32, 16, (BF16, F16, F16)),
    ((2, 4, 128, 128), 32, 11, (BF16, BF16, BF16)),
    ((2, 4, 128, 128), 32, 4, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 16, (BF16, F16, F16)),
    ((2, 2, 128, 128), 16, 4, (BF16, F16, F16)),
    ((1, 3, 128, 128), 16, 4, (BF16, F16, F16)),
    ((1, 4, 128, 128), 16, 4, (BF16, F16, F16)),
    ((1, 8, 128, 128), 16, 8, (BF16, F16, F16)),
    ((2, 4, 128, 128), 16, 8, (F32, F32, F32)),
    ((2, 4, 128, 128), 32, 16, (F32, F32, F32)),
    ((2, 4, 64, 64), 16, 4, (BF16, F16, F16)),
    ((1, 2, 96, 192), 16, 4, (F32, F32, F32)),
    ((1, 2, 256, 128), 16, 5, (BF16, F16, F16)),
    ((1, 3, 192, 64), 32, 16, (F16, BF16, F32)),
    ((2, 4, 12, 10), 8, 3, (F32, F32, F16)),
    ((1, 1, 128, 96), 64, 16, (BF16, F16, F16)),
    ((3, 6, 33, 17), 4, 2, (BF16, F32, BF16)),
]


@pytest.mark.parametrize(("sizes", "window", "width", "dtypes"), CASES)
def test_ragged_rounds(sizes: tuple[int, ...], window: int, width: int, dtypes: tuple[torch.dtype, ...]) -> None:
    """Random rows, lengths 0..width, padding rows, wrapped windows, accepts 0..length, over several rounds."""
    io, state, ring = dtypes
    shape, slots = GDNShape(*sizes), 9
    pair = Pair(shape, 2, slots, window=window, max_query_len=width, state_dtype=state, ring_dtype=ring)
    pair.fill(seed=width)
    rng = random.Random(0)
    for r in range(5):
        rows = [*rng.sample(range(1, slots), 5), 0, -1]
        rng.shuffle(rows)
        lengths = [rng.randint(0, width) for _ in rows]
        lengths[0] = width
        for layer in range(2):
            args = inputs(shape, sum(lengths) + 2, io, seed=10 * r + layer)
            out = pair.step(args, layer, rows, bounds_of(lengths), width)
            begin = 0
            for slot, length in zip(rows, lengths, strict=True):
                if slot <= 0:
                    assert not out[begin : begin + length].count_nonzero()
                begin += length
            assert not out[begin:].count_nonzero()
        accepted = torch.tensor([rng.randint(0, n) for n in lengths])
        with device_semantics():
            pair.pull()
            pair.cpu.commit(torch.tensor(rows), accepted)
        pair.gpu.commit(torch.tensor(rows).cuda(), accepted.cuda())
        pair.compare()


def test_bad_values_are_clamped_and_flagged() -> None:
    """Dead slots, uncommitted steps, bad cursors, long rows, bad accepts: the same words as on the CPU."""
    shape = GDNShape(2, 4, 128, 128)
    pair = Pair(shape, 2, 12, max_query_len=4)
    pair.fill()
    pair.cpu.num_committed[3], pair.cpu.ring_start[4], pair.cpu.num_committed[5] = 17, 32, -1
    pair.cpu.status[6] = 4
    pair.cpu._step_records[7, 0] = (4 << 16) | 2  # stepped already
    pair.cpu._step_records[8, 1] = (4 << 16) | 1  # the other layer stepped with another length
    pair.cpu._step_records[9, 1] = (4 << 16) | 3
    pair.push()
    rows = [1, 2, 3, 4, 5, 6, 7, 8, 9, 99, -7, 10]
    lengths = [3, 9, 2, 2, 2, 2, 3, 3, 3, 1, 1, 0]
    args = inputs(shape, sum(lengths), BF16)
    pair.step(args, 0, rows, bounds_of(lengths), 4)
    pair.step(args, 1, [1, 2], bounds_of([3, 9]), 4)
    for slots, accepted in (([1, 2, 7, 9, 10, 11], [3, 9, 1, -1, 0, 0]), ([1], [0])):
        pair.pull()
        with device_semantics():
            pair.cpu.commit(torch.tensor(slots), torch.tensor(accepted))
        pair.gpu.commit(torch.tensor(slots, dtype=torch.int32).cuda(), torch.tensor(accepted).cuda())
        pair.compare()


@pytest.mark.parametrize(("state", "ring"), [(F16, F16), (BF16, F16)])
def test_saturation_is_flagged(state: torch.dtype, ring: torch.dtype) -> None:
    shape = GDNShape(2, 4, 128, 128)
    pair = Pair(shape, 1, 6, max_query_len=4, state_dtype=state, ring_dtype=ring)
    pair.fill()
    pair.cpu.num_committed[:] = torch.tensor([0, 16, 16, 2, 16, 0])
    pair.fill_live = None  # type: ignore[attr-defined]
    for x in pools(pair.cpu, 0)[1:3]:
        x.nan_to_num_(0.25)
    pools(pair.cpu, 0)[3].fill_(-0.01)
    pools(pair.cpu, 0)[0][1] = 6.0e4
    pools(pair.cpu, 0)[1][1] = 6.0e4
    pair.push()
    args = inputs(shape, 12, F32)
    args[0][8:] *= 1e30 if ring == BF16 else 3e6
    args[0][0, -1] = float("nan")
    pair.step(args, 0, [1, 2, 3], bounds_of([4, 4, 4]), 4)
    assert int(pair.gpu.status[3]) & 2
    if state == F16:
        assert int(pair.gpu.status[1]) & 1


@pytest.mark.parametrize(
    ("sizes", "state", "ring"), [((2, 4, 128, 128), F16, F16), ((1, 2, 96, 192), F32, F32), ((3, 6, 33, 17), BF16, F16)]
)
def test_folds(sizes: tuple[int, ...], state: torch.dtype, ring: torch.dtype) -> None:
    """materialize, flush and state() of all layers, with skipped and refused rows."""
    shape = GDNShape(*sizes)
    pair = Pair(shape, 3, 12, max_query_len=4, state_dtype=state, ring_dtype=ring)
    pair.fill()
    pair.cpu.num_committed[1:6] = torch.tensor([16, 9, 0, 5, 7])
    for x in pools(pair.cpu, 0)[1:] + pools(pair.cpu, 1)[1:] + pools(pair.cpu, 2)[1:]:
        x.nan_to_num_(-0.125)
    pair.cpu.status[6], pair.cpu.status[2] = 4, 2
    pair.cpu._step_records[7, 2] = 3
    pair.push()
    where = torch.tensor([1, 2, 3, 0, -1, 6, 5])
    for layer in range(3):
        with device_semantics():
            assert_close(pair.gpu.state(layer, where.cuda()), pair.cpu.state(layer, where), EPS[F32], "state()")
    src, dst = torch.tensor([1, 2, 3, 4, 5, 6, 7, -1, 5]), torch.tensor([8, 9, 10, 4, 11, 1, 2, 3, 0])
    count = torch.tensor([16, 3, 0, 4, 8, 0, 0, 0, 1])
    with device_semantics():
        pair.cpu.materialize(src, dst, count)
    pair.gpu.materialize(src.cuda(), dst.cuda(), count.cuda())
    pair.compare()
    pair.cpu.num_committed[8:] = torch.tensor([3, 16, 0, 1])
    pair.push()
    slots = torch.tensor([8, 0, 9, -4, 10, 6, 7, 11])
    with device_semantics():
        pair.cpu.flush(slots)
    pair.gpu.flush(slots.cuda())
    pair.compare()
    pair.gpu.flush(torch.full((64,), -1).cuda())
    pair.compare()


@pytest.mark.parametrize(("sizes", "state", "ring"), [((1, 2, 128, 128), F16, F16), ((1, 2, 32, 64), F32, F32)])
def test_many_rows_fold(sizes: tuple[int, ...], state: torch.dtype, ring: torch.dtype) -> None:
    """More rows than one warp looks at, some skipped: every block must deal out the same list of rows."""
    pair = Pair(GDNShape(*sizes), 2, 401, max_query_len=4, state_dtype=state, ring_dtype=ring)
    pair.fill(nan=False)
    order = torch.randperm(400, generator=torch.Generator().manual_seed(1)) + 1
    src, dst = order[:200], order[200:].clone()
    dst[::7] = -1
    count = pair.cpu.num_committed[src].clone()
    for _ in range(5):
        pair.push()
        pair.gpu.materialize(src.cuda(), dst.cuda(), count.cuda())
        with device_semantics():
            assert_close(pair.gpu.state(0, src.cuda()), pair.cpu.state(0, src), EPS[F32], "state()")
    with device_semantics():
        pair.cpu.materialize(src, dst, count)
    pair.compare()
    with device_semantics():
        pair.cpu.flush(src)
    pair.gpu.flush(src.cuda())
    pair.compare()


def test_many_layers_fold_in_several_launches() -> None:
    pair = Pair(GDNShape(1, 2, 16, 16), 50, 5, max_query_len=4)
    pair.fill()
    for call in (lambda c, d: c.materialize(torch.tensor([1]).to(d), torch.tensor([2]).to(d), torch.tensor([0]).to(d)),
                 lambda c, d: c.flush(torch.tensor([3, 1]).to(d))):  # fmt: skip
        with device_semantics():
            call(pair.cpu, "cpu")
        call(pair.gpu, "cuda")
        pair.compare()


@pytest.mark.parametrize("dtypes", [(BF16, F16, F16), (F32, F32, F32)])
@pytest.mark.parametrize("width", [4, 7])
def test_kernel_level(dtypes: tuple[torch.dtype, ...], width: int) -> None:
    """Padded rows with cursors per row, restart, padding rows untouched; then prefix states with an active list."""
    io, state_dtype, ring_dtype = dtypes
    shape = GDNShape(2, 4, 128, 128)
    H, HV, K, V = shape.sizes
    pair = Pair(shape, 1, 9, max_query_len=8, state_dtype=state_dtype, ring_dtype=ring_dtype)
    pair.fill()
    rows = [3, -1, 5, 7, 1]
    rng = torch.Generator().manual_seed(5)
    q, k = (torch.randn(5, width, H, K, generator=rng).to(io) for _ in range(2))
    v = torch.randn(5, width, HV, V, generator=rng).to(io)
    a, b = (torch.randn(5, width, HV, generator=rng).to(io) for _ in range(2))
    A_log, dt_bias = torch.zeros(HV), torch.zeros(HV)
    results = []
    for device, cache in (("cpu", pair.cpu), ("cuda", pair.gpu)):
        state, u, kr, g = pools(cache, 0)
        hist, base = (
            x[torch.tensor(rows).clamp(min=0)].clone().to(device) for x in (pair.cpu.num_committed, pair.cpu.ring_start)
        )
        out = torch.full((5, width, HV, V), 7.0, dtype=io, device=device)
        gated_delta_rule_mtp_ucache_flush(
            A_log.to(device), a.to(device), dt_bias.to(device), q=q.to(device), k=k.to(device), v=v.to(device),
            b=b.to(device),
            initial_state_source=state, initial_state_indices=torch.tensor(rows, dtype=torch.int32, device=device),
            output=out, k_cache=kr, u_cache=u, g_cache=g, hist_len=hist, cache_base=base,
        )  # fmt: skip
        src, dst = torch.tensor([1, 2, 3, 4], device=device), torch.tensor([6, 8, -1, 0], device=device)
        count = torch.tensor([2, 0, 1, 1], device=device)
        active = torch.tensor([1, 0, 3, -1], dtype=torch.int32, device=device)
        gdn_prefix_materialize(state, src, dst, kr, u, g, torch.tensor([3, 4, 5, 40], device=device), count, active,
                               torch.tensor([2], dtype=torch.int32, device=device))  # fmt: skip
        results.append((out, hist, base))
    (out, hist, base), (out_gpu, hist_gpu, base_gpu) = results
    assert_close(out_gpu, out, max(EPS[io], pair.tolerance), "out")
    assert torch.equal(hist, hist_gpu.cpu())
    assert torch.equal(base, base_gpu.cpu())
    pair.compare()


@pytest.mark.parametrize("sizes", [(2, 4, 128, 128), (1, 3, 96, 40), (1, 2, 256, 64)])
@pytest.mark.parametrize("io", [BF16, F32])
def test_prefill(sizes: tuple[int, ...], io: torch.dtype) -> None:
    shape = GDNShape(*sizes)
    lengths = [5, 0, 37, 1, 16]
    args = inputs(shape, sum(lengths) + 3, io)
    H, HV, K, V = shape.sizes
    for initial in (None, torch.randn(5, HV, V, K, dtype=torch.float64)):
        out, final = gated_delta_rule(*args, shape, bounds_of(lengths), initial_state=initial)
        got, state = gated_delta_rule(
            *(x.cuda() for x in args), shape, bounds_of(lengths).cuda(),
            initial_state=None if initial is None else initial.cuda(), backend="cuda",
        )  # fmt: skip
        assert_close(got, out, EPS[io], "out")
        assert_close(state, final, 3e-6, "final state")
        assert relative(got[-3:], torch.zeros(1)) == 0


def test_views() -> None:
    """Strided pools, odd storage offsets, transposed inputs: the same numbers."""
    shape = GDNShape(2, 4, 128, 128)
    H, HV, K, V = shape.sizes

    def odd(x: torch.Tensor) -> torch.Tensor:
        """The same values at an odd offset, rows (or slots) apart by an odd gap."""
        inside = x[0].numel()
        buffer = torch.zeros(1 + x.shape[0] * (inside + 7), dtype=x.dtype, device="cuda")
        view = buffer.as_strided(x.shape, (inside + 7, *x[0].contiguous().stride()), 1)
        view.copy_(x)
        return view

    for io, state in ((BF16, F16), (F32, F32)):
        pair = Pair(shape, 1, 7, max_query_len=4, state_dtype=state)
        pair.fill()
        pair.gpu = ReplayCache.from_tensors(
            shape, [odd(pools(pair.gpu, 0)[0])], [tuple(odd(x) for x in pools(pair.gpu, 0)[1:])],
            pair.gpu.ring_start, pair.gpu.num_committed, window=16, max_query_len=4, null_slot=0,
        )  # fmt: skip
        args = inputs(shape, 9, io)
        from replaystate import replay_step

        slots, bounds = torch.tensor([4, 1, 6], dtype=torch.int32), bounds_of([4, 1, 4])
        with device_semantics():
            expected = replay_step(*args, pair.cpu, 0, slots, bounds)
        device = [x.cuda() for x in args]
        out = odd(torch.zeros(9, HV, V, dtype=io))
        got = replay_step(
            odd(device[0]), device[1].t().contiguous().t(), odd(device[2]), odd(device[3][:, None])[:, 0],
            odd(device[4][:, None])[:, 0], pair.gpu, 0, odd(slots[:, None].cuda())[:, 0], bounds.cuda(), out=out,
        )  # fmt: skip
        assert_close(got, expected, EPS[io], "out")
        pair.compare()
        transposed = device[0].t().contiguous().t()
        pair.fill()
        pair.gpu._step_records.zero_()
        pair.cpu._step_records.zero_()
        pair.pull()
        with device_semantics():
            expected = replay_step(*args, pair.cpu, 0, slots, bounds)
        got = replay_step(transposed, *device[1:], pair.gpu, 0, slots.cuda(), bounds.cuda())
        assert_close(got, expected, EPS[io], "out")
        pair.compare()

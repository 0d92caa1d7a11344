"""Promises about bits: they do not depend on threads, neighbours, places in memory, or on whether a row folds.

And about values that are not numbers or do not fit: a NaN stays in its row and behind its token, an overflow is limited
and flagged.
"""

from __future__ import annotations

import pytest
import torch

from replaystate import GDNShape, SlotStatus
from replaystate.kernels import cpu_backend

from .rig import BF16, F16, F32, POOLS, Step, assert_same_bits, bits, odd_place

SHAPES = [GDNShape(2, 4, 64, 64), GDNShape(1, 3, 33, 5), GDNShape(1, 8, 40, 24)]
DTYPES = [(F32, F32, F32), (BF16, F16, F16), (F16, BF16, F16), (F32, F16, BF16)]


def mixed_step(shape: GDNShape, dtypes: tuple[torch.dtype, ...] = DTYPES[0], seed: int = 0) -> Step:
    io, state, ring = dtypes
    slots, lengths = [3, 0, 1, 4, -1, 5, 2], [2, 1, 4, 0, 2, 3, 4]
    windows = [(30, 5), (0, 0), (7, 16), (25, 14), (0, 0), (20, 12), (1, 13)]
    return Step(shape, slots, lengths, windows, io=io, state_dtype=state, ring_dtype=ring, seed=seed, pool=7)


@pytest.mark.usefixtures("restore_threads")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_threads_do_not_change_bits(isa: str, shape: GDNShape) -> None:
    step = mixed_step(shape)
    single = step.rows([0])  # one row on many threads: the value heads of a key head part
    found = []
    for threads in (1, 2, 7):
        torch.set_num_threads(threads)
        found.append((step.run(), single.run(), prefill(shape)))
    for other in found[1:]:
        assert_same_bits(other[0], found[0][0])
        assert_same_bits(other[1], found[0][1])
        assert all(torch.equal(bits(x), bits(y)) for x, y in zip(other[2], found[0][2], strict=True))


def prefill(shape: GDNShape, rows: tuple[int, ...] = (0, 1, 2)) -> tuple[torch.Tensor, torch.Tensor]:
    """Out and final states of the rows chosen among three prompts."""
    rng, lengths = torch.Generator().manual_seed(5), [20, 33, 1]
    H, HV, K, V = shape.sizes
    prompts = [
        (
            torch.randn(n, shape.qkv_dim, generator=rng),
            torch.randn(n, HV, generator=rng),
            torch.randn(n, HV, generator=rng),
        )
        for n in lengths
    ]
    qkv, a, b = (torch.cat(x) for x in zip(*(prompts[i] for i in rows), strict=True))
    bounds = torch.tensor([0, *torch.tensor([lengths[i] for i in rows]).cumsum(0).tolist()])
    out, final = torch.empty(len(qkv), HV, V), torch.empty(len(rows), HV, V, K)
    cpu_backend.gated_delta_rule(qkv, a, b, torch.zeros(HV), torch.zeros(HV), None, bounds, out, final, K**-0.5)
    return out, final


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_neighbours_do_not_change_bits(isa: str, shape: GDNShape, dtypes: tuple[torch.dtype, ...]) -> None:
    step = mixed_step(shape, dtypes)
    together = step.run()
    permuted_order = [6, 3, 0, 4, 2, 5, 1]
    permuted = step.rows(permuted_order)
    for row, place in ((row, permuted_order.index(row)) for row in step.live()):
        alone, other = step.rows([row]).run(), permuted.run()
        slot = step.slots[row]
        assert torch.equal(bits(alone.out), bits(together.out[step.tokens(row)]))
        assert torch.equal(bits(other.out[permuted.tokens(place)]), bits(together.out[step.tokens(row)]))
        for name in POOLS:
            for result in (alone, other):
                assert torch.equal(bits(getattr(result, name)[slot]), bits(getattr(together, name)[slot])), name


def test_neighbours_do_not_change_a_prefill(isa: str) -> None:
    shape = SHAPES[0]
    out, final = prefill(shape)
    for row, tokens in enumerate((slice(0, 20), slice(20, 53), slice(53, 54))):
        alone, state = prefill(shape, (row,))
        assert torch.equal(bits(alone), bits(out[tokens]))
        assert torch.equal(bits(state[0]), bits(final[row]))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtypes", DTYPES, ids=str)
def test_every_argument_at_an_odd_offset(isa: str, shape: GDNShape, dtypes: tuple[torch.dtype, ...]) -> None:
    step = mixed_step(shape, dtypes)
    assert_same_bits(step.run(place=odd_place), step.run())


def test_strided_arguments(isa: str) -> None:
    """Packed rows, gates, cursors and pools with gaps; every other layout gives the same bits as the dense one."""

    def spread(x: torch.Tensor) -> torch.Tensor:
        if x.dim() == 0 or x.shape[0] == 0:
            return x.clone()
        whole = torch.full((x.shape[0], x[0].numel() + 3), -7, dtype=x.dtype)
        inside = whole[:, 1 : 1 + x[0].numel()].unflatten(1, x.shape[1:]) if x.dim() > 1 else whole[:, 1]
        inside.copy_(x)
        return inside

    step = mixed_step(SHAPES[0], DTYPES[1])
    assert_same_bits(step.run(place=spread), step.run())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_a_fold_does_not_change_the_outputs(isa: str, shape: GDNShape) -> None:
    """P = 8: width 4 keeps the window, width 9 folds it."""
    options = {"slots": [1, 2], "lengths": [3, 4], "windows": [(5, 8), (28, 8)]}
    kept, folded = Step(shape, **options, width=4).run(), Step(shape, **options, width=9).run()  # type: ignore[arg-type]
    assert torch.equal(bits(kept.out), bits(folded.out))
    assert not torch.equal(bits(kept.state), bits(folded.state))


def test_nan_stays_behind_its_token_and_in_its_row(isa: str) -> None:
    step = mixed_step(SHAPES[0])
    clean = step.run()
    for name, column in (("mixed_qkv", 3), ("mixed_qkv", 150), ("mixed_qkv", 300), ("a", 1), ("b", 1)):
        x = step.tensors[name]
        kept = x[5, column].item()
        x[5, column] = float("nan")  # the third of row 2's four tokens (tokens 3..6)
        found = step.run()
        x[5, column] = kept
        touched = found.out.isnan().flatten(1).any(1)
        assert touched.tolist() == [t in touched_tokens(name, column) for t in range(len(touched))], (name, column)
        others = [t for t in range(len(touched)) if not touched[t]]
        assert torch.equal(bits(found.out[others]), bits(clean.out[others]))


def touched_tokens(name: str, column: int) -> set[int]:
    """A query only spoils its own output; all else spoils the later tokens too."""
    return {5} if name == "mixed_qkv" and column < 128 else {5, 6}


@pytest.mark.parametrize("dtype", [F16, BF16], ids=str)
def test_overflow_is_limited_and_flagged(isa: str, dtype: torch.dtype) -> None:
    limit = torch.finfo(dtype).max
    for name, bit in (("u_ring", SlotStatus.RING_SATURATED), ("state", SlotStatus.STATE_SATURATED)):
        step = Step(SHAPES[1], [1, 2, 3], [1, 1, 1], [(0, 16)] * 3, width=1, state_dtype=dtype, ring_dtype=dtype)
        if name == "u_ring":
            step.tensors["mixed_qkv"][1, 66:] = 3e38
            step.tensors["mixed_qkv"][2, 66] = float("nan")
            step.tensors["b"][1] = 100.0
            if dtype == BF16:
                step.tensors["mixed_qkv"][1, 66:] = 3.4e38
        else:
            step.tensors["g_ring"].fill_(0.0)
            step.tensors["u_ring"][2] = limit
            step.tensors["k_ring"][2] = 1.0
            step.tensors["state"][3, 0, 0, 0] = float("nan")
        found, torchs = step.run(), step.run("torch")
        assert torch.equal(found.status, torchs.status)
        assert found.status[[1, 3]].tolist() == [0, 0]
        assert int(found.status[2]) & bit
        assert not getattr(found, name)[2].isinf().any()
        assert bool((getattr(found, name)[2].abs() == limit).any())
        assert bool(getattr(found, name)[3].isnan().any())


def test_gate_extremes(isa: str) -> None:
    """a = +-100, -inf and A_log = +-100: never NaN, and the decay that float64 has."""
    values = torch.tensor([-float("inf"), -100.0, 0.0, 100.0])
    step = Step(GDNShape(1, 4, 8, 8), [1, 2, 3, 4], [4] * 4, [(0, 3), (30, 16), (5, 0), (9, 13)])
    step.tensors["a"] = values.repeat(4)[:, None].expand(16, 4).contiguous()
    step.tensors["A_log"], step.tensors["dt_bias"] = torch.tensor([-100.0, 0.0, 3.0, 100.0]), torch.zeros(4)
    found = step.run()
    for row in range(4):
        out, appended, _ = step.truth(row)
        assert not found.out[step.tokens(row)].isnan().any()
        torch.testing.assert_close(found.out[step.tokens(row)].double(), out, rtol=1e-4, atol=1e-6)
        rows = step.appended(found, row)
        torch.testing.assert_close(rows.g, appended.g.float(), rtol=3e-7, atol=0)


def test_a_padding_token_leaves_the_state_exactly(isa: str) -> None:
    """q = k = v = b = 0 and a = -inf: decay 1 and u = 0, so the fold of such rows changes no bit."""
    step = Step(GDNShape(1, 2, 24, 8), [1], [4], [(0, 0)])
    for name in ("mixed_qkv", "b"):
        step.tensors[name].zero_()
    step.tensors["a"].fill_(-float("inf"))
    found = step.run()
    assert not found.g_ring[1, :, :4].any()
    assert not found.u_ring[1, :, :4].any()
    pools = [getattr(found, name) for name in POOLS]
    before = pools[0].clone()
    one, zero = torch.tensor([1]), torch.tensor([0])
    cpu_backend.fold_slots([pools[0]], *[[x] for x in pools[1:]], one, one, zero, torch.tensor([4]), 16, None)
    assert torch.equal(pools[0][1], before[1])


def test_far_offsets_of_a_pool(isa: str) -> None:
    """Slots more than 2^31 elements apart: the pool's stride is 64 bit. The memory between is never touched."""
    gap = 2**31 + 5
    try:
        whole = torch.empty(2 * gap + 64, dtype=F16)
    except RuntimeError:
        pytest.skip("no address space for 8 GiB")
    step = Step(GDNShape(1, 1, 8, 8), [2, 1], [2, 1], [(0, 16), (0, 3)], state_dtype=F16, ring_dtype=F16, pool=3)

    def place(x: torch.Tensor) -> torch.Tensor:
        if x is not step.tensors["state"]:
            return x.clone()
        far = whole.as_strided(x.shape, (gap, *x.stride()[1:]))
        far.copy_(x)
        return far

    assert_same_bits(step.run(place=place), step.run())

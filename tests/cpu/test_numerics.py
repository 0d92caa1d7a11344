"""The C++ kernels against float64, by the 2x rule: their error is at most twice what the torch backend makes.

How this tests: a ragged step with a null row, an empty row, a wrapped window and rows that fold, from pools full of NaN
wherever nothing may be read. Outputs, appended rows and folded checkpoints are compared with `replaystate.reference` in
float64, computed from what the pools hold. The floors are a unit in the last place of the dtype stored.
"""

from __future__ import annotations

import itertools

import pytest
import torch

from replaystate import GDNShape, reference
from replaystate.kernels import cpu_backend, torch_backend

from .rig import BF16, F16, F32, POOLS, Step, bits

EPS = {F32: 2.0**-24, F16: 2.0**-11, BF16: 2.0**-8}
FLOOR = {dtype: eps / 2 for dtype, eps in EPS.items()}

SIZES = [5, 8, 33, 64, 96, 128, 192]
HEADS = [(2, 2), (1, 2), (1, 3), (2, 8), (1, 8)]


def error(found: torch.Tensor, truth: torch.Tensor) -> float:
    return float((found.double() - truth).norm() / truth.norm().clamp(min=1e-12))


def check_step(step: Step) -> None:
    """Every row of the step, on both backends."""
    found = {name: step.run(name) for name in ("cpu", "torch")}
    for row in step.live():
        out, appended, folded = step.truth(row)
        errors = {}
        for name, result in found.items():
            rows = step.appended(result, row)
            errors[name] = [("g", error(rows.g, appended.g), FLOOR[F32])]
            if step.lengths[row]:
                errors[name] += [
                    ("out", error(result.out[step.tokens(row)], out), FLOOR[step.io]),
                    ("u", error(rows.u, appended.u), FLOOR[step.ring_dtype]),
                    ("k", error(rows.k, appended.k), FLOOR[step.ring_dtype]),
                ]
            if step.windows[row][1] >= step.window + 1 - step.width:
                state = result.state[step.slots[row]]
                errors[name].append(("state", error(state, folded), FLOOR[step.state_dtype]))
        for (what, mine, floor), (_, theirs, _) in zip(errors["cpu"], errors["torch"], strict=True):
            # sizes of 5 leave nothing to average over: the floor is a unit of the stored dtype
            assert mine <= 2 * theirs + 4 * floor, f"row {row}: {what}: {mine:.3g}, torch {theirs:.3g}"
    padding = [i for i in range(len(step.slots)) if i not in step.live()]
    for row in padding:
        assert not found["cpu"].out[step.tokens(row)].any()
    # What a step may write: appended rows, folded checkpoints. The rest keeps its bits, NaN included.
    for name in POOLS:
        touched = torch.zeros(step.tensors[name].shape, dtype=torch.bool)
        for row in step.live():
            slot, (start, count) = step.slots[row], step.windows[row]
            if name != "state":
                touched[slot][:, [(start + count + t) % step.ring_slots for t in range(step.lengths[row])]] = True
            elif count >= step.window + 1 - step.width:
                touched[slot] = True
        before, after = bits(step.tensors[name]), bits(getattr(found["cpu"], name))
        assert torch.equal(before[~touched], after[~touched]), name
    assert torch.equal(found["cpu"].step_records, found["torch"].step_records)
    assert torch.equal(found["cpu"].status, found["torch"].status)


def ragged(shape: GDNShape, seed: int = 0, **options: object) -> Step:
    """Six rows: short, null, full and folding, empty and folding, negative, wrapped."""
    slots, lengths = [3, 0, 1, 4, -1, 5], [2, 1, 4, 0, 2, 3]
    windows = [(30, 5), (0, 0), (7, 16), (25, 14), (0, 0), (20, 12)]
    return Step(shape, slots, lengths, windows, seed=seed, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtypes", list(itertools.product((F32, F16, BF16), repeat=3)), ids=str)
def test_every_dtype_triple(isa: str, dtypes: tuple[torch.dtype, torch.dtype, torch.dtype]) -> None:
    io, state, ring = dtypes
    check_step(ragged(GDNShape(2, 4, 40, 24), io=io, gates=F32, state_dtype=state, ring_dtype=ring))
    check_step(ragged(GDNShape(1, 2, 64, 64), io=io, gates=BF16, state_dtype=state, ring_dtype=ring, seed=1))


@pytest.mark.parametrize("K", SIZES)
@pytest.mark.parametrize("V", SIZES)
def test_every_size(isa: str, K: int, V: int) -> None:
    check_step(ragged(GDNShape(1, 2, K, V), seed=K * V))
    check_step(ragged(GDNShape(1, 2, K, V), seed=K * V, state_dtype=F16, ring_dtype=F16, io=BF16))


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_head_ratio(isa: str, heads: tuple[int, int]) -> None:
    check_step(ragged(GDNShape(*heads, 24, 40), seed=heads[1]))


@pytest.mark.parametrize("width", [1, 2, 3, 5, 8, 16])
def test_every_width(isa: str, width: int) -> None:
    lengths = [width, max(width - 1, 0), 0, min(width, 1)]
    windows = [(3, 16), (31, 7), (16, 16 + 1 - width), (9, 0)]
    check_step(Step(GDNShape(2, 4, 32, 48), [1, 2, 3, 4], lengths, windows, width=width, seed=width))


def test_other_windows(isa: str) -> None:
    for window, ring in ((1, 2), (4, 8), (32, 64), (16, 128)):
        windows = [(ring - 1, window), (0, window // 2)]
        check_step(Step(GDNShape(1, 2, 16, 24), [2, 1], [1, 1], windows, width=1, window=window, ring_slots=ring))


@pytest.mark.parametrize("io", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize("initial", [None, F32, F16, torch.float64], ids=str)
def test_prefill(isa: str, io: torch.dtype, initial: torch.dtype | None) -> None:
    for seed, (H, HV, K, V) in enumerate([(2, 4, 64, 64), (1, 3, 33, 5), (1, 8, 24, 96), (2, 2, 128, 40)]):
        rng, shape, lengths = torch.Generator().manual_seed(seed), GDNShape(H, HV, K, V), [1, 0, 16, 37, 15, 64]
        bounds = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()])
        N = int(bounds[-1])
        qkv = torch.randn(N, shape.qkv_dim, generator=rng).to(io)
        a, b = torch.randn(N, HV, generator=rng), torch.randn(N, HV, generator=rng)
        A_log, dt_bias = torch.randn(HV, generator=rng) * 0.5 - 1, torch.randn(HV, generator=rng)
        given = None if initial is None else torch.randn(len(lengths), HV, V, K, generator=rng).to(initial)
        double = [x.double() for x in (qkv, a, b, A_log, dt_bias)]
        truth, state = reference.recurrent(
            *double, shape, bounds, initial_state=None if given is None else given.double()
        )
        errors = {}
        for backend in (cpu_backend, torch_backend):
            out = torch.full((N, HV, V), float("nan"), dtype=io)
            final = torch.full((len(lengths), HV, V, K), float("nan"))
            backend.gated_delta_rule(qkv, a, b, A_log, dt_bias, given, bounds, out, final, K**-0.5)
            errors[backend.NAME] = [error(out, truth), error(final, state)]
            start = torch.zeros(HV, V, K) if given is None else given[1].float()
            assert torch.equal(final[1], start)  # the empty row
        for mine, theirs, floor in zip(errors["cpu"], errors["torch"], (FLOOR[io], FLOOR[F32]), strict=True):
            assert mine <= 2 * theirs + 4 * floor, errors


@pytest.mark.parametrize("state_dtype", [F32, F16, BF16], ids=str)
def test_folds_and_reads(isa: str, state_dtype: torch.dtype) -> None:
    for K, V in ((64, 64), (33, 5), (40, 96)):
        step = ragged(GDNShape(1, 3, K, V), state_dtype=state_dtype, ring_dtype=F16)
        pools = [step.tensors[name] for name in POOLS]
        src, dst = torch.tensor([3, -1, 1, 5]), torch.tensor([0, 2, 2, 5])
        start, count = torch.tensor([30, 0, 7, 20]), torch.tensor([0, 3, 9, 12])
        truths = []
        for s, first, n in zip(src.tolist(), start.tolist(), count.tolist(), strict=True):
            state, u, k, g = (x[s].double() for x in pools)
            truths.append(reference.fold(state, reference.window_of(u, k, g, first, n)) if s >= 0 else None)
        errors: dict[str, list[float]] = {"cpu": [], "torch": []}
        for backend in (cpu_backend, torch_backend):
            folded, status = pools[0].clone(), torch.zeros(6, dtype=torch.int32)
            backend.fold_slots([folded], *[[x] for x in pools[1:]], src, dst, start, count, 16, status)
            out = torch.full((4, 3, V, K), 7.0)
            backend.read_state(*pools, src, start, count, 16, out)
            assert torch.equal(bits(folded[0]), bits(pools[0][3]))  # no rows: an exact copy
            assert bool((out[1] == 7).all())
            assert not status.any()
            for row in (0, 2, 3):
                errors[backend.NAME] += [error(folded[dst[row]], truths[row]), error(out[row], truths[row])]
        for mine, theirs in zip(errors["cpu"], errors["torch"], strict=True):
            assert mine <= 2 * theirs + 4 * FLOOR[F32], errors


def test_gates_are_exact_to_two_units(isa: str) -> None:
    """g and beta over their whole range, read from the ring: a zero state leaves u = beta v, and v is 1."""
    rng = torch.Generator().manual_seed(0)
    shape, width, rows = GDNShape(1, 64, 8, 8), 8, 60
    step = Step(shape, list(range(1, rows + 1)), [width] * rows, [(0, 0)] * rows, width=width, pool=rows + 1)
    tensors, N = step.tensors, width * rows
    spread = torch.tensor([1.0, 10, 100, 1e4])[torch.randint(0, 4, (N, 64), generator=rng)]
    tensors["a"], tensors["b"] = torch.randn(N, 64, generator=rng) * spread, torch.randn(N, 64, generator=rng) * spread
    tensors["A_log"] = torch.randn(64, generator=rng) * torch.tensor([1.0, 4, 16, 60]).repeat(16)
    tensors["mixed_qkv"].zero_()
    tensors["mixed_qkv"][:, 16:] = 1.0
    tensors["state"].zero_()
    result = step.run()
    g, beta = (x[1:, :, :width].transpose(1, 2).reshape(N, 64) for x in (result.g_ring, result.u_ring[..., 0]))
    inputs = [tensors[name].double() for name in ("a", "b", "A_log", "dt_bias")]
    true_g, true_beta = reference.gates(*inputs)
    for found, truth in ((g, true_g), (beta, true_beta)):
        rounded = truth.float()
        ulp = torch.nextafter(rounded.abs(), torch.tensor(float("inf"))).double() - rounded.abs().double()
        both_infinite = rounded.isinf() & (found == rounded)
        off = torch.where(both_infinite, 0.0, (found.double() - truth).abs() / ulp)
        assert float(off.max()) <= 2

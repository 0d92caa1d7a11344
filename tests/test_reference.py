"""The reference is the truth, so it is tested against itself in ways that cannot all be wrong together.

In plain words: first, two tokens are worked out with Python floats from the equations of the docstring. Then, in
float64, the same tokens are run by the plain recurrence and by checkpoint + ring in every way of splitting them into
steps, rejecting drafts and folding; all must agree to 1e-12. Last come gates so extreme that a careless formula gives
NaN or a wrong decay.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape, reference
from replaystate.errors import ArgumentError
from replaystate.reference import Window, append, fold, gates, prefix_state, recurrent, replay, suffix_decay, window_of
from replaystate.shapes import flush_min, ring_slots_for

from .helpers import SHAPE, Inputs, assert_same_bits, bounds_of, random_inputs, random_state, relative_error

IDENTITY = 5e-15  # 1e-12 is asked for; observed at most 4.4e-16


def truth(tokens: Inputs, shape: GDNShape, state: Tensor) -> tuple[Tensor, list[Tensor]]:
    """(outputs, the state before each token and after the last), one token at a time."""
    outs, states = [], [state]
    for t in range(len(tokens)):
        out, after = recurrent(*tokens.rows(slice(t, t + 1)), shape, bounds_of([1]), initial_state=states[-1][None])
        outs.append(out)
        states.append(after[0])
    return torch.cat(outs), states


def empty_window(shape: GDNShape, dtype: torch.dtype = torch.float64) -> Window:
    H, HV, K, V = shape.sizes
    return Window(*(torch.zeros(0, *size, dtype=dtype) for size in ((H, K), (HV, V), (HV,))))


class Ring:
    """A slot as a cache keeps it, in float64: checkpoint, ring tensors full of NaN, cursors."""

    def __init__(self, shape: GDNShape, state: Tensor, window: int, width: int, start: int) -> None:
        H, HV, K, V = shape.sizes
        self.shape, self.window, self.state = shape, window, state
        self.slots, self.start, self.count = ring_slots_for(window, width), start, 0
        nan = float("nan")
        self.u = torch.full((HV, self.slots, V), nan, dtype=torch.float64)
        self.k = torch.full((H, self.slots, K), nan, dtype=torch.float64)
        self.g = torch.full((HV, self.slots), nan, dtype=torch.float64)

    def live(self) -> Window:
        return window_of(self.u, self.k, self.g, self.start, self.count)

    def step(self, tokens: Inputs, width: int, accepted: int) -> Tensor:
        out, rows = replay(*tokens, self.shape, self.state, self.live())
        at = [(self.start + self.count + s) % self.slots for s in range(len(tokens))]
        self.k[:, at], self.u[:, at], self.g[:, at] = (x.transpose(0, 1) for x in (rows.k, rows.u, rows.g))
        if self.count >= flush_min(self.window, width):
            self.state = fold(self.state, self.live())
            self.start, self.count = (self.start + self.count) % self.slots, 0
        self.count += accepted
        return out


# --- the equations, by hand ----------------------------------------------------------------------------------------


def test_two_tokens_worked_out_with_python_floats() -> None:
    # One head, K = 2, V = 1: few enough numbers to write the equations down one by one.
    shape = GDNShape(1, 1, 2, 1)
    q, k, v = [(0.5, -1.0), (2.0, 0.25)], [(1.0, 2.0), (-3.0, 0.5)], [0.7, -1.1]
    a, b, A_log, dt_bias = [0.3, -0.8], [0.2, -0.4], 0.1, -0.5
    S, expected = (0.4, -0.6), []
    start = S
    for t in range(2):
        g = -math.exp(A_log) * math.log1p(math.exp(a[t] + dt_bias))
        beta = 1 / (1 + math.exp(-b[t]))
        k_norm, q_norm = (math.sqrt(x[0] ** 2 + x[1] ** 2 + 1e-6) for x in (k[t], q[t]))
        kt = [x / k_norm for x in k[t]]
        qt = [2**-0.5 * x / q_norm for x in q[t]]
        S = (math.exp(g) * S[0], math.exp(g) * S[1])
        u = beta * (v[t] - (S[0] * kt[0] + S[1] * kt[1]))
        S = (S[0] + u * kt[0], S[1] + u * kt[1])
        expected.append(S[0] * qt[0] + S[1] * qt[1])

    def tensor(x: object) -> Tensor:
        return torch.tensor(x, dtype=torch.float64)

    mixed = torch.cat([tensor(q), tensor(k), tensor(v)[:, None]], dim=1)
    out, state = recurrent(
        mixed, tensor(a)[:, None], tensor(b)[:, None], tensor([A_log]), tensor([dt_bias]), shape, bounds_of([2]),
        initial_state=tensor(start).view(1, 1, 1, 2),
    )  # fmt: skip
    assert relative_error(out.flatten(), tensor(expected)) < 1e-14
    assert relative_error(state.flatten(), tensor(S)) < 1e-14


def test_packed_tokens_are_q_heads_then_k_heads_then_v_heads() -> None:
    q, k, v = reference.split_qkv(torch.arange(SHAPE.qkv_dim)[None], SHAPE)
    H, HV, K, V = SHAPE.sizes
    assert q.flatten().tolist() == list(range(H * K))
    assert k.flatten().tolist() == list(range(H * K, 2 * H * K))
    assert v.flatten().tolist() == list(range(2 * H * K, SHAPE.qkv_dim))
    assert (q.shape, k.shape, v.shape) == ((1, H, K), (1, H, K), (1, HV, V))


@pytest.mark.parametrize("ratio", [1, 2, 3])
def test_value_heads_read_their_key_head(ratio: int) -> None:
    # Value head hv alone, with key head hv // ratio alone, gives the same numbers.
    shape = GDNShape(2, 2 * ratio, 6, 5)
    x = random_inputs(shape, 4).double()
    out, state = recurrent(*x, shape, bounds_of([4]))
    q, k, v = reference.split_qkv(x.mixed_qkv, shape)
    for hv in range(2 * ratio):
        h = hv // ratio
        mixed = torch.cat([q[:, h], k[:, h], v[:, hv]], dim=1)
        one = [x.a[:, hv : hv + 1], x.b[:, hv : hv + 1], x.A_log[hv : hv + 1], x.dt_bias[hv : hv + 1]]
        alone, alone_state = recurrent(mixed, *one, GDNShape(1, 1, 6, 5), bounds_of([4]))
        assert relative_error(out[:, hv : hv + 1], alone) < IDENTITY
        assert relative_error(state[:, hv : hv + 1], alone_state) < IDENTITY


def test_ragged_rows_are_independent() -> None:
    x, states = random_inputs(tokens=7).double(), random_state(rows=4).double()
    out, after = recurrent(*x, SHAPE, bounds_of([3, 0, 4, 0]), initial_state=states)
    for row, (begin, end) in enumerate([(0, 3), (3, 3), (3, 7), (7, 7)]):
        alone, state = recurrent(
            *x.rows(slice(begin, end)), SHAPE, bounds_of([end - begin]), initial_state=states[row : row + 1]
        )
        assert relative_error(out[begin:end], alone) < IDENTITY
        assert relative_error(after[row], state[0]) < IDENTITY
    assert_same_bits(after[1], states[1], "the state of an empty row")


# --- recurrent = replay = fold, then recurrent ---------------------------------------------------------------------


# Lengths of the steps; every step's width is the longest, so that the longer lists fold often and wrap the ring.
SPLITS = [
    (4, 2, [1] * 12),  # plain decode: folds every four tokens, wraps a ring of 8
    (4, 4, [4, 4, 3, 1, 4, 2]),  # W = T: every step after a full one folds
    (16, 8, [8, 8, 1, 8, 5]),
    (16, 1, [1] * 20),
    (2, 1, [1] * 7),
    (1, 1, [1] * 5),  # the smallest window: every step folds one row
]


@pytest.mark.parametrize(("window", "width", "lengths"), SPLITS)
@pytest.mark.parametrize("start", [0, -1])  # -1: the last physical slot, so that the very first window wraps
def test_replay_in_steps_equals_the_recurrence(window: int, width: int, lengths: list[int], start: int) -> None:
    x, state = random_inputs(tokens=sum(lengths)).double(), random_state()[0].double()
    expected, states = truth(x, SHAPE, state)
    ring = Ring(SHAPE, state, window, width, start % ring_slots_for(window, width))
    begin = 0
    for length in lengths:
        out = ring.step(x.rows(slice(begin, begin + length)), width, length)
        assert relative_error(out, expected[begin : begin + length]) < IDENTITY
        begin += length
        assert relative_error(fold(ring.state, ring.live()), states[begin]) < IDENTITY


def test_rejected_drafts_leave_no_trace() -> None:
    # Each step carries wrong tokens (huge ones) after the accepted ones; the accepted stream alone is the truth.
    x, state = random_inputs(tokens=30).double(), random_state()[0].double()
    wrong = random_inputs(tokens=8, seed=9).double()
    wrong.mixed_qkv.mul_(1e6)
    _, states = truth(x, SHAPE, state)
    ring, begin = Ring(SHAPE, state, 16, 8, 29), 0
    for accepted, rejected in [(3, 5), (0, 8), (8, 0), (1, 7), (7, 1), (0, 1), (5, 3), (6, 2)]:
        right = x.rows(slice(begin, begin + accepted))
        tokens = Inputs(
            torch.cat([right.mixed_qkv, wrong.mixed_qkv[:rejected]]),
            torch.cat([right.a, wrong.a[:rejected]]),
            torch.cat([right.b, wrong.b[:rejected]]),
            x.A_log,
            x.dt_bias,
        )
        ring.step(tokens, 8, accepted)
        begin += accepted
        assert relative_error(fold(ring.state, ring.live()), states[begin]) < IDENTITY


@pytest.mark.parametrize("count", range(10))
def test_every_prefix_is_exact(count: int) -> None:
    # The contract's example: a checkpoint, nine rows in the window, and a boundary inside.
    x, state = random_inputs(tokens=9).double(), random_state()[0].double()
    _, states = truth(x, SHAPE, state)
    _, window = replay(*x, SHAPE, state, empty_window(SHAPE))
    assert relative_error(prefix_state(state, window, count), states[count]) < IDENTITY
    assert relative_error(fold(state, Window(*(rows[:count] for rows in window))), states[count]) < IDENTITY


@pytest.mark.parametrize("split", range(8))
def test_fold_then_recurrent_equals_recurrent(split: int) -> None:
    x, state = random_inputs(tokens=8).double(), random_state()[0].double()
    expected, states = truth(x, SHAPE, state)
    _, window = replay(*x.rows(slice(0, split)), SHAPE, state, empty_window(SHAPE))
    out, after = recurrent(
        *x.rows(slice(split, 8)), SHAPE, bounds_of([8 - split]), initial_state=fold(state, window)[None]
    )
    assert relative_error(out, expected[split:]) < IDENTITY
    assert relative_error(after[0], states[8]) < IDENTITY


@pytest.mark.parametrize("shape", [GDNShape(1, 3, 5, 9), GDNShape(2, 2, 8, 1), GDNShape(1, 8, 1, 4)], ids=str)
def test_identities_for_other_head_ratios_and_dims(shape: GDNShape) -> None:
    x, state = random_inputs(shape, 9).double(), random_state(shape)[0].double()
    expected, states = truth(x, shape, state)
    _, window = replay(*x.rows(slice(0, 5)), shape, state, empty_window(shape))
    out, rows = replay(*x.rows(slice(5, 9)), shape, state, window)
    assert relative_error(out, expected[5:]) < IDENTITY
    assert relative_error(fold(state, append(window, rows)), states[9]) < IDENTITY
    assert relative_error(fold(state, append(window, rows, 2)), states[7]) < IDENTITY


def test_window_of_wraps() -> None:
    ring = torch.arange(8.0)
    window = window_of(ring.view(1, 8, 1), ring.view(1, 8, 1), ring.view(1, 8), 6, 5)
    assert window.length == 5
    assert window.g.flatten().tolist() == [6, 7, 0, 1, 2]
    assert window.k.shape == (5, 1, 1)


@pytest.mark.parametrize("count", [-1, 4])
def test_fold_refuses_a_count_outside_the_window(count: int) -> None:
    _, window = replay(*random_inputs(tokens=3).double(), SHAPE, random_state()[0].double(), empty_window(SHAPE))
    with pytest.raises(ArgumentError, match=rf"fold: count: expected 0..3, got {count}"):
        fold(random_state()[0].double(), window, count)


def test_nothing_given_is_changed() -> None:
    x, state = random_inputs(tokens=4).double(), random_state(rows=1).double()
    _, window = replay(*x, SHAPE, state[0], empty_window(SHAPE))
    before = [t.clone() for t in (*x, state, *window)]
    recurrent(*x, SHAPE, bounds_of([4]), initial_state=state)
    replay(*x, SHAPE, state[0], window)
    fold(state[0], window)
    for now, then in zip((*x, state, *window), before, strict=True):
        assert_same_bits(now, then)


@pytest.mark.parametrize("scale", [None, 1.0, 0.125])
def test_scale_multiplies_outputs_only(scale: float | None) -> None:
    x = random_inputs(tokens=3).double()
    unit, state = recurrent(*x, SHAPE, bounds_of([3]), scale=1.0)
    out, same = recurrent(*x, SHAPE, bounds_of([3]), scale=scale)
    assert relative_error(out, unit * (12**-0.5 if scale is None else scale)) < IDENTITY
    assert_same_bits(same, state)


# Eight tokens accumulate a few roundings each. Observed 7.7e-3, 8.7e-4, 1.3e-7.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 3e-2), (torch.float16, 3e-3), (torch.float32, 5e-7)])
def test_other_float_dtypes_run(dtype: torch.dtype, tolerance: float) -> None:
    x, state = random_inputs(tokens=8, dtype=dtype), random_state()[0].to(dtype)
    x = Inputs(*(t.to(dtype) for t in x))
    expected, states = truth(x.double(), SHAPE, state.double())
    out, after = recurrent(*x, SHAPE, bounds_of([8]), initial_state=state[None])
    _, window = replay(*x.rows(slice(0, 5)), SHAPE, state, empty_window(SHAPE, dtype))
    out2, rows = replay(*x.rows(slice(5, 8)), SHAPE, state, window)
    for got, want in ((out, expected), (after[0], states[8]), (out2, expected[5:])):
        assert got.dtype == dtype
        assert relative_error(got, want) < tolerance
    assert relative_error(fold(state, append(window, rows)), states[8]) < tolerance


# --- gates ---------------------------------------------------------------------------------------------------------

INF = math.inf
# a + dt_bias, A_log -> g. The last but one is the contract's example: a plain product gives -inf there, or NaN at -inf.
EXTREMES = [
    (-INF, 0.0, 0.0),
    (-INF, 100.0, 0.0),
    (-INF, -100.0, 0.0),
    (INF, 0.0, -INF),
    (100.0, 0.0, -100.0),
    (100.0, -100.0, -100 * math.exp(-100)),
    (100.0, 100.0, -100 * math.exp(100)),
    (-100.0, 0.0, -math.exp(-100)),
    (-100.0, -100.0, -math.exp(-200)),
    (-100.0, 100.0, -1.0),
    (0.0, 0.0, -math.log(2)),
]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("x", "A_log", "g"), EXTREMES)
def test_gate_extremes(x: float, A_log: float, g: float, dtype: torch.dtype) -> None:
    a = torch.tensor([x], dtype=dtype)
    zero = torch.zeros(1, dtype=dtype)
    got, beta = gates(a, zero, torch.tensor([A_log], dtype=dtype), zero)
    assert beta.item() == 0.5
    assert not got.isnan().any()
    # The exponent A_log + log softplus is rounded in the dtype, so g may be off by |exponent| roundings.
    exponent = abs(A_log) + abs(math.log(-g)) if -INF < g < 0 else 1
    expected = torch.tensor(g, dtype=torch.float64).to(dtype).item()
    assert got.item() == pytest.approx(expected, rel=2 * (1 + exponent) * torch.finfo(dtype).eps, abs=1e-300)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_log_softplus_is_smooth_at_its_cutoff(dtype: torch.dtype) -> None:
    x = torch.linspace(-45, 45, 1801, dtype=dtype)
    exact = torch.tensor([math.log(math.log1p(math.exp(float(t)))) for t in x.double()], dtype=torch.float64)
    error = (reference.log_softplus(x).double() - exact).abs() / exact.abs().clamp(min=1)
    assert error.max() < 4 * torch.finfo(dtype).eps


@pytest.mark.parametrize("b", [100.0, -100.0, INF, -INF])
def test_beta_extremes(b: float) -> None:
    zero = torch.zeros(1, dtype=torch.float64)
    _, beta = gates(zero, torch.tensor([b], dtype=torch.float64), zero, zero)
    assert beta.item() == pytest.approx(1.0 if b > 0 else 0.0, abs=1e-40)


@pytest.mark.parametrize("A_log", [-100.0, 0.0, 100.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_a_no_op_token_leaves_the_state_exactly_unchanged(dtype: torch.dtype, A_log: float) -> None:
    state = random_state().to(dtype)
    zero = torch.zeros(1, SHAPE.qkv_dim, dtype=dtype)
    a = torch.full((1, 4), -INF, dtype=dtype)
    layer = torch.full((4,), A_log, dtype=dtype)
    x = Inputs(zero, a, torch.zeros(1, 4, dtype=dtype), layer, torch.zeros(4, dtype=dtype))
    out, after = recurrent(*x, SHAPE, bounds_of([1]), initial_state=state)
    assert torch.equal(after, state)  # as numbers: -0.0 + 0.0 is 0.0
    assert out.eq(0).all()
    out, window = replay(*x, SHAPE, state[0], empty_window(SHAPE, dtype))
    assert window.u.eq(0).all()
    assert window.g.eq(0).all()
    assert out.eq(0).all()
    assert torch.equal(fold(state[0], window), state[0])


def test_suffix_decay() -> None:
    w, total = suffix_decay(torch.tensor([[-1.0], [-2.0], [-4.0]], dtype=torch.float64))
    assert w.flatten().tolist() == pytest.approx([math.exp(-6), math.exp(-4), 1.0])
    assert total.item() == pytest.approx(math.exp(-7))


# One hard decay among mild ones. Differences of cumulative sums lose 2e-6 / 1.5e-3 / 2.9e-2 / everything (contract
# section 3); suffix sums keep float32's own rounding. Observed at most 1.5e-7.
@pytest.mark.parametrize("hard", [-50.0, -1e4, -1e6, -INF])
@pytest.mark.parametrize("at", [0, 7, 15])
def test_one_hard_decay_keeps_float32_precision(hard: float, at: int) -> None:
    state = random_state()[0]
    _, window = replay(*random_inputs(tokens=16), SHAPE, state, empty_window(SHAPE, torch.float32))
    window.g[at] = hard
    exact = fold(state.double(), Window(*(x.double() for x in window)))
    assert not exact.isnan().any()
    assert relative_error(fold(state, window), exact) < 1e-6
    tokens = random_inputs(tokens=3, seed=5)
    out, _ = replay(*tokens, SHAPE, state, window)
    expected, _ = replay(*tokens.double(), SHAPE, state.double(), Window(*(x.double() for x in window)))
    assert relative_error(out, expected) < 1e-6


@pytest.mark.parametrize("hard", [50.0, 1e4, 1e6, INF])
def test_one_hard_decay_among_new_tokens(hard: float) -> None:
    x, state = random_inputs(tokens=6).double(), random_state()[0].double()
    x.a[2] = hard
    expected, states = truth(x, SHAPE, state)
    out, rows = replay(*x, SHAPE, state, empty_window(SHAPE))
    assert not out.isnan().any()
    assert relative_error(out, expected) < IDENTITY
    assert relative_error(fold(state, rows), states[6]) < IDENTITY

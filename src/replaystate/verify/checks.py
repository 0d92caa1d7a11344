"""One function per op: run it on a backend, and measure it against float64 and against plain torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ..reference import Window, fold, recurrent
from ..shapes import GDNShape, flush_min
from .scenario import (
    NULL_SLOT,
    RING_SLOTS,
    WINDOW,
    Dtypes,
    Layer,
    Pool,
    Slot,
    Tokens,
    eager_recurrence,
    make_layer,
    make_pool,
    make_tokens,
    relative_error,
)

FLOOR = 1e-6
"""Added to every limit, for float32 sums taken in another order than eager torch's. Backend "torch" on a CPU does not
need it."""

WIDTHS = (1, 2, 4, 8, 16)
ROUNDS = 3
PREFIXES = (0, 1, 2, 7, 8, 15, 16)

SHAPES = (GDNShape(2, 4, 128, 128), GDNShape(1, 1, 64, 64), GDNShape(1, 3, 64, 96), GDNShape(2, 16, 32, 16))
"""Head ratios 2, 1, 3 and 8; the first is what kernels of fixed size take, the last two have K != V."""

FP32, FP16, BF16 = torch.float32, torch.float16, torch.bfloat16
DTYPES = (
    Dtypes(FP32, FP32, FP32),
    Dtypes(FP32, FP32, FP16),
    Dtypes(BF16, FP32, FP32),
    Dtypes(FP16, FP16, FP16),
    Dtypes(BF16, FP16, FP16),
    Dtypes(BF16, BF16, BF16),
)

LIVE = (1, 2, 3, 4, 5)
EXTREME_TOKENS, EXTREME_WINDOW = 4, 5
BYSTANDER = 6


@dataclass
class Case:
    """One run of one op: its errors and those of plain torch, by quantity ("output", "state").

    Args:
        op: name of the op.
        dtypes: of inputs, checkpoints and rings.
        width: executed_width; None for ops without one.
        shape: sizes of the layer.
    """

    op: str
    dtypes: Dtypes
    width: int | None
    shape: GDNShape
    errors: dict[str, float] = field(default_factory=dict)
    eager_errors: dict[str, float] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)

    def compare(self, quantity: str, place: str, got: Tensor, eager: Tensor, truth: Tensor) -> None:
        """Measure got and eager against truth, heads first, and keep the largest error of each and where it was."""
        error = relative_error(got, truth)
        if error >= self.errors.get(quantity, 0.0):
            self.errors[quantity], self.places[quantity] = error, place
        self.eager_errors[quantity] = max(self.eager_errors.get(quantity, 0.0), relative_error(eager, truth))

    def require(self, condition: bool, place: str) -> None:
        """A promise without a tolerance: its breach is an infinite error."""
        if not condition:
            self.fail(place)

    def fail(self, place: str) -> None:
        """The case is lost, whatever its other errors are."""
        self.errors["output"], self.places["output"] = float("inf"), place


Run = Callable[[Case, str, torch.device], None]


def cases() -> Iterator[tuple[Case, Run]]:
    """Every case, with the function that runs it on a backend and device."""
    for dtypes in DTYPES:
        for i, width in enumerate(WIDTHS):
            for shape in (SHAPES[0], SHAPES[1 + i % 3]):
                yield Case("replay_step", dtypes, width, shape), replay_step
    for dtypes in DTYPES:
        for i, width in enumerate(WIDTHS):
            yield Case("ucache_flush", dtypes, width, SHAPES[(i % 2) * (1 + i // 2)]), ucache_flush
    stored = list(dict.fromkeys(Dtypes(FP32, dtypes.state, dtypes.ring) for dtypes in DTYPES))
    for op, run in (("materialize", materialize), ("read_state", read_state)):
        for dtypes in stored:
            for shape in SHAPES:
                yield Case(op, dtypes, None, shape), run
    for io in (FP32, FP16, BF16):
        for shape in SHAPES:
            yield Case("gated_delta_rule", Dtypes(io, FP32, FP32), None, shape), gated_delta_rule


def _places(width: int) -> dict[int, tuple[int, int]]:
    """(ring_start, num_committed) of the live slots.

    From scratch; the longest window that does not fold; a full one that wraps; the shortest that folds, which wraps too
    where it is long enough; and one with an extreme decay.
    """
    return {
        1: (0, 0),
        2: (5, flush_min(WINDOW, width) - 1),
        3: (RING_SLOTS - 3, WINDOW),
        4: (RING_SLOTS - 11, min(WINDOW, flush_min(WINDOW, width))),
        EXTREME_WINDOW: (11, 9),
    }


def _set_up(case: Case, device: torch.device, num_slots: int = 7) -> tuple[Layer, Pool, torch.Generator]:
    generator = torch.Generator().manual_seed(1000 * (case.width or 0) + case.shape.num_v_heads)
    layer = make_layer(case.shape, generator)
    places = _places(case.width or 4)
    pool = make_pool(layer, case.dtypes, places, num_slots, device, generator, extreme=EXTREME_WINDOW)
    return layer, pool, generator


def _untouched(case: Case, pool: Pool, before: list[Tensor], slots: tuple[int, ...]) -> None:
    same = all(torch.equal(now[list(slots)], then[list(slots)]) for now, then in zip(pool.bits(), before, strict=True))
    case.require(same, f"a slot that was not named was written (one of {list(slots)})")


def _describe(slot: int, twin: Slot, width: int | None) -> str:
    count = twin.window.length
    wraps = ", wraps" if twin.start + count > RING_SLOTS else ""
    folds = ", folds" if width is not None and count >= flush_min(WINDOW, width) else ""
    return f"slot {slot} (ring_start {twin.start}, {count} rows{wraps}{folds})"


def replay_step(case: Case, backend: str, device: torch.device) -> None:
    """Rounds of ragged steps and commits, permuted rows beside padding; then the states."""
    assert case.width is not None
    width, dtypes, ops = case.width, case.dtypes, torch.ops.replaystate
    layer, pool, generator = _set_up(case, device)
    weights = layer.A_log.to(device), layer.dt_bias.to(device)
    before = pool.bits()
    for round_number in range(ROUNDS):
        order = [4, -1, 2, NULL_SLOT, 1, 5, 3]
        lengths = {1: width, 2: width, 3: max(1, width - 1), 4: width, 5: 0 if round_number == 1 else (width + 1) // 2}
        rows: list[Tokens] = []
        bounds = [0]
        for slot in order:
            n = lengths.get(slot, 1)
            row = make_tokens(case.shape, n, dtypes.io, generator, extreme=slot == EXTREME_TOKENS)
            rows.append(row if slot in LIVE else Tokens(*(torch.full_like(x, float("nan")) for x in row)))
            bounds.append(bounds[-1] + n)
        packed = Tokens(*(torch.cat(x) for x in zip(*rows, strict=True))).to(device)
        out = torch.full((bounds[-1], case.shape.num_v_heads, case.shape.head_v_dim), float("nan"), dtype=dtypes.io)
        out = out.to(device)
        indices = torch.tensor(order, dtype=torch.int32, device=device)
        ops.replay_step(
            *packed, *weights, pool.state, *pool.rings, pool.ring_start, pool.num_committed, pool.step_records,
            pool.status, out, indices, torch.tensor(bounds, dtype=torch.int32, device=device), 0, width, WINDOW,
            NULL_SLOT, case.shape.head_k_dim**-0.5, backend,
        )  # fmt: skip
        accepted = [0] * len(order)
        for i, slot in enumerate(order):
            y = out[bounds[i] : bounds[i + 1]]
            if slot not in LIVE:
                case.require(not bool(y.any()), "a padding row's output is not zero")
                continue
            twin = pool.slots[slot]
            place = f"round {round_number + 1}, {_describe(slot, twin, width)}"
            n = lengths[slot]
            # All of slot 2's tokens and none of slot 4's; of the others' whatever the generator says.
            accepted[i] = {2: n, 4: 0}.get(slot, int(torch.randint(n + 1, (1,), generator=generator)))
            exact, eager = twin.step(rows[i], layer, dtypes, width, accepted[i])
            case.compare("output", place, y.transpose(0, 1), eager.transpose(0, 1), exact.transpose(0, 1))
        ops.commit(
            indices, torch.tensor(accepted, dtype=torch.int32, device=device), pool.ring_start, pool.num_committed,
            pool.step_records, pool.status, WINDOW, RING_SLOTS, NULL_SLOT, backend,
        )  # fmt: skip
    for slot, twin in pool.slots.items():
        cursors = int(pool.ring_start[slot]), int(pool.num_committed[slot])
        case.require(cursors == (twin.start, twin.window.length), f"cursors after {ROUNDS} commits, slot {slot}")
    states = ops.read_state(
        pool.state, *pool.rings, torch.tensor(LIVE, device=device), pool.ring_start, pool.num_committed, WINDOW,
        NULL_SLOT, backend,
    )  # fmt: skip
    for state, (slot, twin) in zip(states, sorted(pool.slots.items()), strict=True):
        place = f"after {ROUNDS} rounds, {_describe(slot, twin, None)}"
        case.compare("state", place, state, twin.eager_state(), twin.truth)
    _untouched(case, pool, before, (NULL_SLOT, BYSTANDER))
    case.require(not bool(pool.status.any()), "status bits are set")


def ucache_flush(case: Case, backend: str, device: torch.device) -> None:
    """The kernel-level step from padded rows with per-row cursors; then the states, through prefix_materialize."""
    assert case.width is not None
    width, dtypes, ops = case.width, case.dtypes, torch.ops.replaystate
    targets = [7, 8, 9, 10, 11]
    layer, pool, generator = _set_up(case, device, num_slots=12)
    H, HV, K, V = case.shape.sizes
    before = pool.bits()
    rows = [make_tokens(case.shape, width, dtypes.io, generator, extreme=slot == EXTREME_TOKENS) for slot in LIVE]
    padding = Tokens(*(torch.full_like(x, float("nan")) for x in rows[0]))
    mixed_qkv, a, b = (torch.stack(x).to(device) for x in zip(*rows, padding, strict=True))
    q, k, v = mixed_qkv.split([H * K, H * K, HV * V], dim=-1)
    out = torch.full((len(rows) + 1, width, HV, V), float("nan"), dtype=dtypes.io, device=device)
    twins = [pool.slots[slot] for slot in LIVE]
    counts = [twin.window.length for twin in twins] + [0]
    ops.ucache_flush(
        q.unflatten(-1, (H, K)), k.unflatten(-1, (H, K)), v.unflatten(-1, (HV, V)), a, b, layer.A_log.to(device),
        layer.dt_bias.to(device), pool.state, *pool.rings,
        torch.tensor([*LIVE, -1], dtype=torch.int32, device=device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        torch.tensor([twin.start for twin in twins] + [0], dtype=torch.int32, device=device),
        out, flush_min(WINDOW, width), False, K**-0.5, backend,
    )  # fmt: skip
    case.require(bool(out[-1].isnan().all()), "a padding row's output was written")
    for i, (slot, twin) in enumerate(zip(LIVE, twins, strict=True)):
        place = _describe(slot, twin, width)
        exact, eager = twin.step(rows[i], layer, dtypes, width, width)
        case.compare("output", place, out[i].transpose(0, 1), eager.transpose(0, 1), exact.transpose(0, 1))
    ops.prefix_materialize(
        pool.state, torch.tensor(LIVE, device=device), torch.tensor(targets, device=device), pool.k_ring, pool.u_ring,
        pool.g_ring, torch.tensor([twin.start for twin in twins], device=device),
        torch.tensor([twin.window.length for twin in twins], device=device), None, None, backend,
    )  # fmt: skip
    for target, slot, twin in zip(targets, LIVE, twins, strict=True):
        eager_state = twin.eager_state().to(dtypes.state)
        case.compare("state", _describe(slot, twin, None), pool.state[target], eager_state, twin.truth)
    _untouched(case, pool, before, (NULL_SLOT, BYSTANDER))


def _exact_prefix(twin: Slot, count: int) -> Tensor:
    return fold(twin.checkpoint.double(), Window(*(x.double() for x in twin.window)), count)


def materialize(case: Case, backend: str, device: torch.device) -> None:
    """Prefix states at several counts of one window and the middle of the others, then a flush in place."""
    ops = torch.ops.replaystate
    _, pool, _ = _set_up(case, device, num_slots=7 + len(PREFIXES) + len(LIVE))
    wanted = [(3, count) for count in PREFIXES]
    wanted += [(slot, pool.slots[slot].window.length // 2 + 1) for slot in LIVE if pool.slots[slot].window.length]
    targets = range(7, 7 + len(wanted))
    before = pool.bits()
    buffers = [pool.state], [pool.u_ring], [pool.k_ring], [pool.g_ring]
    words = pool.ring_start, pool.num_committed, pool.step_records, pool.status
    ops.materialize(
        *buffers, torch.tensor([slot for slot, _ in wanted], device=device), torch.tensor(targets, device=device),
        torch.tensor([count for _, count in wanted], device=device), *words, WINDOW, NULL_SLOT, backend,
    )  # fmt: skip
    _untouched(case, pool, before, (NULL_SLOT, BYSTANDER, *LIVE))
    for target, (slot, count) in zip(targets, wanted, strict=True):
        twin = pool.slots[slot]
        place = f"{count} rows of {_describe(slot, twin, None)}"
        eager = twin.eager_state(count).to(case.dtypes.state)
        case.compare("state", place, pool.state[target], eager, _exact_prefix(twin, count))
    case.require(not bool(pool.status.any()), "status bits are set")
    before = pool.bits()
    ops.flush(*buffers, torch.tensor([5, 3, 1, 2, 4], device=device), *words, WINDOW, NULL_SLOT, backend)
    _untouched(case, pool, before, (NULL_SLOT, BYSTANDER, *targets))
    for slot, twin in pool.slots.items():
        place = f"flush of {_describe(slot, twin, None)}"
        eager = twin.eager_state().to(case.dtypes.state)
        case.compare("state", place, pool.state[slot], eager, _exact_prefix(twin, twin.window.length))


def read_state(case: Case, backend: str, device: torch.device) -> None:
    """Current states in float32: no rounding of storage on the way."""
    _, pool, _ = _set_up(case, device)
    before = pool.bits()
    states = torch.ops.replaystate.read_state(
        pool.state, *pool.rings, torch.tensor(LIVE, device=device), pool.ring_start, pool.num_committed, WINDOW,
        NULL_SLOT, backend,
    )  # fmt: skip
    for state, (slot, twin) in zip(states, sorted(pool.slots.items()), strict=True):
        case.compare("state", _describe(slot, twin, None), state, twin.eager_state(), twin.truth)
    _untouched(case, pool, before, tuple(range(7)))


def gated_delta_rule(case: Case, backend: str, device: torch.device) -> None:
    """Prompts of several lengths, empty ones too, from states and from nothing."""
    generator = torch.Generator().manual_seed(case.shape.num_v_heads)
    layer = make_layer(case.shape, generator)
    H, HV, K, V = case.shape.sizes
    lengths = [5, 0, 33, 1]
    bounds = [sum(lengths[:i]) for i in range(len(lengths) + 1)]
    rows = [make_tokens(case.shape, n, case.dtypes.io, generator, extreme=n == 5) for n in lengths]
    packed = Tokens(*(torch.cat(x) for x in zip(*rows, strict=True)))
    initial = torch.randn(len(lengths), HV, V, K, generator=generator) * 0.3
    exact_weights = layer.A_log.double(), layer.dt_bias.double()
    for start in (initial, None):
        out, final = torch.ops.replaystate.gated_delta_rule(
            *packed.to(device), layer.A_log.to(device), layer.dt_bias.to(device),
            None if start is None else start.to(device), torch.tensor(bounds, device=device), *case.shape.sizes,
            K**-0.5, backend,
        )  # fmt: skip
        zeros = torch.zeros_like(initial) if start is None else start
        exact, states = recurrent(
            *packed.to(torch.float64), *exact_weights, case.shape, torch.tensor(bounds), initial_state=zeros.double()
        )
        for i, row in enumerate(rows):
            tokens = slice(bounds[i], bounds[i + 1])
            y, S, _ = eager_recurrence(row, layer, zeros[i])
            place = f"prompt of {lengths[i]} tokens from {'nothing' if start is None else 'a state'}"
            eager = y.to(case.dtypes.io).transpose(0, 1)
            case.compare("output", place, out[tokens].transpose(0, 1), eager, exact[tokens].transpose(0, 1))
            case.compare("state", place, final[i], S, states[i])

"""The behaviours that public bug reports show others get wrong: contract section 8, one named test or more for each.

How this tests: through the public API (`ReplayCache` with `replay_step`, the kernel-level callables, the adapter), on
pools that hold NaN wherever a call must not read. `Driver` steps and commits a cache and compares every output,
state and cursor with a float64 recurrence over the plain list of accepted tokens. Where the contract says "the same
bits" or "untouched", bits are compared. Each test runs on every backend that this machine has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
from torch import Tensor

from replaystate import (
    GDNShape,
    ReplayCache,
    SlotStatus,
    gated_delta_rule,
    gated_delta_rule_mtp_ucache_flush,
    gdn_prefix_materialize,
    replay_step,
)
from replaystate.errors import ArgumentError, FormatError, ProtocolError, SlotStatusError
from replaystate.reference import recurrent
from replaystate.replayssm import pack_replayssm_rows
from tests.property.driver import Driver
from tests.property.rig import USABLE_BACKENDS, Rig, Snapshot, bits, live_rows, preferring, relative_error, same_bits
from tests.property.token_model import Tokens, cat, make_layers, make_tokens

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
NAN, INF = float("nan"), float("inf")
SHAPE = GDNShape(1, 2, 16, 8)


@pytest.fixture(params=USABLE_BACKENDS)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with preferring(request.param):
        yield request.param


@pytest.fixture
def set_threads() -> Iterator[Callable[[int], None]]:
    """torch.set_num_threads; torch's deterministic mode is off, because equal bits must not depend on it."""
    threads, deterministic = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(False)
    yield torch.set_num_threads
    torch.set_num_threads(threads)
    torch.use_deterministic_algorithms(deterministic)


def driver(backend: str, **kwargs: object) -> Driver:
    """Two layers, strided pools full of NaN."""
    seed = kwargs.pop("seed", 0)
    sizes = {"shape": SHAPE, "num_layers": 2, "strided": True} | kwargs
    return Driver(Rig(**sizes), backend, seed)  # type: ignore[arg-type]


def all_bits(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [bits(y).clone() for y in outputs]


# --- 1 to 4: the protocol ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("widths", [(4, 1, 4), (8, 1, 2), (16, 1, 16), (4, 4, 4)])
def test_01_accepted_tokens_survive_a_step_without_drafts(backend: str, widths: tuple[int, int, int]) -> None:
    """Draft step, then a step with no draft, then a draft step: accepted tokens survive."""
    d = driver(backend, max_query_len=16)
    d.begin(3, start=29)
    for _ in range(4):  # 4 rounds: the window fills, folds and wraps
        d.rig.poison({3: (d.model.slots[3].start, d.model.slots[3].window)})
        for width, accepted in zip(widths, (min(3, widths[0]), 1, min(2, widths[2])), strict=True):
            d.run([(3, width if width > 1 else 1)], width, [accepted])
    assert len(d.model.slots[3].tokens) == 4 * (min(3, widths[0]) + 1 + min(2, widths[2]))


def test_01_also_when_the_engine_owns_the_cursors(backend: str) -> None:
    """Draft step, then a step with no draft, then a draft step: accepted tokens survive."""
    d = driver(backend, num_layers=1)
    d.begin(2, start=27)
    for width, accepted in [(4, 3), (1, 1), (4, 4), (8, 5), (1, 1), (8, 8), (8, 0), (4, 2)]:
        tokens = d.tokens(width)
        y = d.adapter(0, [(2, width)], tokens, width)
        truth, states = d.model.step_rows([2], 0, [tokens])[0]
        d.check_output(y, truth)
        # What an engine does between steps: the cursor rule of contract section 4.
        start, count = int(d.cache.ring_start[2]), int(d.cache.num_committed[2])
        folded = count >= 17 - width
        d.cache.ring_start[2] = (start + count) % 32 if folded else start
        d.cache.num_committed[2] = accepted if folded else count + accepted
        d.model.commit(2, width, [tokens[None, t] for t in range(accepted)], [states])
        d.check(2)


def test_01_also_when_the_kernel_restarts_the_cursors(backend: str) -> None:
    """Accepted tokens survive: the kernel alone (restart_hist_on_flush=True), whose caller adds what it accepts."""
    d = driver(backend, num_layers=1)
    d.begin(2, start=25)
    hist, base = torch.tensor([0]).int(), torch.tensor([25]).int()
    for width, accepted in [(8, 7), (4, 4), (1, 1), (8, 8), (8, 3), (8, 0), (4, 4), (8, 6), (4, 1), (8, 8), (8, 8)]:
        tokens = d.tokens(width)
        y = d.kernel(0, [2], tokens, width, hist_len=hist, cache_base=base, restart_hist_on_flush=True)
        truth, states = d.model.step_rows([2], 0, [tokens])[0]
        d.check_output(y[0], truth)
        hist += accepted
        d.model.commit(2, width, [tokens[None, t] for t in range(accepted)], [states])
        s = d.model.slots[2]
        assert (int(base), int(hist)) == (s.start, s.window)
        d.cache.ring_start[2], d.cache.num_committed[2] = s.start, s.window
        d.check(2)


@pytest.mark.parametrize("window", [3, 12, 13, 16])
def test_02_accepting_nothing_changes_nothing_but_a_fold(backend: str, window: int) -> None:
    """accepted = 0 for a row: nothing but a fold changes."""
    d = driver(backend, max_query_len=4)
    d.fill(1, window, start=20)
    d.fill(2, 5, start=31)
    d.cache.fork([1, 2], [5, 6])
    d.model.fork([1, 2], [5, 6])
    folds = window >= 13
    start = 20
    before = Snapshot(d.rig)
    d.step([(1, 4), (2, 0)])
    d.commit([2, 1], [0, 0])
    for index in range(len(d.rig.pools)):
        if index % 4:
            before.allow(index, 1, slice(None), live_rows(start + window, 4, 32))  # rejected rows lie past the window
        elif folds:
            before.allow(index, 1)
    if folds:
        before.allow_words(1, "ring_start", "num_committed")
        assert int(d.cache.ring_start[1]) == (start + window) % 32
        assert int(d.cache.num_committed[1]) == 0
    before.check("accepted = 0")
    # The next step says the same as in twins that never saw the rejected tokens.
    tokens = [d.tokens(4) for _ in range(2)]
    twins = [d.call(layer, [(5, 2), (6, 2)], tokens[layer], 4) for layer in range(2)]
    again = [d.call(layer, [(1, 2), (2, 2)], tokens[layer], 4) for layer in range(2)]
    for y, twin in zip(again, twins, strict=True):
        assert same_bits(y[2:], twin[2:])
        assert same_bits(y, twin) if not folds else relative_error(y, twin) < 1e-5


def test_03_commit_names_slots_in_its_own_order(backend: str) -> None:
    """Counts are keyed by slot: rows may be permuted between verify and commit, finished rows dropped."""
    d = driver(backend)
    slots = [6, 2, 5, 1, 7]
    for slot in slots:
        d.begin(slot, start=3 * slot)
    for _ in range(4):
        d.step([(6, 8), (-1, 2), (2, 3), (5, 0), (0, 1), (1, 5), (7, 8)])
        d.commit([1, 0, 6, 7, -4, 5, 2], [4, 9, 8, 1, 9, 0, 2])
    before = Snapshot(d.rig)
    d.step([(slot, 2) for slot in slots])
    for slot in slots:
        for index in range(len(d.rig.pools)):
            before.allow(index, slot)
    d.commit([7, 2], [2, 1])  # 6, 5 and 1 finished: dropped by the engine
    for slot in (2, 7):
        before.allow_words(slot, "ring_start", "num_committed")
    for slot in (6, 5, 1):
        before.allow_words(slot, "records")
    before.check("commit of two of five rows")
    for slot in (6, 5, 1):  # and their slots start again
        d.begin(slot)
    d.run([(6, 1), (7, 2), (5, 3), (1, 1)])


def test_04_more_than_was_executed_is_refused(backend: str) -> None:
    """Commit wider than executed, or accepted > executed: refused with a typed error."""
    d = driver(backend, max_query_len=4)
    d.begin(1, 2)
    d.step([(1, 2), (2, 1)], 2)
    before = Snapshot(d.rig)
    for slots, accepted in [([2, 1], [1, 3]), ([2], [2]), ([1], [-1]), ([1, 2], [0, 3]), ([1], 4)]:
        with pytest.raises(ProtocolError, match=rf"slot {slots[-1]}"):
            d.cache.commit(slots, accepted)
        before.check("refused commit")
    d.commit([2, 1], [1, 2])
    with pytest.raises(ProtocolError, match="no step to commit"):
        d.cache.commit([1], [1])
    before = Snapshot(d.rig)
    for rows, width in [([(2, 1), (1, 3)], 2), ([(1, 4)], 5), ([(1, 0)], 0), ([(1, 5)], None)]:
        tokens = d.tokens(sum(length for _, length in rows))
        with pytest.raises(ArgumentError, match="executed_width"):
            d.call(0, rows, tokens, width)
        with pytest.raises(ArgumentError, match="executed_width"):
            d.adapter(0, rows, tokens, 4 if width is None else width if width < 5 else 17)
    bounds = torch.tensor([0, 1, 4])
    with pytest.raises(ArgumentError, match="row 1 has 3 tokens, more than executed_width=2"):
        pack_replayssm_rows(torch.zeros(4), bounds, 2)
    before.check("refused steps")


# --- 5 and 6: what is read -----------------------------------------------------------------------------------------


def test_05_slots_that_are_not_named_are_neither_read_nor_written(backend: str) -> None:
    """state_indices=[3,-1,7,0]: no slot that is not named is read or written (canaries, NaN)."""
    d = driver(backend)
    d.fill(3, 15, start=22)  # folds
    d.fill(7, 4, start=30)
    windows = {slot: (d.model.slots[slot].start, d.model.slots[slot].window) for slot in (3, 7)}
    d.rig.poison(windows)
    rows = [(3, 2), (-1, 3), (7, 4), (0, 1)]
    before = Snapshot(d.rig)
    outputs = []
    for layer in range(2):
        parts = [d.tokens(length) for _, length in rows]
        for i in (1, 3):
            for x in (parts[i].mixed_qkv, parts[i].a, parts[i].b):
                x.fill_(NAN)
        outputs.append(d.call(layer, rows, cat(parts), None))
        truths = d.model.step_rows([3, 7], layer, [parts[0], parts[2]])
        d.check_output(outputs[layer][:2], truths[0][0])
        d.check_output(outputs[layer][5:9], truths[1][0])
        assert not outputs[layer][2:5].any()
        assert not outputs[layer][9:].any()
    d.cache.commit([3, -1, 7, 0], [1, 3, 4, 1])
    for index in range(8):
        for slot, length in ((3, 2), (7, 4)):
            start, count = windows[slot]
            if index % 4:
                before.allow(index, slot, slice(None), live_rows(start + count, length, 32))
        if index % 4 == 0:
            before.allow(index, 3)
    for slot in (3, 7):
        before.allow_words(slot, "ring_start", "num_committed")
    before.check("step and commit of [3, -1, 7, 0]")
    for call in (
        lambda: d.cache.state(0, [3, -1, 7, 0]),
        lambda: d.cache.crop([3, -1, 7, 0], 0),
        lambda: d.cache.check([3, -1, 7, 0]),
        lambda: d.cache.materialize([-1, 0, 3], [3, 7, -1], [0, 0, 0]),
        lambda: d.cache.materialize([3], [0], [99]),
        lambda: d.cache.fork([3, 0, -1], [0, 3, 7]),
        lambda: d.cache.load_state(0, [0, -1], torch.full((2, 2, 8, 16), NAN)),
        lambda: d.cache.flush([0, -1]),
        lambda: d.cache.reset([0, -1]),
        lambda: d.cache.invalidate([0, -1]),
    ):
        before = Snapshot(d.rig)
        call()
        before.check("a call on padding, or one that changes nothing")


def test_05_kernel_and_adapter_leave_padding_alone(backend: str) -> None:
    """state_indices=[3,-1,7,0]: no slot that is not named is read or written (canaries, NaN)."""
    d = driver(backend, num_layers=1)
    d.fill(3, 15, start=22)
    d.fill(7, 4, start=30)
    windows = {slot: (d.model.slots[slot].start, d.model.slots[slot].window) for slot in (3, 7)}
    for call in ("kernel", "adapter"):
        d.rig.poison(windows)
        before = Snapshot(d.rig)
        lengths = [4, 4, 4, 4] if call == "kernel" else [2, 3, 4, 1]
        parts = [d.tokens(n) for n in lengths]
        for i in (1, 3):
            for x in (parts[i].mixed_qkv, parts[i].a, parts[i].b):
                x.fill_(NAN)
        x = cat(parts)
        if call == "kernel":
            output = torch.full((4, 4, 2, 8), NAN)
            hist, base = torch.tensor([15, 1 << 20, 4, -7]).int(), torch.tensor([22, -99, 30, 1 << 30]).int()
            args = {"output": output, "hist_len": hist, "cache_base": base}
            y = d.kernel(0, [3, -1, 7, -2], x, 4, **args)
            assert y is output
            assert y[[1, 3]].isnan().all(), "rows of padding are left as they are"
            found = [y[0], y[2]]
        else:
            y = d.adapter(0, [(3, 2), (-1, 3), (7, 4), (0, 1)], x, 4)
            assert not y[2:5].any()
            assert not y[9:].any()
            found = [y[:2], y[5:9]]
        for out, (truth, _) in zip(found, d.model.step_rows([3, 7], 0, [parts[0], parts[2]]), strict=True):
            d.check_output(out, truth)
        before.allow(0, 3)
        for index in (1, 2, 3):
            before.allow(index, 3, slice(None), live_rows(22 + 15, 4, 32))
            before.allow(index, 7, slice(None), live_rows(30 + 4, 4, 32))
        before.check(call)
        d.begin(3)
        d.fill(3, 15, start=22)


def test_05_materializer_leaves_other_slots_alone(backend: str) -> None:
    """No slot that is not named is read or written: rows of a negative slot, or not in the active list, are skipped."""
    d = driver(backend, num_layers=1)
    d.fill(3, 9, start=28)
    d.rig.poison({3: (28, 9)})
    u, k, g = d.cache.rings(0)
    before = Snapshot(d.rig)

    def call(**kwargs: Tensor) -> None:
        given = {
            "state": d.cache.checkpoint(0),
            "src_slots": torch.tensor([-1, 3, 6, 3]).int(),
            "dst_slots": torch.tensor([5, 4, -1, 2]).int(),
            "k_cache": k,
            "u_cache": u,
            "g_cache": g,
            "cache_base": torch.tensor([-99, 28, 1 << 20, 28]).int(),
            "count": torch.tensor([3, 8, 2, -1]).int(),
        }
        gdn_prefix_materialize(**given | kwargs, backend=backend)

    call(active_request_indices=torch.tensor([0, 2, 1]).int(), num_active=torch.tensor([2]).int())
    call(count=torch.tensor([0, 17, 0, -3]).int())
    before.check("only skipped rows")
    call(active_request_indices=torch.tensor([1, -1, -1, -1]).int(), num_active=torch.tensor([4]).int())
    before.allow(0, 4)
    before.check("one active row")
    truth = d.model.slots[3].prefix[0][8]
    assert relative_error(d.cache.checkpoint(0)[4], truth) < d.tolerance


@pytest.mark.parametrize("state_dtype", [F32, F16, BF16])
def test_06_a_recycled_slot_starts_from_zero(backend: str, state_dtype: torch.dtype) -> None:
    """A recycled slot full of NaN with a one-token first chunk starts from zero."""
    d = driver(backend, state_dtype=state_dtype, strided=False)
    fresh = Driver(Rig(SHAPE, 2, state_dtype=state_dtype, fill=0.0), backend)
    first = d.cache.allocate()
    d.fill(first, 16, start=9)
    d.step([(first, 8)])  # and a step that was never committed
    for x in d.rig.pools:
        x[first] = NAN
    d.cache.free(first)
    assert d.cache.allocate() == first
    d.model.new(first)
    fresh.begin(fresh.cache.allocate())
    for count in (1, 3, 8, 8, 1):
        tokens = [d.tokens(count) for _ in range(2)]
        for layer in range(2):
            y = d.call(layer, [(first, count)], tokens[layer], None)
            assert same_bits(y, fresh.call(layer, [(first, count)], tokens[layer], None))
            assert y.isfinite().all()
        for one in (d, fresh):
            one.cache.commit([first], [count])
        for layer in range(2):
            assert same_bits(d.cache.state(layer, first), fresh.cache.state(layer, first))


def test_06_also_with_a_prefill_as_first_chunk(backend: str) -> None:
    """A recycled slot full of NaN with a one-token first chunk starts from zero."""
    d = driver(backend)
    d.cache.reset([4])
    d.model.new(4)
    for layer, weights in enumerate(d.layers):
        x = d.tokens(1)
        y, state = gated_delta_rule(
            x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias, SHAPE, torch.tensor([0, 1]),
            initial_state=d.cache.state(layer, 4), backend=backend,
        )  # fmt: skip
        d.cache.load_state(layer, 4, state)
        truth, states = d.model.step_rows([4], layer, [x])[0]
        d.check_output(y, truth)
        d.model.load_state(4, layer, states[0])
    d.check(4)
    d.run([(4, 1)])
    d.run([(4, 8)])


# --- 7: copies -----------------------------------------------------------------------------------------------------

CURSORS = [(0, 0), (0, 16), (31, 1), (20, 16), (29, 7), (17, 15), (16, 16), (5, 9)]


@pytest.mark.parametrize(("state_dtype", "ring_dtype"), [(F32, F32), (F16, F16), (BF16, F16)])
@pytest.mark.parametrize(("start", "count"), CURSORS)
def test_07_copies_carry_window_and_cursors(
    backend: str, start: int, count: int, state_dtype: torch.dtype, ring_dtype: torch.dtype
) -> None:
    """Copying, forking, exporting a slot carries its pending window and cursors, wrap included."""
    d = driver(backend, state_dtype=state_dtype, ring_dtype=ring_dtype)
    wide = driver(
        backend, state_dtype=state_dtype, ring_dtype=ring_dtype, max_query_len=16, null_slot=None, strided=False
    )
    wider = driver(backend, state_dtype=state_dtype, ring_dtype=ring_dtype, num_slots=2)
    d.fill(1, count, start)
    d.rig.poison({1: (start, count)})
    d.cache.invalidate([4])  # a dead destination is overwritten too
    d.cache.fork([1, 1], [4, 6])
    exported = d.cache.export(1)
    d.cache.load(7, exported)
    wide.cache.load(0, exported)
    wider.cache.load(1, {name: x.clone() for name, x in exported.items()})
    twins = [(d, 4), (d, 6), (d, 7), (wide, 0), (wider, 1)]
    for one, slot in twins:
        assert (int(one.cache.ring_start[slot]), int(one.cache.num_committed[slot])) == (start, count)
    for lengths in ((8, 5), (8, 8), (1, 1), (8, 0), (3, 3)):
        tokens = [d.tokens(lengths[0]) for _ in range(2)]
        expected = [d.call(layer, [(1, lengths[0])], tokens[layer], 8) for layer in range(2)]
        d.cache.commit([1], [lengths[1]])
        for one, slot in twins:
            one.layers = d.layers
            for layer in range(2):
                assert same_bits(one.call(layer, [(slot, lengths[0])], tokens[layer], 8), expected[layer])
            one.cache.commit([slot], [lengths[1]])
            for layer in range(2):
                assert same_bits(one.cache.state(layer, slot), d.cache.state(layer, 1))
            assert int(one.cache.ring_start[slot]) == int(d.cache.ring_start[1])
            assert int(one.cache.num_committed[slot]) == int(d.cache.num_committed[1])


def test_07_a_reorder_of_beams_reads_before_it_writes(backend: str) -> None:
    """Copying, forking, exporting a slot carries its pending window and cursors, wrap included."""
    d = driver(backend, null_slot=None)
    d.fill(0, 4, start=31)
    d.fill(1, 11, start=25)
    d.fill(2, 16, start=0)
    d.cache.fork([1, 1, 0], [0, 1, 2])
    d.model.fork([1, 1, 0], [0, 1, 2])
    d.check()
    d.run([(2, 8), (0, 3), (1, 3)])
    d.cache.fork(torch.tensor([2, 0, 1]), torch.tensor([0, 1, 2], dtype=torch.int32))
    d.model.fork([2, 0, 1], [0, 1, 2])
    d.check()
    d.run([(0, 8), (1, 8), (2, 8)], accepted=[8, 3, 0])


@pytest.mark.parametrize(("start", "count"), CURSORS)
def test_07_a_prefix_inside_the_window(backend: str, start: int, count: int) -> None:
    """Contract section 7: the state after any number of window tokens, of any wrap, in another slot or in place."""
    d = driver(backend)
    d.fill(1, count, start)
    d.rig.poison({1: (start, count)})
    for prefix in range(count + 1):
        d.cache.materialize([1], [5], [prefix])
        d.model.materialize(1, 5, prefix)
        d.check(1, 5)
    d.run([(5, 3), (1, 8)])
    d.cache.materialize(5, 5, 3)
    d.model.materialize(5, 5, 3)
    d.check(5)
    d.run([(5, 3)])


@pytest.mark.parametrize("dtype", [F32, F16, BF16])
def test_07_a_prefix_of_nothing_is_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    """Contract section 7: count = 0 is an exact copy. NaN payloads, infinities, signs of zero and subnormals count."""
    d = driver(backend, state_dtype=dtype)
    d.fill(1, 5, start=30)
    odd = {F32: [0x7FC12345, -1, 0x7F800000, -(1 << 31), 1], F16: [0x7E11, -1, 0x7C00, -(1 << 15), 1]}
    odd[BF16] = [0x7FD1, -1, 0x7F80, -(1 << 15), 1]
    for layer in range(2):
        bits(d.cache.checkpoint(layer))[1, 0, 0, :5] = torch.tensor(odd[dtype]).to(
            bits(d.cache.checkpoint(layer)).dtype
        )
    d.cache.materialize([1], [4], [0])
    u, k, g = d.cache.rings(1)
    rows = [torch.tensor([n]).int() for n in (1, 5, 30, 0)]  # src, dst, base, count
    gdn_prefix_materialize(d.cache.checkpoint(1), *rows[:2], k, u, g, *rows[2:], backend=backend)
    d.cache.crop(1, 5)
    d.cache.fork(1, 6)
    d.cache.flush(1)  # nothing in the window: the checkpoint stays as it is
    for layer, slot in ((0, 4), (1, 4), (1, 5), (1, 6)):
        state = d.cache.checkpoint(layer)
        assert bits(state)[1, 0, 0, :5].tolist() == odd[dtype]
        assert same_bits(state[slot], state[1])


def test_07_an_export_holds_no_other_requests_rows(backend: str) -> None:
    """Only live rows travel: what lies past the window may be another request's text."""
    d = driver(backend)
    d.fill(1, 3, start=30)
    secret = 12345.0
    d.rig.poison({1: (30, 3)}, value=secret)
    for name, x in d.cache.export(1).items():
        assert not (x.double() == secret).any(), name


def test_07_a_damaged_export_is_refused(backend: str) -> None:
    """`load` refuses what does not fit with a FormatError, whatever is wrong, and changes nothing."""
    d = driver(backend)
    d.fill(1, 3, start=30)
    exported = d.cache.export(1)
    before = Snapshot(d.rig)
    odd: list[object] = [None, 3, torch.tensor(2.5), torch.zeros(0), torch.zeros(2, 2, 2, 2, 2, 2), torch.tensor(-1)]
    for name in exported:
        for wrong in odd:
            with pytest.raises(FormatError):
                d.cache.load(2, exported | {name: wrong})  # type: ignore[dict-item]
            before.check(name)
    for wrong in (None, [], {}, exported | {"more": torch.zeros(1)}):
        with pytest.raises(FormatError):
            d.cache.load(2, wrong)  # type: ignore[arg-type]
    for other in (
        {"window": 8},
        {"state_dtype": F16},
        {"ring_dtype": F16},
        {"num_layers": 1},
        {"shape": GDNShape(2, 2, 16, 8)},
    ):
        with pytest.raises(FormatError):
            driver(backend, **other).cache.load(2, exported)
    before.check("nothing was loaded")


# --- 8 to 12: sizes and layouts ------------------------------------------------------------------------------------


def test_08_empty_rows_and_empty_batches(backend: str) -> None:
    """query_start_loc=[0,3,3,7], all rows empty, B = 0, N = 0: defined, no hang, no launch."""
    d = driver(backend)
    d.fill(1, 2, start=31)
    d.fill(2, 9, start=8)  # folds at width 8
    d.fill(3, 10)
    d.run([(1, 3), (2, 0), (3, 4)])  # [0, 3, 3, 7]
    d.run([(1, 0), (2, 0), (3, 0)])
    d.fill(2, 9, start=8)
    before = Snapshot(d.rig)
    outputs = d.step([(2, 0)])  # N = 0, and it folds
    assert all(y.shape == (0, 2, 8) for y in outputs)
    d.commit([2], [0])
    for index in (0, 4):
        before.allow(index, 2)
    before.allow_words(2, "ring_start", "num_committed")
    before.check("an empty row that folds")
    assert int(d.cache.num_committed[2]) == 0

    before = Snapshot(d.rig)
    for spare in (0, 5):  # B = 0, with and without tokens that belong to no row
        y = d.call(0, [], d.tokens(spare), None)
        assert y.shape == (spare, 2, 8)
        assert not y.any()
    d.cache.commit([], [])
    d.cache.commit([], 3)
    d.cache.commit(torch.zeros(0, dtype=torch.int32), torch.zeros(0, dtype=torch.int32))
    for call in (d.cache.flush, d.cache.reset, d.cache.invalidate, d.cache.check):
        call([])
    d.cache.crop([], 0)
    d.cache.fork([], [])
    d.cache.materialize([], [], [])
    d.cache.load_state(0, [], torch.zeros(0, 2, 8, 16))
    assert d.cache.state(0, []).shape == (0, 2, 8, 16)
    before.check("calls on nothing")


def test_08_prefill_of_nothing(backend: str) -> None:
    """query_start_loc=[0,3,3,7], all rows empty, B = 0, N = 0: defined, no hang, no launch."""
    d = driver(backend)
    weights = d.layers[0]
    initial = torch.randn(3, 2, 8, 16, generator=d.rng)
    for lengths in ([3, 0, 4], [0, 0, 0], [0, 2, 0]):
        x = d.tokens(sum(lengths))
        bounds = torch.tensor([0, *lengths]).cumsum(0)
        args = (x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias)
        for state in (None, initial):
            y, final = gated_delta_rule(*args, SHAPE, bounds, initial_state=state, backend=backend)
            start = None if state is None else state.double()
            truth, truth_state = recurrent(*(z.double() for z in args), SHAPE, bounds, initial_state=start)
            assert y.shape == truth.shape
            assert torch.allclose(y.double(), truth, atol=1e-5)
            assert torch.allclose(final.double(), truth_state, atol=1e-5)
            for i, length in enumerate(lengths):
                if not length:
                    assert torch.equal(final[i], torch.zeros(2, 8, 16) if state is None else state[i])
    x = d.tokens(2)
    y, final = gated_delta_rule(
        x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias, SHAPE, torch.tensor([0]), backend=backend
    )
    assert final.shape == (0, 2, 8, 16)
    assert not y.any()


def test_08_adapter_and_kernel_on_nothing(backend: str) -> None:
    """query_start_loc=[0,3,3,7], all rows empty, B = 0, N = 0: defined, no hang, no launch."""
    d = driver(backend, num_layers=1)
    d.fill(1, 2, start=31)
    d.fill(2, 9, start=8)
    calls = []

    def kernel(**kwargs: Tensor) -> Tensor:
        calls.append(kwargs["q"].shape)
        return gated_delta_rule_mtp_ucache_flush(**kwargs)

    before = Snapshot(d.rig)
    for rows in ([], [(1, 0)], [(0, 0), (-1, 0), (1, 0)]):
        y = d.adapter(0, rows, d.tokens(0), 8, kernel=kernel)
        assert y.shape == (0, 2, 8)
    assert not calls, "nothing to do: no launch"
    before.check("no tokens, nothing to fold")
    state = d.cache.state(0, 2)
    d.adapter(0, [(1, 0), (2, 0)], d.tokens(0), 8, kernel=kernel)  # row 2 is due for a fold
    assert len(calls) == 1
    before.allow(0, 2)
    for index in (1, 2, 3):
        before.allow(index, 1, slice(None), live_rows(33, 8, 32))  # padding lanes past the windows: scratch
        before.allow(index, 2, slice(None), live_rows(17, 8, 32))
    before.check("one fold")
    assert relative_error(d.cache.checkpoint(0)[2], state[0]) < d.tolerance

    tokens = d.tokens(7)
    y = d.adapter(0, [(1, 3), (-1, 0), (0, 4)], tokens, 4)
    d.check_output(y[:3], d.model.step_rows([1], 0, [tokens[:3]])[0][0])
    assert not y[3:].any()
    for rows, width in ((0, 4), (2, 0)):
        nothing = d.tokens(0)
        y = d.kernel(0, [1, 2][:rows], nothing, width)
        assert y.shape == (rows, width, 2, 8)
    none = torch.zeros(0, dtype=torch.int32)
    u, k, g = d.cache.rings(0)
    before = Snapshot(d.rig)
    gdn_prefix_materialize(d.cache.checkpoint(0), none, none, k, u, g, none, none, backend=backend)
    before.check("no rows")


def test_08_a_kernel_call_without_tokens_keeps_the_windows(backend: str) -> None:
    """T = 0 with restart_hist_on_flush folds nothing, so it must not move the cursors either."""
    d = driver(backend, num_layers=1)
    d.fill(1, 9, start=30)
    hist, base = torch.tensor([9]).int(), torch.tensor([30]).int()
    nothing = d.tokens(0)
    before = Snapshot(d.rig)
    args = {"hist_len": hist, "cache_base": base, "flush_min": 5, "restart_hist_on_flush": True}
    d.kernel(0, [1], nothing, 0, **args)
    if torch.equal(d.cache.checkpoint(0)[1], before.pool(0)[1].view(F32)):
        assert (int(hist), int(base)) == (9, 30), "the window was dropped without being folded"
    else:
        assert relative_error(d.cache.checkpoint(0)[1], d.model.state(1, 0)) < d.tolerance
        assert (int(hist), int(base)) == (0, 7)


SIZES = [
    GDNShape(2, 2, 96, 64),
    GDNShape(2, 4, 64, 96),
    GDNShape(2, 6, 192, 32),
    GDNShape(1, 4, 32, 192),
    GDNShape(1, 8, 96, 192),
    GDNShape(4, 4, 1, 9),
    GDNShape(3, 9, 17, 31),
    GDNShape(2, 10, 7, 1),
    GDNShape(1, 1, 255, 3),
]


@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_09_any_head_ratio_and_any_dims(backend: str, shape: GDNShape) -> None:
    """Any head ratio (1, 2, 3, 4, 8), K != V, dims that are not powers of two (96, 192)."""
    d = driver(backend, shape=shape, num_layers=1, num_slots=4)
    d.begin(1, 2, start=28)
    for accepted in ((5, 2), (8, 0), (7, 8), (1, 3)):
        d.run([(2, 8), (1, 8)], accepted=accepted)
    x = d.tokens(8)
    y = d.kernel(0, [2, 1], x, 4, flush_min=3)
    for out, (truth, _) in zip(y, d.model.step_rows([2, 1], 0, [x[:4], x[4:]]), strict=True):
        d.check_output(out, truth)
    # Value head hv reads key head hv // (HV / H): when a head of q or k flips its sign, its value heads' outputs flip.
    H, HV, K, V = shape.sizes
    for part in range(2):
        head = (H - 1) * (1 - part)
        other = Tokens(x.mixed_qkv.clone(), x.a, x.b)
        other.mixed_qkv[:, (part * H + head) * K : (part * H + head + 1) * K] *= -1
        results = []
        for tokens in (x, other):
            d.begin(3)
            results.append(d.call(0, [(3, 8)], tokens, None))
        flipped = torch.tensor([hv // (HV // H) == head for hv in range(HV)])[:, None]
        assert torch.equal(results[1], torch.where(flipped, -results[0], results[0]))


def test_10_offsets_past_two_to_the_31(backend: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Offsets past 2**31 elements: slot 2 of every pool, and the last rows of inputs and output, lie beyond."""
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)  # or 21 GB are touched
    far = (1 << 31) + 64
    try:
        halves = [torch.empty(far + 4096, dtype=F16) for _ in range(3)]
        floats = torch.empty(far + 4096, dtype=F32)
    except RuntimeError as error:
        pytest.skip(f"about 21 GB of address space (a few pages of memory) are not to be had: {error}")
    shape, slots = GDNShape(1, 2, 8, 4), 3
    stride = far // 2
    small = Driver(Rig(shape, 1, slots, state_dtype=F16, fill=NAN), backend)

    def pool(whole: Tensor, begin: int, like: Tensor) -> Tensor:
        x = whole.as_strided(like.shape, (stride, *like.stride()[1:]), begin)
        x.fill_(NAN)
        return x

    state, u, k, g = small.rig.pools
    pools = [pool(halves[0], begin, x) for begin, x in ((1, state), (301, u), (901, k))]
    assert (slots - 1) * stride + 901 > 1 << 31
    words = torch.zeros(2, slots, dtype=torch.int32)
    rings = (pools[1], pools[2], pool(floats, 0, g))
    big = ReplayCache.from_tensors(
        shape, [pools[0]], [rings], words[0], words[1], window=16, max_query_len=8, null_slot=0
    )
    small.begin(1, 2, start=30)
    big.reset([1, 2])
    big.ring_start.fill_(30)
    for lengths in ((4, 2), (8, 8), (8, 3), (2, 8), (8, 8)):
        x, n = small.tokens(sum(lengths)), sum(lengths)
        qkv = halves[1].as_strided((n, shape.qkv_dim), (far // (n - 1), 1), 0)
        qkv.copy_(x.mixed_qkv)
        x = Tokens(qkv.contiguous(), x.a, x.b)
        out = halves[2].as_strided((n, 2, 4), (far // (n - 1), 4, 1), 8)
        rows = list(zip((2, 1), lengths, strict=True))
        expected = small.call(0, rows, x, None)
        bounds, weights = torch.tensor([0, lengths[0], n]).int(), small.layers[0]
        y = replay_step(qkv, x.a, x.b, weights.A_log, weights.dt_bias, big, 0, [2, 1], bounds, out=out, backend=backend)
        assert same_bits(y.contiguous(), expected)
        for cache in (big, small.cache):
            cache.commit([1, 2], [lengths[1] // 2, lengths[0]])
        assert same_bits(big.state(0, [1, 2]), small.cache.state(0, [1, 2]))
    for cache in (big, small.cache):
        cache.fork(2, 1)
        cache.crop(1, 2)
        cache.materialize(1, 2, 1)
        cache.load(1, cache.export(1))
        cache.flush(1)
    for found, expected in zip((*pools[:1], *rings), small.rig.pools, strict=True):
        assert same_bits(found[1:].contiguous(), expected[1:].contiguous())


def strided_like(x: Tensor, kind: str) -> Tensor:
    """The same values in another layout: element-aligned, nothing more."""
    if kind == "odd offset":
        whole = (
            torch.full((x.numel() + 7,), NAN, dtype=x.dtype)
            if x.is_floating_point()
            else x.new_full((x.numel() + 7,), -999)
        )
        view = whole[3 : 3 + x.numel()].view(x.shape)
    elif kind == "every other":
        whole = x.new_full((*x.shape[:-1], 2 * x.shape[-1] + 1), -999)
        view = whole[..., 1::2]
    elif kind == "rows":
        if x.dim() == 1:
            return strided_like(x, "every other")
        whole = x.new_full((x.shape[0], x[0].numel() + 5), -999)
        view = whole[:, 3:-2].unflatten(1, x.shape[1:])
    else:  # "transposed": the first dim is the innermost one
        view = torch.empty(*x.shape[1:], x.shape[0], dtype=x.dtype).movedim(-1, 0)
    view.copy_(x)
    return view


@pytest.mark.parametrize("io_dtype", [F32, BF16])
@pytest.mark.parametrize("kind", ["odd offset", "every other", "rows", "transposed"])
def test_11_any_view_of_an_argument(backend: str, kind: str, io_dtype: torch.dtype) -> None:
    """Any element-aligned view of an argument, odd storage offsets."""
    shape = GDNShape(1, 2, 17, 9)
    plain = Driver(Rig(shape, 1, state_dtype=F16, fill=0.0), backend)
    views = Driver(Rig(shape, 1, state_dtype=F16, fill=0.0, strided=True), backend)
    weights = plain.layers[0]
    for one in (plain, views):
        one.begin(1, 2, start=28)
    for count in range(4):
        x = make_tokens(shape, 11, plain.rng, io_dtype, F16)
        args = [x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias]
        slots, bounds = torch.tensor([2, 0, 1], dtype=torch.int32), torch.tensor([0, 8, 9, 11], dtype=torch.int32)
        expected = replay_step(*args, plain.cache, 0, slots, bounds, backend=backend)
        out = torch.empty(11, 2, 9, dtype=io_dtype)
        if kind != "transposed" and kind != "every other":  # out is dense within a token
            out = strided_like(out, kind)
        moved = [strided_like(z, kind) for z in args]
        y = replay_step(
            *moved, views.cache, 0, strided_like(slots, kind), strided_like(bounds, kind), out=out, backend=backend
        )
        assert y is out
        assert same_bits(y.contiguous(), expected)
        for z, original in zip(moved, args, strict=True):
            assert same_bits(z.contiguous(), original)
        accepted = torch.tensor([7 - count, 2])
        plain.cache.commit([2, 1], accepted)
        views.cache.commit(strided_like(torch.tensor([2, 1]), kind), strided_like(accepted, kind))
        assert same_bits(views.cache.state(0, [1, 2]), plain.cache.state(0, strided_like(torch.tensor([1, 2]), kind)))
    for one in (plain, views):
        one.cache.flush([2])
    state = torch.randn(1, 2, 9, 17)
    plain.cache.load_state(0, [2], state)
    views.cache.load_state(0, [2], strided_like(state, kind))
    for found, expected in zip(views.rig.pools, plain.rig.pools, strict=True):
        assert same_bits(found[1:3].contiguous(), expected[1:3].contiguous())


@pytest.mark.parametrize("kind", ["odd offset", "every other", "rows", "transposed"])
def test_11_also_for_prefill_kernel_and_adapter(backend: str, kind: str) -> None:
    """Any element-aligned view of an argument, odd storage offsets."""
    shape = GDNShape(1, 2, 17, 9)
    H, HV, K, V = shape.sizes
    rng = torch.Generator().manual_seed(0)
    weights, x = make_layers(shape, 1, rng)[0], make_tokens(shape, 12, rng, BF16, F16)
    initial, bounds = torch.randn(2, HV, V, K, generator=rng), torch.tensor([0, 5, 12])
    args = [x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias]
    expected = gated_delta_rule(*args, shape, bounds, initial_state=initial, backend=backend)
    moved = [strided_like(z, kind) for z in (*args, bounds, initial)]
    found = gated_delta_rule(*moved[:5], shape, moved[5], initial_state=moved[6], backend=backend)
    assert all(same_bits(y, z) for y, z in zip(found, expected, strict=True))

    results = []
    for view in (False, True):
        d = Driver(Rig(shape, 1, state_dtype=BF16, strided=view, fill=0.0), backend)
        d.begin(1, 2, 3)
        d.cache.num_committed[2] = 14

        def maybe(z: Tensor, view: bool = view) -> Tensor:
            return strided_like(z, kind) if view else z

        d.layers = [type(weights)(maybe(weights.A_log), maybe(weights.dt_bias))]
        parts = x.mixed_qkv.view(3, 4, -1).split([H * K, H * K, HV * V], -1)
        q, k, v = (maybe(z.unflatten(-1, (heads, -1)).clone()) for z, heads in zip(parts, (H, H, HV), strict=True))
        cursors = {
            "hist_len": maybe(torch.tensor([0, 14, 3]).int()),
            "cache_base": maybe(torch.tensor([9, 31, 0]).int()),
        }
        slots = maybe(torch.tensor([1, 2, -1]).int())
        given = {"q": q, "k": k, "v": v, "a": maybe(x.a.view(3, 4, HV)), "b": maybe(x.b.view(3, 4, HV))}
        outs = [d.kernel(0, [1, 2, -1], x, 4, **given, **cursors, initial_state_indices=slots)]
        tokens = Tokens(maybe(x.mixed_qkv), maybe(x.a), maybe(x.b))
        rows = [(3, 4), (0, 3), (1, 4), (2, 1)]
        lanes = maybe(torch.tensor([0, 1, 2, 3, 8, 9, 10, 11, 12]))
        bounds = maybe(torch.tensor([0, 4, 7, 11, 12]).int())
        outs.append(d.adapter(0, rows, tokens, 4, output_indices=lanes, query_start_loc=bounds))
        outs.append(d.adapter(0, [(3, 4), (0, 4), (1, 4)], tokens, 4, uniform_query_length=4))
        outs += [z[:4].contiguous() for z in d.rig.pools]
        results.append(outs)
    for y, z in zip(*results, strict=True):
        assert same_bits(y, z)


def test_12_dtypes_are_arguments(backend: str) -> None:
    """Dtypes are arguments: two pools of different dtype in one process, calls in any order."""
    dtypes = [
        (F32, F32, F32),
        (F16, F16, BF16),
        (BF16, BF16, F32),
        (F16, BF16, F16),
        (F32, F16, BF16),
        (BF16, F16, BF16),
    ]
    alone, mixed = [], []
    for interleaved in (False, True):
        drivers = []
        for i, (state, ring, io) in enumerate(dtypes):
            rig = Rig(SHAPE, 1, state_dtype=state, ring_dtype=ring)
            drivers.append(Driver(rig, backend, seed=i, io_dtype=io))
        results: list[list[Tensor]] = [[] for _ in dtypes]

        def rounds(i: int, count: int, drivers: list[Driver] = drivers, results: list[list[Tensor]] = results) -> None:
            d = drivers[i]
            for _ in range(count):
                if 1 not in d.model.slots:
                    d.begin(1, 2, start=27)
                results[i] += d.run([(2, 8), (1, 5)], accepted=[7, 5])
                results[i].append(d.cache.state(0, [1, 2]))

        for i in range(len(dtypes)) if not interleaved else []:
            rounds(i, 3)
        for turn in range(3) if interleaved else []:
            for i in range(len(dtypes)):
                rounds((5 * i + turn) % len(dtypes), 1)
        (mixed if interleaved else alone).extend(y for result in results for y in result)
    assert len(alone) == len(mixed)
    assert all(same_bits(y, z) for y, z in zip(alone, mixed, strict=True))


# --- 13 and 14: bits -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("null_slot", [0, 5, None])
def test_13_a_warm_up_changes_no_byte(backend: str, null_slot: int | None) -> None:
    """Warm-up and graph capture change no byte of any pool (the warm-up half): steps whose rows are all padding."""
    d = driver(backend, null_slot=null_slot)
    for slot, (count, start) in {1: (16, 30), 2: (3, 0)}.items():
        d.fill(slot, count, start)
    d.cache.invalidate([3])
    d.step([(2, 3)])  # a step that waits for its commit: its record must stay too
    before = Snapshot(d.rig)
    null = -7 if null_slot is None else null_slot
    for width in (1, 4, 8):
        for rows in ([(-1, width)] * 4, [(null, width), (-3, 0), (null, 1)], [(null, 0)]):
            for fill in (0.0, NAN):
                tokens = d.tokens(sum(length for _, length in rows))
                for x in (tokens.mixed_qkv, tokens.a, tokens.b):
                    x.fill_(fill)
                for layer in range(2):
                    assert not d.call(layer, rows, tokens, width).any()
                d.cache.commit([slot for slot, _ in rows], [width] * len(rows))
                if null_slot == 0:
                    assert not d.adapter(0, rows, tokens, width).any()
    null_row = [null, -1]
    d.cache.materialize(null_row, [1, 2], [3, 3])
    d.cache.materialize([1, 1], null_row, [99, 99])
    d.cache.fork(null_row, [1, 2])
    for call in (d.cache.flush, d.cache.reset, d.cache.invalidate):
        call(null_row)
    d.cache.crop(null_row, [5, 5])
    assert not d.cache.state(1, null_row).any()
    before.check("warm-up")


BATCHES = [
    (GDNShape(1, 2, 128, 128), F16, F16, F32, 4),
    (GDNShape(2, 4, 64, 64), F32, F32, F32, 8),
    (GDNShape(1, 1, 96, 192), BF16, F16, BF16, 1),
    (GDNShape(1, 3, 5, 7), F32, F16, F16, 3),
    (GDNShape(2, 2, 33, 1), F16, F16, F32, 16),
    (GDNShape(1, 1, 1, 65), F32, F32, F32, 5),
    (GDNShape(1, 1, 256, 128), F32, F32, F32, 2),
]


@pytest.mark.parametrize(("shape", "state_dtype", "ring_dtype", "io_dtype", "width"), BATCHES)
def test_14_a_row_has_the_same_bits_in_any_company(
    backend: str,
    set_threads: Callable[[int], None],
    shape: GDNShape,
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    io_dtype: torch.dtype,
    width: int,
) -> None:
    """One row alone, in a batch of 64, permuted or beside padding: the same bits. With any number of threads."""
    rng = torch.Generator().manual_seed(1)
    slots, T = 65, max(width, 8)
    sizes = {"state_dtype": state_dtype, "ring_dtype": ring_dtype, "max_query_len": T, "fill": 0.0}
    start = Rig(shape, 1, slots, **sizes)  # type: ignore[arg-type]
    weights = make_layers(shape, 1, rng)[0]
    for x in start.pools:  # any content will do: a step only multiplies and adds it
        x.copy_(torch.randn(x.shape, generator=rng))
    start.pools[3].abs_().neg_()
    start.cache.ring_start.copy_(torch.randint(0, 32, (slots,), generator=rng))
    start.cache.num_committed.copy_(torch.randint(0, 17, (slots,), generator=rng))
    start.cache.num_committed[1:4] = torch.tensor([16, 0, 16])
    lengths = [0, width, width, *torch.randint(0, width + 1, (61,), generator=rng).tolist()]
    parts = [make_tokens(shape, n, rng, io_dtype) for n in lengths]

    def run(rows: list[int]) -> dict[int, list[Tensor]]:
        """rows: indices of 64 (slot i + 1), -1 for a row of NaN padding. By row: output, rings, checkpoint, state."""
        rig = Rig(shape, 1, slots, **sizes)  # type: ignore[arg-type]
        for x, y in zip((*rig.pools, *rig.words), (*start.pools, *start.words), strict=True):
            x.copy_(y)
        padding = make_tokens(shape, width, rng, io_dtype)
        padding.mixed_qkv.fill_(NAN)
        tokens = cat([parts[i] if i >= 0 else padding for i in rows])
        sizes_ = [lengths[i] if i >= 0 else width for i in rows]
        bounds = torch.tensor([0, *sizes_]).cumsum(0).int()
        y = replay_step(
            tokens.mixed_qkv, tokens.a, tokens.b, weights.A_log, weights.dt_bias, rig.cache, 0,
            [i + 1 if i >= 0 else -1 for i in rows], bounds, executed_width=width, backend=backend,
        )  # fmt: skip
        pieces = y.split(sizes_)
        rig.cache.commit([i + 1 for i in rows if i >= 0], [lengths[i] for i in rows if i >= 0])
        states = rig.cache.state(0, [i + 1 for i in rows if i >= 0])
        real = [i for i in rows if i >= 0]
        return {i: [pieces[rows.index(i)], *(x[i + 1] for x in rig.pools), states[real.index(i)]] for i in real}

    set_threads(1)
    everyone = run(list(range(64)))
    shuffled = torch.randperm(64, generator=rng).tolist()
    small = [[5, -1, 1, -1, -1, 0, 2, 40], [1, -1], [2, 63, 3], [0], [1], [2], [40]]
    for threads, batches in ((1, [shuffled, *small]), (2, [shuffled, *small[3:6]]), (3, [shuffled, *small[:2]])):
        set_threads(threads)
        for rows in batches:
            for i, found in run(rows).items():
                for part, (x, y) in enumerate(zip(found, everyone[i], strict=True)):
                    what = f"row {i} of {len(rows)}, {threads} threads, part {part}"
                    assert same_bits(x.contiguous(), y.contiguous()), what


@pytest.mark.parametrize(("shape", "io_dtype"), [(GDNShape(1, 2, 64, 64), F32), (GDNShape(2, 6, 96, 7), BF16)])
def test_14_also_for_prefill_and_kernel(
    backend: str, set_threads: Callable[[int], None], shape: GDNShape, io_dtype: torch.dtype
) -> None:
    """One row alone, in a batch of 64, permuted or beside padding: the same bits."""
    rng = torch.Generator().manual_seed(2)
    weights = make_layers(shape, 1, rng)[0]
    lengths = [1, 9, 0, 4, *torch.randint(0, 12, (60,), generator=rng).tolist()]
    parts = [make_tokens(shape, n, rng, io_dtype) for n in lengths]
    initial = torch.randn(64, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, generator=rng)

    def prefill(rows: list[int]) -> dict[int, tuple[Tensor, Tensor]]:
        x, bounds = cat([parts[i] for i in rows]), torch.tensor([0, *(lengths[i] for i in rows)]).cumsum(0)
        y, final = gated_delta_rule(
            x.mixed_qkv,
            x.a,
            x.b,
            weights.A_log,
            weights.dt_bias,
            shape,
            bounds,
            initial_state=initial[rows],
            backend=backend,
        )
        return {
            i: (piece, state) for i, piece, state in zip(rows, y.split([lengths[i] for i in rows]), final, strict=True)
        }

    start = Driver(Rig(shape, 1, 64, state_dtype=F16, null_slot=None, fill=0.0), backend)
    for x in start.rig.pools:
        x.copy_(torch.randn(x.shape, generator=rng))
    start.rig.pools[3].abs_().neg_()
    hist, base = torch.randint(0, 17, (64,), generator=rng).int(), torch.randint(0, 32, (64,), generator=rng).int()
    hist[:2] = torch.tensor([16, 0])
    lanes = [make_tokens(shape, 4, rng, io_dtype) for _ in range(64)]

    def kernel(rows: list[int]) -> dict[int, tuple[Tensor, ...]]:
        rig = Rig(shape, 1, 64, state_dtype=F16, null_slot=None, fill=0.0)
        for x, y in zip(rig.pools, start.rig.pools, strict=True):
            x.copy_(y)
        d = Driver(rig, backend)
        d.layers = [weights]
        x = cat([lanes[max(i, 0)] for i in rows])
        cursors = {"hist_len": hist[rows], "cache_base": base[rows]}
        y = d.kernel(0, rows, x, 4, **cursors)
        return {i: (y[j], *(z[i] for z in rig.pools)) for j, i in enumerate(rows) if i >= 0}

    set_threads(1)
    orders = [torch.randperm(64, generator=rng).tolist(), [1, 0], [1], [0], [63]]
    for run in (prefill, kernel):
        set_threads(1)
        everyone = run(list(range(64)))
        for threads in (1, 2, 3):
            set_threads(threads)
            for rows in [*orders, [-1, 1, -1, 0, -4]] if run is kernel else orders:
                for i, found in run(rows).items():
                    for x, y in zip(found, everyone[i], strict=True):
                        assert same_bits(x.contiguous(), y.contiguous()), f"{run.__name__}: row {i} of {rows}"


# --- 15, 16 and 19: values -----------------------------------------------------------------------------------------


def exact_decay(A_log: float, x: float) -> float:
    """g = -exp(A_log) softplus(x) as it should be, at any size: by logarithms, in Python's floats."""
    if x == -INF:
        return -0.0
    log_softplus = (
        math.log(math.log1p(math.exp(x))) if -700 < x < 700 and math.exp(x) > 0 else (x if x < 0 else math.log(x))
    )
    if x < -30:
        log_softplus = x
    return -math.exp(min(A_log + log_softplus, 700.0))


@pytest.mark.parametrize("gate_dtype", [F32, BF16])
@pytest.mark.parametrize("A_log", [-100.0, -3.0, 0.0, 3.0, 100.0])
def test_15_gate_extremes(backend: str, A_log: float, gate_dtype: torch.dtype) -> None:
    """Gate extremes: a = ±100, A_log = ±100, a = -inf: no NaN, the right decay."""
    gates = [100.0, -100.0, -INF, 0.0, 20.0, -20.0, 88.0, -14.0, -16.0, -1e4, 1e4, 15.0, -0.5]
    shape = GDNShape(1, 1, 8, 4)
    for bias in (0.0, 1.0, -100.0):
        d = driver(backend, shape=shape, num_layers=1, max_query_len=16)
        d.layers[0].A_log, d.layers[0].dt_bias = torch.tensor([A_log]), torch.tensor([bias])
        d.begin(1, start=25)
        tokens = d.tokens(len(gates))
        tokens.a = torch.tensor(gates, dtype=gate_dtype)[:, None]
        y = d.call(0, [(1, len(gates))], tokens, 16)
        truth, states = d.model.step_rows([1], 0, [tokens])[0]
        assert y.isfinite().all()
        d.check_output(y, truth)
        g = d.cache.rings(0)[2][1, 0, live_rows(25, len(gates), 32)]
        for found, a in zip(g.tolist(), tokens.a[:, 0].tolist(), strict=True):
            expected = exact_decay(A_log, a + bias)
            expected = -INF if expected < -3.4e38 else expected
            assert found == expected or math.isclose(found, expected, rel_tol=2e-6, abs_tol=1e-44), (a, found, expected)
        d.cache.commit([1], [len(gates)])
        d.model.commit(1, 16, [tokens[None, t] for t in range(len(gates))], [states])
        d.check(1)
        d.run([(1, 3)], width=16)  # folds a window with all of them
        prefill, final = gated_delta_rule(
            tokens.mixed_qkv, tokens.a, tokens.b, d.layers[0].A_log, d.layers[0].dt_bias, shape,
            torch.tensor([0, len(gates)]), backend=backend,
        )  # fmt: skip
        d.check_output(prefill, truth)
        assert final.isfinite().all()


@pytest.mark.parametrize("A_log", [-3.0, 100.0])
@pytest.mark.parametrize("state_dtype", [F32, F16])
def test_15_padding_leaves_the_state_exactly(backend: str, A_log: float, state_dtype: torch.dtype) -> None:
    """A token whose a is -inf and whose q, k, v, b are zero leaves the state exactly unchanged."""
    d = driver(backend, num_layers=1, state_dtype=state_dtype)
    d.fill(1, 6, start=30)
    d.layers[0].A_log.fill_(A_log)
    state = d.cache.state(0, 1)
    zeros = Tokens(torch.zeros(8, SHAPE.qkv_dim), torch.full((8, 2), -INF), torch.zeros(8, 2))
    y = d.call(0, [(1, 8)], zeros, 8)
    assert not y.any()
    d.cache.commit([1], [8])
    assert torch.equal(d.cache.state(0, 1), state)
    d.cache.materialize([1], [2], [14])
    d.cache.flush(1)
    assert torch.equal(d.cache.checkpoint(0)[1], state[0].to(state_dtype))
    assert torch.equal(d.cache.checkpoint(0)[2], state[0].to(state_dtype))


@pytest.mark.parametrize("hard", [-50.0, -1e4, -1e6, -INF])
def test_15_one_hard_decay_costs_no_precision(backend: str, hard: float) -> None:
    """Contract section 3: suffix sums. Differences of cumulative sums lose 1.5e-3 at g = -1e4, and all at -inf."""
    d = driver(backend, num_layers=1, shape=GDNShape(1, 2, 64, 64))
    d.layers[0].A_log.fill_(math.log(-hard) if hard > -INF else 100.0)
    d.layers[0].dt_bias.zero_()
    d.begin(1, start=28)
    for width, hard_at in ((8, 2), (8, 5), (4, 0)):
        tokens = d.tokens(width)
        slow = -INF if hard == -INF else math.log(math.expm1(0.01 / -hard))  # g = -0.01, or no decay at all
        tokens.a = torch.full((width, 2), slow)
        tokens.a[hard_at] = 100.0 if hard == -INF else math.log(math.expm1(1.0))  # g = -inf, or `hard`
        y = d.call(0, [(1, width)], tokens, width)
        truth, states = d.model.step_rows([1], 0, [tokens])[0]
        assert relative_error(y, truth) < 1e-6  # seen 2.5e-7
        d.cache.commit([1], [width])
        d.model.commit(1, width, [tokens[None, t] for t in range(width)], [states])
        assert relative_error(d.cache.state(0, 1)[0], d.model.state(1, 0)) < 1e-6  # seen 2.2e-7
        count = int(d.cache.num_committed[1])
        for prefix in range(count + 1):
            d.cache.materialize(1, 2, prefix)
            expected = d.model.slots[1].prefix[0][prefix]
            assert expected.norm() == 0 or relative_error(d.cache.checkpoint(0)[2], expected) < 1e-6
    d.cache.flush(1)
    assert relative_error(d.cache.checkpoint(0)[1], d.model.state(1, 0)) < 1e-6


BAD_INPUTS = [
    (part, value) for part in ("q", "k", "v", "a", "b") for value in (NAN, INF, -INF) if (part, value) != ("a", -INF)
]


def spoil(tokens: Tokens, part: str, value: float, at: int, shape: GDNShape, head: int = 0) -> None:
    """Put a bad value into one head of one token."""
    H, HV, K, V = shape.sizes
    if part in ("a", "b"):
        getattr(tokens, part)[at, head] = value
    else:
        begin = {"q": 0, "k": H * K, "v": 2 * H * K}[part] + head * {"q": K, "k": K, "v": V}[part]
        tokens.mixed_qkv[at, begin + 1] = value


@pytest.mark.parametrize(("part", "value"), BAD_INPUTS)
def test_16_a_bad_value_stays_in_its_request_and_after_its_token(backend: str, part: str, value: float) -> None:
    """A NaN in one request's input stays in that request, and a draft's in outputs from its own on."""
    d = driver(backend, num_layers=1, shape=GDNShape(2, 4, 16, 8))
    rows = [(1, 4), (2, 8), (3, 6)]
    for slot, count in ((1, 16), (2, 13), (3, 3)):
        d.fill(slot, count, start=24 + slot)
        d.cache.fork(slot, slot + 3)
        d.model.fork([slot], [slot + 3])
    tokens = d.tokens(18)
    clean = d.call(0, [(slot + 3, n) for slot, n in rows], tokens, 8)
    spoil(tokens, part, value, 4 + 5, d.shape)  # token 5 of slot 2's row
    y = d.call(0, rows, tokens, 8)
    assert same_bits(y[:9], clean[:9]), "rows before, and tokens before"
    assert same_bits(y[12:], clean[12:]), "rows after"
    group = slice(0, 2) if part in "qk" else slice(0, 1)
    others = [hv for hv in range(4) if hv not in range(4)[group]]
    assert same_bits(y[:, others].contiguous(), clean[:, others].contiguous()), "other heads"
    if value != value:
        assert y[9, group].isnan().any()
    d.cache.commit([3, 2, 1], [6, 5, 4])  # the bad token is rejected
    d.cache.commit([4, 5, 6], [4, 5, 6])
    for layer_slots in ([1, 2, 3], [4, 5, 6]):
        assert d.cache.state(0, layer_slots).isfinite().all()
    assert same_bits(d.cache.state(0, [1, 2, 3]), d.cache.state(0, [4, 5, 6]))
    assert not d.cache.status.any()
    tokens = d.tokens(12)
    first = d.call(0, [(1, 4), (2, 4), (3, 4)], tokens, 8)
    assert same_bits(first, d.call(0, [(4, 4), (5, 4), (6, 4)], tokens, 8))


def test_16_an_accepted_nan_stays_in_its_slot_until_reset(backend: str) -> None:
    """A NaN in one request's input stays in that request, also when it was committed and folded."""
    d = driver(backend, num_layers=1)
    d.begin(1, 2, start=29)
    d.run([(1, 3), (2, 3)])
    tokens = d.tokens(6)
    tokens.mixed_qkv[1] = NAN
    d.call(0, [(1, 3), (2, 3)], tokens, 8)
    truth, states = d.model.step_rows([2], 0, [tokens[3:]])[0]
    d.cache.commit([1, 2], [3, 3])
    d.model.commit(2, 8, [tokens[None, t] for t in range(3, 6)], [states])
    del d.model.slots[1]
    for _ in range(4):
        y = d.step([(1, 5), (2, 5)])[0]
        assert y[:5].isnan().any()
        d.commit([1, 2], [5, 5])
    assert d.cache.checkpoint(0)[1].isnan().any(), "NaN stays NaN in a fold"
    assert not d.cache.status.any()
    d.begin(1)
    d.run([(1, 5), (2, 5)])


@pytest.mark.parametrize("part", ["q", "k", "v", "a", "b"])
def test_16_prefill_and_kernel_keep_a_nan_in_its_row(backend: str, part: str) -> None:
    """A NaN in one request's input stays in that request, and after its token."""
    d = driver(backend, num_layers=1)
    weights, x, bounds = d.layers[0], d.tokens(12), torch.tensor([0, 4, 8, 12])

    def prefill() -> tuple[Tensor, Tensor]:
        args = (x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias)
        return gated_delta_rule(*args, SHAPE, bounds, backend=backend)

    def kernel() -> tuple[Tensor, Tensor]:
        d.begin(1, 2, 3)
        y = d.kernel(0, [1, 2, 3], x, 4)
        return y.flatten(0, 1), d.cache.rings(0)[0][[1, 2, 3], :, :4]

    clean = [prefill(), kernel()]
    spoil(x, part, NAN, 6, SHAPE)
    for (y, state), (y_clean, state_clean) in zip([prefill(), kernel()], clean, strict=True):
        assert y[6].isnan().any()
        for at in (slice(0, 6), slice(8, 12)):
            assert same_bits(y[at], y_clean[at])
        for i in (0, 2):
            assert same_bits(state[i], state_clean[i])


def test_17_earlier_outputs_are_never_overwritten(backend: str) -> None:
    """A caller's earlier output tensor is never overwritten by a later call; nor are inputs."""
    d = driver(backend, num_layers=1)
    d.begin(1, 2, start=30)
    kept: list[tuple[Tensor, Tensor]] = []

    def keep(*xs: Tensor) -> None:
        kept.extend((x, x.clone()) for x in xs)

    none = torch.zeros(2, dtype=torch.int32)
    for _ in range(4):
        x = d.tokens(10)
        keep(x.mixed_qkv, x.a, x.b, d.layers[0].A_log, d.layers[0].dt_bias)
        keep(d.call(0, [(1, 5), (2, 5)], x, None))
        d.cache.commit([1, 2], [5, 3])
        keep(d.cache.state(0, [1, 2]), *d.cache.export(1).values())
        keep(
            d.adapter(0, [(1, 5), (2, 5)], x, 8),
            d.adapter(0, [(1, 5), (2, 5)], x, 5, uniform_query_length=5),
        )
        keep(d.kernel(0, [1, 2], x, 5))
        weights = d.layers[0]
        keep(*gated_delta_rule(x.mixed_qkv, x.a, x.b, weights.A_log, weights.dt_bias, SHAPE, none.new_tensor([0, 10])))
    for x, copy in kept:
        assert same_bits(x, copy) if x.is_floating_point() else torch.equal(x, copy)
    floats = [x for x, _ in kept if x.numel()]
    pools = [x.untyped_storage().data_ptr() for x in d.rig.pools]
    assert not any(x.untyped_storage().data_ptr() in pools for x in floats), "no result aliases a pool"


def test_18_sizes_that_cannot_work_are_refused_at_construction(backend: str) -> None:
    """T > W, T > R - W, window not a power of two: a construction-time error naming the numbers."""
    for window, width, message in [(16, 17, "16.*17"), (12, 4, "12"), (4, 8, "4.*8"), (0, 1, "0"), (16, 0, "0")]:
        with pytest.raises(ArgumentError, match=message):
            ReplayCache(SHAPE, 1, 2, window=window, max_query_len=width)
    H, HV, K, V = SHAPE.sizes

    def wrap(R: int, window: int, width: int) -> ReplayCache:
        rings = (torch.zeros(2, HV, R, V), torch.zeros(2, H, R, K), torch.zeros(2, HV, R))
        words = torch.zeros(2, 2, dtype=torch.int32)
        return ReplayCache.from_tensors(
            SHAPE, [torch.zeros(2, HV, V, K)], [rings], *words, window=window, max_query_len=width, null_slot=0
        )

    for R, window, width, message in [
        (16, 16, 1, r"16 \+ 1.*16"),
        (32, 32, 1, r"32 \+ 1.*32"),
        (16, 8, 9, "8.*9"),
        (24, 16, 8, "24"),
        (32, 12, 4, "12"),
    ]:
        with pytest.raises(ArgumentError, match=message):
            wrap(R, window, width)
    assert wrap(32, 16, 16).ring_slots == 32
    assert wrap(64, 16, 8).ring_slots == 64


@pytest.mark.parametrize(("dtype", "big"), [(F16, 1e5), (BF16, 3.402e38)])
def test_19_overflow_of_the_u_ring_is_saturated_and_flagged(backend: str, dtype: torch.dtype, big: float) -> None:
    """fp16 overflow of state or u ring (|x| > 65504) is saturated and flagged, not silently inf; NaN stays NaN."""
    d = driver(backend, num_layers=1, state_dtype=F32, ring_dtype=dtype)
    d.begin(1, 2, 3, start=31)
    limit = torch.finfo(dtype).max
    tokens = d.tokens(9)
    H, HV, K, V = SHAPE.sizes
    v = tokens.mixed_qkv[:, 2 * H * K :]
    tokens.b.fill_(50.0)  # beta = 1
    v[1, 3], v[1, 4], v[4, 0], v[7, 0] = big, -big, NAN, limit
    y = d.call(0, [(1, 3), (2, 3), (3, 3)], tokens, 8)
    assert not y[[0, 1, 2, 6, 7, 8]].isnan().any()
    u = d.cache.rings(0)[0]
    assert u[1, 0, 0, 3] == limit  # row 1 of the window lies at (31 + 1) mod 32
    assert u[1, 0, 0, 4] == -limit
    assert u[2, 0, 0, 0].isnan()
    assert u[2, 0, 0, 1:].isfinite().all()
    assert d.cache.status.tolist() == [0, SlotStatus.RING_SATURATED, 0, 0, 0, 0, 0, 0]
    d.cache.commit([1, 2, 3], [3, 3, 3])
    assert d.cache.state(0, 1).isfinite().all()
    with pytest.raises(SlotStatusError, match=r"slot 1: RING_SATURATED"):
        d.cache.check()
    d.cache.check([2, 3])
    d.cache.fork(1, 5)
    d.cache.load(6, d.cache.export(1))
    assert d.cache.status[[5, 6]].tolist() == [SlotStatus.RING_SATURATED] * 2
    d.cache.reset([1, 5, 6])
    d.cache.check()


@pytest.mark.parametrize(("dtype", "big"), [(F16, 1e6), (BF16, 3.402e38)])
def test_19_overflow_of_the_state_is_saturated_and_flagged(backend: str, dtype: torch.dtype, big: float) -> None:
    """fp16 overflow of state or u ring (|x| > 65504) is saturated and flagged, not silently inf; NaN stays NaN."""
    limit = torch.finfo(dtype).max
    for how in ("step", "flush", "materialize", "in place", "load_state"):
        d = driver(backend, num_layers=2, state_dtype=dtype, ring_dtype=F32)
        d.begin(1, 2, 3, start=31)
        for layer in range(2):
            tokens = Tokens(torch.zeros(9, SHAPE.qkv_dim), torch.full((9, 2), -INF), torch.full((9, 2), 50.0))
            tokens.mixed_qkv[:, 16] = tokens.mixed_qkv[:, 17] = 1.0  # k points between two dims
            if layer == 1:
                tokens.mixed_qkv[4, 32:] = NAN  # slot 2
                tokens.mixed_qkv[1, 32 + 5], tokens.mixed_qkv[1, 32 + 6] = big * 2**0.5 if big < 1e30 else big, -big
                tokens.mixed_qkv[1, 16] = 1e6  # k along the first dim: the state is about `big` there
            d.call(layer, [(1, 3), (2, 3), (3, 3)], tokens, 8)
        d.cache.commit([1, 2, 3], [2, 3, 3])
        assert not d.cache.status.any()
        target = 1
        if how == "step":
            d.cache.num_committed[2:4] = 2
            for _ in range(3):  # more tokens that change nothing, until it folds
                quiet = Tokens(torch.zeros(12, SHAPE.qkv_dim), torch.full((12, 2), -INF), torch.zeros(12, 2))
                for layer in range(2):
                    d.call(layer, [(1, 4), (2, 4), (3, 4)], quiet, 8)
                d.cache.commit([1, 2, 3], [4, 4, 4])
        elif how == "flush":
            d.cache.flush([1, 2, 3])
        elif how == "materialize":
            d.cache.materialize([1, 2, 3], [4, 5, 6], [2, 3, 3])
            target = 4
        elif how == "in place":
            d.cache.materialize([1, 2, 3], [1, 2, 3], [2, 3, 3])
        else:
            state = d.cache.state(1, [1, 2, 3]).double()
            d.cache.reset([1, 2, 3])
            d.cache.load_state(1, [1, 2, 3], state * 1.001)
        found = d.cache.checkpoint(1)[target]
        assert found[0, 5, 0] == limit, how
        assert found[0, 6, 0] == -limit, how
        assert found.isfinite().all(), how
        assert d.cache.checkpoint(1)[target + 1].isnan().any(), f"{how}: NaN stays NaN"
        assert d.cache.status.tolist() == [SlotStatus.STATE_SATURATED * (slot == target) for slot in range(8)], how
        with pytest.raises(SlotStatusError, match=f"slot {target}: STATE_SATURATED"):
            d.cache.check()


def test_19_kernel_and_materializer_saturate(backend: str) -> None:
    """fp16 overflow of state or u ring (|x| > 65504) is saturated, not silently inf; NaN stays NaN."""
    d = driver(backend, num_layers=1, state_dtype=F16, ring_dtype=F16)
    d.begin(1, 2, 3)
    tokens = d.tokens(12)
    tokens.b.fill_(50.0)
    tokens.a.fill_(-INF)
    tokens.mixed_qkv[:, 16:32] = torch.eye(16)[0]
    tokens.mixed_qkv[:, 32:] = 6e4
    tokens.mixed_qkv[2, 32], tokens.mixed_qkv[3, 33], tokens.mixed_qkv[6, 32] = 1e6, -1e6, NAN
    d.kernel(0, [1, 2, 3], tokens, 4)
    u = d.cache.rings(0)[0]
    assert u[1].isfinite()[:, :4].all()
    assert u[1, 0, 2, 0] == 65504
    assert u[1, 0, 3, 1] == -65504
    assert u[2, 0, 2, 0].isnan()
    hist, base = torch.tensor([4, 4, 4]).int(), torch.zeros(3, dtype=torch.int32)
    u[[1, 3], :, :4] = 6e4  # four tokens along one key: their sum is past fp16
    args = {"hist_len": hist, "cache_base": base, "flush_min": 4, "restart_hist_on_flush": True}
    state, k, g = d.cache.checkpoint(0), d.cache.rings(0)[1], d.cache.rings(0)[2]
    rows = torch.tensor([1, 2]).int()
    gdn_prefix_materialize(state, rows, rows + 4, k, u, g, base[:2], hist[:2], backend=backend)
    d.kernel(0, [1, 2, 3], tokens, 4, **args)
    for slot in (1, 3, 5):
        assert (state[slot, :, :, 0] == 65504).all()
        assert state[slot].isfinite().all()
    assert state[2].isnan().any()
    assert state[6].isnan().any()
    assert (hist.tolist(), base.tolist()) == ([0, 0, 0], [4, 4, 4])

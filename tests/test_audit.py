"""The audit (`debug=True`): silent through every correct history, loud at the first wrong bit.

In plain words: long random runs through every method must pass. Then one thing is corrupted at a time behind the
cache's back, and the next call that looks must raise, naming the slot and the layer.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from replaystate import ReplayCache, replay_step
from replaystate.errors import AuditError

from .helpers import SHAPE, bounds_of, layer_tensors, nan_cache, put_window, random_inputs, random_state, run_step

F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16


def audited(**options: Any) -> ReplayCache:
    return nan_cache(**{"num_layers": 2, "num_slots": 6, "state_dtype": F32, "debug": True, **options})


@pytest.mark.parametrize(("dtype", "seed"), [(F32, 1), (F16, 2), (BF16, 3)])
def test_a_long_random_run_passes(dtype: torch.dtype, seed: int) -> None:
    cache, rng = audited(state_dtype=dtype), torch.Generator().manual_seed(seed)

    def draw(low: int, high: int) -> int:
        return int(torch.randint(low, high + 1, (1,), generator=rng))

    def some_slots() -> list[int]:
        return (torch.randperm(5, generator=rng) + 1).tolist()[: draw(1, 3)]

    def step() -> None:
        width = draw(1, 8)
        slots = [*some_slots(), 0, -1]
        lengths = [draw(0, width) for _ in slots]
        run_step(cache, slots, lengths, width=width, accepted=[draw(0, n) for n in lengths], seed=draw(0, 10**6))

    def crop() -> None:
        slots = some_slots()
        cache.crop(slots, [draw(0, int(cache.num_committed[slot])) for slot in slots])

    def materialize() -> None:
        src, dst = (torch.randperm(5, generator=rng) + 1).tolist()[:2]
        cache.materialize([src], [dst], draw(0, int(cache.num_committed[src])))

    def fork() -> None:
        targets = some_slots()
        cache.fork([draw(1, 5) for _ in targets], targets)

    def move() -> None:
        cache.load(draw(1, 5), cache.export(draw(1, 5)))

    def load_state() -> None:
        slots = some_slots()
        cache.flush(slots)
        for layer in range(2):
            cache.load_state(layer, slots, random_state(rows=len(slots), seed=draw(0, 99)))

    actions: list[Callable[[], None]] = [
        step, step, step, crop, materialize, fork, move, load_state, lambda: cache.flush(some_slots()),
        lambda: cache.reset(some_slots()),
    ]  # fmt: skip
    cache.reset(range(1, 6))
    for _ in range(60):
        actions[draw(0, len(actions) - 1)]()
    cache.check()


# --- histories that the audit must follow though it has not seen their beginning -----------------------------------


def loaded(count: int = 6) -> ReplayCache:
    """Slot 1 arrived with a live window that the audit has not seen token by token."""
    source = nan_cache(num_layers=2, state_dtype=F32)
    put_window(source, 1, count, 29)
    cache = audited()
    cache.load(1, source.export(1))
    return cache


def test_crop_into_a_window_that_was_loaded() -> None:
    cache = loaded()
    run_step(cache, [1], [2], accepted=2)
    cache.crop([1], 5)
    run_step(cache, [1], [3], accepted=3)


def test_materialize_from_a_window_that_was_loaded() -> None:
    cache = loaded()
    cache.materialize([1], [2], 3)
    run_step(cache, [1, 2], [2, 2], accepted=1)
    cache.materialize([1], [3], 4)
    cache.materialize([1], [4], 7)


def test_crop_into_a_window_that_an_engine_owns() -> None:
    plain = nan_cache(state_dtype=F32)
    put_window(plain, 2, 9, 28)
    cache = ReplayCache.from_tensors(
        SHAPE, [plain.checkpoint(0)], [plain.rings(0)], plain.ring_start, plain.num_committed, window=16,
        max_query_len=8, null_slot=0, debug=True,
    )  # fmt: skip
    run_step(cache, [2], [4], width=4, accepted=1)
    cache.crop([2], 7)
    run_step(cache, [2], [4], width=4, accepted=4)


def test_a_swap_of_slots_that_never_stepped() -> None:
    cache = audited()
    for layer in range(2):
        cache.load_state(layer, [1, 2], random_state(rows=2, seed=layer))
    cache.fork([2, 1], [1, 2])
    run_step(cache, [1, 2], [2, 2], accepted=2)


def test_a_slot_with_a_flag_may_step() -> None:
    # A saturated checkpoint is flagged; the slot lives on, in debug mode too.
    cache = audited(state_dtype=F16)
    for layer in range(2):
        state = random_state()
        state[0, 0, 0, 0] = 1e6
        cache.load_state(layer, [1], state)
    assert int(cache.status[1])
    run_step(cache, [1], [3], accepted=2)


def test_a_state_that_decayed_to_almost_nothing() -> None:
    # Below float16's smallest normal number rounding is coarse; that is storage, not a protocol error.
    cache = audited(state_dtype=F16, num_layers=1)
    cache.load_state(0, [1], random_state())
    for turn in range(12):
        x = random_inputs(tokens=8, seed=turn)
        x.a.fill_(-0.2)
        x.b.fill_(-30.0)  # beta is 1e-13: the state only decays
        x.A_log.fill_(-1.0)
        x.dt_bias.zero_()
        replay_step(*x, cache, 0, [1], bounds_of([8]))
        cache.commit([1], 8)


def test_a_nan_input_is_not_the_audits_to_judge() -> None:
    cache = audited(num_layers=1)
    cache.reset([1])
    x = random_inputs(tokens=2)
    x.mixed_qkv[1] = float("nan")
    replay_step(*x, cache, 0, [1], bounds_of([2]))
    cache.commit([1], [2])


def test_without_debug_there_is_no_audit() -> None:
    assert ReplayCache(SHAPE, 1, 2).audit is None
    assert audited().audit is not None


def test_the_audit_changes_no_bit() -> None:
    plain, debug = nan_cache(num_layers=2), audited(state_dtype=F16)
    for cache in (plain, debug):
        cache.reset([1, 2])
        for turn in range(5):
            run_step(cache, [1, 2], [8, 3], accepted=[6, 2], seed=turn)
    for layer in range(2):
        for x, y in zip(layer_tensors(plain, layer), layer_tensors(debug, layer), strict=True):
            assert torch.equal(x.view(torch.int16), y.view(torch.int16))


# --- corruptions ---------------------------------------------------------------------------------------------------


def ring_row(cache: ReplayCache, ring: int, layer: int) -> None:
    cache.rings(layer)[ring][3, :, (int(cache.ring_start[3]) + 2) % 32] += 1.0


CORRUPTIONS: dict[str, tuple[Callable[[ReplayCache], Any], int]] = {
    # name: (what is done to slot 3, the first layer that shows it)
    "a u row": (lambda cache: ring_row(cache, 0, 1), 1),
    "a k row": (lambda cache: ring_row(cache, 1, 1), 1),
    "a g row": (lambda cache: ring_row(cache, 2, 0), 0),
    "a checkpoint": (lambda cache: cache.checkpoint(1)[3].add_(1.0), 1),
    "a checkpoint with NaN": (lambda cache: cache.checkpoint(0)[3, 0, 0].fill_(float("nan")), 0),
    "ring_start": (lambda cache: cache.ring_start[3].add_(1), 0),
    "num_committed, one less": (lambda cache: cache.num_committed[3].sub_(1), 0),
    "num_committed, one more": (lambda cache: cache.num_committed[3].add_(1), 0),
}

LOOKS: dict[str, Callable[[ReplayCache], Any]] = {
    "commit": lambda cache: run_step(cache, [2, 3], [1, 1], width=1, accepted=1),
    "flush": lambda cache: cache.flush([2, 3]),
    "fork": lambda cache: cache.fork([3], [3]),
}


@pytest.mark.parametrize("corruption", CORRUPTIONS)
@pytest.mark.parametrize("look", LOOKS)
def test_a_corruption_is_found_at_the_next_look(corruption: str, look: str) -> None:
    corrupt, layer = CORRUPTIONS[corruption]
    cache = audited()
    cache.reset([2, 3])
    run_step(cache, [2, 3], [8, 8], accepted=[3, 6])
    corrupt(cache)
    with pytest.raises(AuditError, match=rf"^audit: slot 3, layer {layer}: the replayed state is "):
        LOOKS[look](cache)


def test_a_commit_of_the_wrong_count_is_found() -> None:
    # What the audit is for: the engine's own cursor arithmetic went wrong behind the cache.
    cache = audited(num_layers=1)
    cache.reset([1])
    run_step(cache, [1], [4], width=4, accepted=2)
    cache.num_committed[1] = 3  # one rejected draft is now in the window
    with pytest.raises(AuditError, match="slot 1, layer 0"):
        run_step(cache, [1], [1], width=1, accepted=1)


def test_a_slot_that_was_reset_is_followed_anew() -> None:
    cache = audited()
    cache.reset([3])
    run_step(cache, [3], [5], accepted=5)
    cache.checkpoint(0)[3].add_(1.0)
    cache.reset([3])
    run_step(cache, [3], [5], accepted=5)


def test_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from replaystate.errors import ProtocolError

    cache = audited()
    cache.device = torch.device("cuda")  # as if
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    x = random_inputs(tokens=1)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *_: self)
    with pytest.raises(ProtocolError, match="debug=True needs values on the host"):
        replay_step(*x, cache, 0, torch.tensor([1]), bounds_of([1]))

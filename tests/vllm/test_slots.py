"""Blocks committed by position, against a float64 recurrence over the tokens that were kept."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from replaystate import GDNShape
from replaystate.errors import ProtocolError
from replaystate.reference import recurrent
from replaystate.vllm.slots import LayerPages, ReplaySlots

SHAPE = GDNShape(1, 3, 8, 4)
A_LOG, DT_BIAS = torch.tensor([0.1, -0.5, 0.3], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
WIDTH, LAYERS = 4, 2


def pages(num_slots: int = 6) -> list[LayerPages]:
    H, HV, K, V = SHAPE.sizes

    def empty(*size: int) -> Tensor:
        return torch.full((num_slots, *size), torch.nan)

    return [
        LayerPages(empty(3, 1), empty(HV, V, K), empty(HV, 32, V), empty(H, 32, K), empty(HV, 32))
        for _ in range(LAYERS)
    ]


class Requests:
    """Steps requests through slots, as the layer does, and remembers what each has kept."""

    def __init__(self) -> None:
        self.slots = ReplaySlots(pages(), window=16)
        self.tokens: dict[int, list[tuple[Tensor, Tensor, Tensor]]] = {}

    def start(self, slot: int) -> None:
        at = torch.tensor([slot], dtype=torch.int32)
        self.slots.restart(at, torch.zeros(1, dtype=torch.int32))
        for page in self.slots.layers:
            page.state[slot] = 0
        self.tokens[slot] = []

    def step(self, slot: int, length: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        new = [(torch.randn(SHAPE.qkv_dim), torch.randn(3), torch.randn(3)) for _ in range(length)]
        qkv, a, b = (torch.stack(x) for x in zip(*new, strict=True))
        s = self.slots
        for layer, page in enumerate(s.layers):
            out = torch.zeros(length, 3, 4)
            torch.ops.replaystate.replay_step(
                qkv, a, b, A_LOG.float(), DT_BIAS.float(), page.state, page.u_ring, page.k_ring, page.g_ring,
                s.ring_start, s.num_committed, s.step_records, s.status, out, torch.tensor([slot], dtype=torch.int32),
                torch.tensor([0, length], dtype=torch.int32), layer, WIDTH, s.window, 0, 8**-0.5, "auto",
            )  # fmt: skip
        return new

    def settle(self, slot: int, position: int, *more: int) -> None:
        at = torch.tensor([slot, *more], dtype=torch.int32)
        self.slots.settle(at, torch.full_like(at, position), unique=not more)

    def state(self, slot: int) -> Tensor:
        """The float64 recurrence over the kept tokens."""
        if not self.tokens[slot]:
            return torch.zeros(1, 3, 4, 8, dtype=torch.float64)
        qkv, a, b = (torch.stack(x).double() for x in zip(*self.tokens[slot], strict=True))
        bounds = torch.tensor([0, len(qkv)], dtype=torch.int32)
        return recurrent(qkv, a, b, A_LOG, DT_BIAS, SHAPE, bounds)[1]

    def check(self, slot: int, of: int | None = None) -> None:
        s = self.slots
        for page in s.layers:
            got = torch.ops.replaystate.read_state(
                page.state, page.u_ring, page.k_ring, page.g_ring, torch.tensor([slot], dtype=torch.int32),
                s.ring_start, s.num_committed, s.window, 0, "auto",
            )  # fmt: skip
            torch.testing.assert_close(got.double(), self.state(slot if of is None else of), rtol=1e-4, atol=1e-5)


def test_positions_commit_what_was_kept_whenever_it_is_known() -> None:
    """Drafts kept in part, steps without drafts, and a request that sits out steps: position is all that counts."""
    r = Requests()
    for slot in (2, 5):
        r.start(slot)
    lengths, kept = [4, 1, 3, 4, 2, 1, 4, 4, 4, 1] * 3, [1, 1, 3, 4, 1, 1, 2, 4, 1, 1] * 3
    for i, (length, keep) in enumerate(zip(lengths, kept, strict=True)):
        for slot in (2, 5) if i % 3 else (2,):  # slot 5 is not scheduled in every step
            r.settle(slot, len(r.tokens[slot]))
            r.tokens[slot] += r.step(slot, length)[:keep]
    for slot in (2, 5):
        r.settle(slot, len(r.tokens[slot]))
        r.check(slot)
        assert int(r.slots.conv_column[slot]) == kept[-1] - 1


def test_a_move_leaves_the_published_block_as_it_was() -> None:
    """The block that a request leaves at a boundary serves two more, in the step of the move and later."""
    r = Requests()
    r.start(1)
    for _ in range(7):
        r.settle(1, len(r.tokens[1]))
        r.tokens[1] += r.step(1, 1)
    r.settle(1, 7, 1, 1)  # three rows continue from block 1 in one step
    to = torch.tensor([2, 3, 0], dtype=torch.int32)
    src = torch.tensor([1, 1, 0], dtype=torch.int32)
    r.slots.move(src, to, torch.tensor([7, 7, 7], dtype=torch.int32))
    r.tokens[2] = list(r.tokens[1])
    assert r.slots.num_committed.tolist()[1:4] == [7, 0, 0]  # a hit starts with an empty window
    r.tokens[2] += r.step(2, 4)[:3]
    r.settle(2, 10)
    r.check(2)
    for slot in (1, 3):
        r.check(slot, of=1)
    r.settle(1, 7)
    r.slots.move(
        torch.tensor([1], dtype=torch.int32), torch.tensor([4], dtype=torch.int32), torch.tensor([7], dtype=torch.int32)
    )
    r.check(4, of=1)


def test_a_recycled_block_is_new() -> None:
    r = Requests()
    r.start(3)
    for _ in range(20):
        r.settle(3, len(r.tokens[3]))
        r.tokens[3] += r.step(3, 3)[:2]
    for page in r.slots.layers:
        page.u_ring[3], page.k_ring[3], page.g_ring[3] = torch.nan, torch.nan, torch.nan
    r.start(3)
    r.settle(3, 0)
    r.tokens[3] += r.step(3, 1)
    r.settle(3, 1)
    r.check(3)


@pytest.mark.parametrize("position", [0, 2, 6, 100])
def test_a_block_that_stands_elsewhere_is_an_error(position: int) -> None:
    r = Requests()
    r.start(3)
    r.settle(3, 0)
    r.step(3, 4)
    r.settle(3, 2)
    r.step(3, 3)
    before = r.slots.num_committed.clone()
    with pytest.raises(ProtocolError, match=rf"block 3 stands at 2 tokens and a step of 3, .* after {position}$"):
        r.settle(3, position)
    assert torch.equal(r.slots.num_committed, before)


def test_null_blocks_are_skipped() -> None:
    r = Requests()
    r.settle(0, 17, 0)
    r.slots.fold(torch.tensor([0], dtype=torch.int32))
    assert all(page.state.isnan().all() for page in r.slots.layers)

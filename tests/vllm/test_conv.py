"""The ragged convolution against torch's on whole sequences, in steps whose drafts are rejected."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from replaystate.vllm import conv


def whole(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    width = weight.shape[1]
    y = F.conv1d(F.pad(x.T[None], (width - 1, 0)), weight[:, None], bias, groups=weight.shape[0])
    return F.silu(y[0].T)


@pytest.mark.parametrize("width", [2, 4])
@pytest.mark.parametrize("drafts", [0, 3])
def test_chunks_and_rejected_drafts(width: int, drafts: int) -> None:
    chance, dim, steps = random.Random(width), 6, 30
    columns = width - 1 + drafts
    weight, bias = torch.randn(dim, width, dtype=torch.float64), torch.randn(dim, dtype=torch.float64)
    slots = torch.full((5, columns, dim), torch.nan, dtype=torch.float64)
    slot_of = {0: 4, 1: 1, 2: 2}
    kept: dict[int, Tensor] = {row: torch.empty(0, dim, dtype=torch.float64) for row in slot_of}
    column = dict.fromkeys(slot_of, 0)
    for _ in range(steps):
        rows = chance.sample(sorted(slot_of), chance.randrange(1, 4))
        long = [len(kept[row]) == 0 or chance.random() < 0.2 for row in rows]
        lengths = [chance.randrange(1, 9) if is_long else chance.randrange(1, drafts + 2) for is_long in long]
        new = [torch.randn(length, dim, dtype=torch.float64) for length in lengths]
        plan = conv.plan(
            torch.tensor([slot_of[row] for row in rows]),
            torch.tensor([column[row] for row in rows]),
            torch.tensor([len(kept[row]) == 0 for row in rows]),
            torch.tensor(long),
            torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()]),
            sum(lengths),
            width,
            columns,
        )
        got = conv.causal_conv1d(torch.cat(new), slots, weight, bias, "silu", plan).split(lengths)
        for row, x, y, is_long in zip(rows, new, got, long, strict=True):
            expected = whole(torch.cat([kept[row], x]), weight, bias)[len(kept[row]) :]
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)  # float32 inside; seen 4e-7
            accepted = len(x) if is_long else chance.randrange(1, len(x) + 1)
            kept[row] = torch.cat([kept[row], x[:accepted]])
            column[row] = 0 if is_long else accepted - 1
    assert slots[[0, 3]].isnan().all()  # slots that no row named


def test_dtype_of_the_input_is_kept_and_rounded_once() -> None:
    x, weight = torch.randn(3, 4, dtype=torch.bfloat16), torch.randn(4, 4, dtype=torch.bfloat16)
    slots = torch.zeros(2, 3, 4, dtype=torch.bfloat16)
    one = torch.tensor([1])
    plan = conv.plan(one, one * 0, one > 0, one > 0, torch.tensor([0, 3]), 3, 4, 3)
    y = conv.causal_conv1d(x, slots, weight, None, "silu", plan)
    assert torch.equal(y, whole(x.float(), weight.float(), None).bfloat16())
    assert torch.equal(slots[1], x)

"""The short causal convolution before a GDN layer, for ragged rows that each continue from a slot of inputs.

One plan serves all layers of a step. A row of q tokens reads the w - 1 inputs before it from its slot and leaves its
own inputs there, left-aligned, so that the next step begins at the column that fits the tokens that were kept:

    slot before   [.. p0 p1 p2 ..]          w = 4; the row's first token sees p0 p1 p2
    slot after    [p1 p2 x0 x1 x2 ..]       a tokens kept: the next step reads from column a - 1

A long row (a prefill) leaves only its last w - 1 inputs. The same torch code runs on every device, and takes no value
from it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class ConvPlan:
    """Where the inputs of each token lie, in what the rows' slots hold followed by the step's own inputs.

    | tensor | shape | meaning |
    |---|---|---|
    | slots | [B] | slot of each row |
    | fresh | [B] | rows that start from nothing: what their slot holds is not read |
    | taps | [w, N] | for each token and tap, its input |
    | kept | [B * columns] | for each column of each slot, the input that it holds next |
    """

    slots: Tensor
    fresh: Tensor
    taps: Tensor
    kept: Tensor


def plan(
    slots: Tensor,
    first_column: Tensor,
    fresh: Tensor,
    long: Tensor,
    query_start_loc: Tensor,
    tokens: int,
    width: int,
    columns: int,
) -> ConvPlan:
    """The plan of a step.

    Args:
        slots: [B] slot of each row.
        first_column: [B] column of the slot where a row's w - 1 earlier inputs begin.
        fresh: [B] rows without earlier inputs.
        long: [B] rows of which only the last w - 1 inputs are kept.
        query_start_loc: [B + 1] row bounds.
        tokens: N.
        width: w, of the convolution.
        columns: inputs that a slot holds; at least w - 2 plus the longest row that is not long.
    """
    device, rows, before = slots.device, slots.shape[0], width - 1
    start = query_start_loc.long()
    lengths = start.diff()
    row = torch.repeat_interleave(torch.arange(rows, device=device), lengths, output_size=tokens)
    position = torch.arange(tokens, device=device) - start[row]

    def source(row: Tensor, at: Tensor) -> Tensor:
        """Index of the input `at` (0 is the row's first token, -1 the one before it) of a row."""
        held = row * columns + first_column[row] + before + at
        return torch.where(at < 0, held, rows * columns + start[row] + at)

    taps = source(row, position + torch.arange(-before, 1, device=device)[:, None])
    first_kept = torch.where(long, lengths - before, 1 - before)
    at = first_kept[:, None] + torch.arange(columns, device=device)
    kept = source(torch.arange(rows, device=device)[:, None], torch.minimum(at, lengths[:, None] - 1))
    return ConvPlan(slots, fresh, taps, kept.flatten())


def causal_conv1d(
    x: Tensor, slots: Tensor, weight: Tensor, bias: Tensor | None, activation: str | None, plan: ConvPlan
) -> Tensor:
    """Convolve, in float32, and store the inputs that the next step may need.

    y_n = act(bias + sum_j weight_j x_{n - w + 1 + j})

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | x | [N, dim] | float | in | inputs of the step's tokens |
    | slots | [num_slots, columns, dim] | float | in/out | earlier inputs |
    | weight | [dim, w] | float | in | |
    | returns | [N, dim] | as x | out | |
    """
    held = slots.index_select(0, plan.slots).masked_fill_(plan.fresh[:, None, None], 0)
    inputs = torch.cat([held.flatten(0, 1).to(x.dtype), x])
    taps = weight.t().contiguous().float()
    y = inputs.index_select(0, plan.taps[0]).float() * taps[0]
    for j in range(1, len(taps)):
        y.addcmul_(inputs.index_select(0, plan.taps[j]).float(), taps[j])
    if bias is not None:
        y += bias.float()
    if activation is not None:
        y = F.silu(y, inplace=True)
    slots.index_copy_(0, plan.slots, inputs.index_select(0, plan.kept).to(slots.dtype).view_as(held))
    return y.to(x.dtype)

"""Backend "torch": every op in plain torch, on any device that torch has.

Vectorised over rows and heads. A step loops in Python over its at most `executed_width` tokens, a fold over the
window's rows; never over rows of the batch, and padding goes to executed_width, never to the longest row of the batch.

The same row gives the same bits alone, in any batch and at any place in it. That is by construction: contractions are a
product and a sum over the innermost dim (whose order depends on its length only), never a batched matrix product (whose
order may depend on the batch); exponentials and logarithms are taken in float64 and rounded once to float32 (vector and
scalar code paths of one function differ in the last float64 bit, which that rounding removes). Arithmetic is float32,
with one rounding at each store.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from ..checks import flag, saturate
from ..errors import SlotStatus
from ..shapes import QK_NORM_EPS, flush_min

if TYPE_CHECKING:
    from .registry import Call

NAME = "torch"


def usable() -> str | None:
    """Always: torch is the one dependency."""
    return None


def supports(call: Call) -> str | None:
    """Every call: any device, dtype and size."""
    return None


# --- element-wise pieces -------------------------------------------------------------------------------------------


def _wide(device: torch.device) -> torch.dtype:
    """The dtype of gates and exponents: float64 where the device has it."""
    return torch.float32 if device.type == "mps" else torch.float64


def _exp(x: Tensor) -> Tensor:
    """e^x in float32, x in the wide dtype; e^{-inf} is 0."""
    return torch.exp(x).float()


def _gates(a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> tuple[Tensor, Tensor]:
    """Log-decay g = -exp(A_log + log softplus(a + dt_bias)) and beta = sigmoid(b), both float32."""
    wide = _wide(a.device)
    x = a.to(wide) + dt_bias.detach().to(wide)
    log_softplus = torch.where(x < -15, x, torch.log(torch.nn.functional.softplus(x.clamp(min=-15), threshold=40.0)))
    g = -torch.exp(A_log.detach().to(wide) + log_softplus)
    return g.float(), torch.sigmoid(b.to(wide)).float()


def _normalize(x: Tensor, scale: float = 1.0) -> Tensor:
    """scale * x / sqrt(sum(x^2) + eps) in float32, contiguous."""
    x = x.float().contiguous()
    return x * (scale / torch.sqrt((x * x).sum(-1, keepdim=True) + QK_NORM_EPS))


def _dot(x: Tensor, y: Tensor) -> Tensor:
    """Sum of products over the last dim, in an order that depends on its length only."""
    return (x * y).sum(-1)


def _apply(S: Tensor, x: Tensor) -> Tensor:
    """S x for S [..., V, K] and x [..., K]."""
    return _dot(S, x.unsqueeze(-2))


def _per_value_head(x: Tensor, num_v_heads: int, dim: int) -> Tensor:
    """Repeat key heads so that value head hv sees key head hv // (HV / H)."""
    return x.repeat_interleave(num_v_heads // x.shape[dim], dim=dim)


# --- the window and the step ---------------------------------------------------------------------------------------


class _Rows(NamedTuple):
    """Live rows' windows in float32, dead ring rows masked to zero, and their decays."""

    k: Tensor  # [n, H, W, K]
    u: Tensor  # [n, HV, V, W]
    weight: Tensor  # [n, HV, W]   e^{G_P - G_j}
    decay: Tensor  # [n, HV]       e^{G_P}


def _read_window(
    u_ring: Tensor, k_ring: Tensor, g_ring: Tensor, slots: Tensor, start: Tensor, count: Tensor, window: int
) -> _Rows:
    """Gather the first `count` window rows of each slot; whatever else the ring holds never enters."""
    ring_slots = k_ring.shape[2]
    row = torch.arange(window, device=slots.device)
    at = (start[:, None] + row) % ring_slots
    live = row < count[:, None]
    slot = slots[:, None]
    k = torch.where(live[:, :, None, None], k_ring[slot, :, at].float(), 0.0)  # [n, W, H, K]
    u = torch.where(live[:, :, None, None], u_ring[slot, :, at].float(), 0.0)  # [n, W, HV, V]
    g = torch.where(live[:, :, None], g_ring[slot, :, at].to(_wide(slots.device)), 0.0)  # [n, W, HV]
    from_here = g.flip(1).cumsum(1).flip(1)
    after = torch.cat([from_here[:, 1:], torch.zeros_like(g[:, :1])], dim=1)
    return _Rows(
        k.transpose(1, 2).contiguous(),
        u.permute(0, 2, 3, 1).contiguous(),
        _exp(after).transpose(1, 2).contiguous(),
        _exp(from_here[:, 0]),
    )


def _fold(S: Tensor, rows: _Rows) -> Tensor:
    """S_C = e^{G_C} S_0 + sum_j e^{G_C - G_j} u_j k^_j^T."""
    S = rows.decay[:, :, None, None] * S
    num_v_heads = S.shape[1]
    for j in range(rows.k.shape[2]):
        k = _per_value_head(rows.k[:, :, j], num_v_heads, 1)
        u = rows.u[:, :, :, j] * rows.weight[:, :, j, None]
        S = S + u[..., None] * k[..., None, :]
    return S


def _step(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, S: Tensor, rows: _Rows) -> tuple[Tensor, Tensor]:
    """(y, u), both [n, T, HV, V], of T tokens after the window; q, k [n, T, H, K] normalised, g, beta [n, T, HV]."""
    n, tokens, HV, V = v.shape
    wide_g = g.to(_wide(g.device))
    whole = torch.zeros_like(wide_g[:, 0])  # log-decay from the window's end to now
    since = torch.zeros(n, HV, tokens, dtype=wide_g.dtype, device=g.device)  # ... from after token s to now
    u = torch.zeros(n, HV, V, tokens, dtype=torch.float32, device=g.device)
    y = torch.zeros_like(v)

    def window_product(x: Tensor) -> Tensor:
        scores = _per_value_head(_dot(rows.k, x[:, :, None]), HV, 1) * rows.weight
        return rows.decay[..., None] * _apply(S, _per_value_head(x, HV, 1)) + _apply(rows.u, scores)

    def new_product(x: Tensor, upto: int) -> Tensor:
        scores = _per_value_head(_dot(k, x[:, None]), HV, 2).transpose(1, 2)
        earlier = torch.arange(tokens, device=g.device) < upto  # later tokens are not multiplied by 0: they may be NaN
        return _apply(u, torch.where(earlier, scores * _exp(since), 0.0))

    for t in range(tokens):
        whole = whole + wide_g[:, t]
        since[:, :, :t] += wide_g[:, t, :, None]
        total = _exp(whole)[..., None]
        predicted = total * window_product(k[:, t]) + new_product(k[:, t], t)
        u[..., t] = beta[:, t, :, None] * (v[:, t] - predicted)
        y[:, t] = total * window_product(q[:, t]) + new_product(q[:, t], t + 1)
    return y, u.permute(0, 3, 1, 2)


def _advance(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    slots: Tensor,
    start: Tensor,
    count: Tensor,
    lengths: Tensor,
    fold_at: int,
    window: int,
    scale: float,
    status: Tensor | None,
) -> Tensor:
    """Step, append and fold the rows given (all of them live, distinct slots); returns y [n, T, HV, V] in float32."""
    tokens, ring_slots = q.shape[1], k_ring.shape[2]
    q, k = _normalize(q, scale), _normalize(k)
    g, beta = _gates(a, b, A_log, dt_bias)
    rows = _read_window(u_ring, k_ring, g_ring, slots, start, count, window)
    S = state[slots].float()
    y, u = _step(q, k, v.float(), g, beta, S, rows)

    row, token = (torch.arange(tokens, device=slots.device) < lengths[:, None]).nonzero(as_tuple=True)
    at = (start[row] + count[row] + token) % ring_slots
    stored_u, saturated = saturate(u[row, token], u_ring.dtype)
    u_ring[slots[row], :, at] = stored_u
    k_ring[slots[row], :, at] = k[row, token].to(k_ring.dtype)
    g_ring[slots[row], :, at] = g[row, token]
    if status is not None:
        hit = torch.zeros(len(slots), dtype=torch.bool, device=slots.device).index_put(
            (row,), saturated, accumulate=True
        )
        flag(status, slots, hit, SlotStatus.RING_SATURATED)

    folding = (count >= fold_at).nonzero().squeeze(1)
    if folding.numel():
        folded, saturated = saturate(_fold(S[folding], _Rows(*(x[folding] for x in rows))), state.dtype)
        state[slots[folding]] = folded
        if status is not None:
            flag(status, slots[folding], saturated, SlotStatus.STATE_SATURATED)
    return y


# --- the ops -------------------------------------------------------------------------------------------------------


def replay_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    out: Tensor,
    state_indices: Tensor,
    query_start_loc: Tensor,
    layer: int,
    executed_width: int,
    window: int,
    null_slot: int,
    scale: float,
) -> None:
    """One step of one layer from packed ragged rows. See `replaystate.replay_step`."""
    out.zero_()
    num_slots, HV, V, K = state.shape
    H, ring_slots = k_ring.shape[1:3]
    slots = state_indices.long()
    bounds = query_start_loc.long().clamp(0, mixed_qkv.shape[0])
    begin, length = bounds[:-1], bounds.diff().clamp(min=0)

    # Which rows run: real slots that are alive and whose last step was committed; the rest is flagged and left alone.
    keep = (slots >= 0) & (slots < num_slots) & (slots != null_slot)
    slots, begin, length = slots[keep], begin[keep], length[keep]
    start, count, record = ring_start[slots].long(), num_committed[slots].long(), step_records[slots]
    new_record = ((executed_width << 16) | length.clamp(0, executed_width)).to(record.dtype)
    other = torch.where(record == 0, new_record[:, None], record)
    broken = (record[:, layer] != 0) | (other != new_record[:, None]).any(1)
    bad_cursor = (start < 0) | (start >= ring_slots) | (count < 0) | (count > window)
    flag(status, slots, broken, SlotStatus.NOT_COMMITTED | SlotStatus.DEAD)
    flag(status, slots, bad_cursor, SlotStatus.BAD_CURSOR | SlotStatus.DEAD)
    flag(status, slots, length > executed_width, SlotStatus.ROW_CUT)
    keep = (status[slots] & int(SlotStatus.DEAD)) == 0
    slots, begin, length, start, count, new_record = (x[keep] for x in (slots, begin, length, start, count, new_record))
    if slots.numel() == 0:
        return
    step_records[slots, layer] = new_record

    # Pad to [rows, executed_width]; padded lanes cannot move anything: decay 1, beta's row unused, q = k = v = 0.
    length = length.clamp(0, executed_width)
    lane = torch.arange(executed_width, device=slots.device)
    real = lane < length[:, None]
    token = torch.where(real, begin[:, None] + lane, 0)

    def pad(x: Tensor, fill: float) -> Tensor:
        if x.shape[0] == 0:
            return x.new_full((len(slots), executed_width, *x.shape[1:]), fill)
        return torch.where(real[..., None], x[token], fill)

    q, k, v = pad(mixed_qkv, 0.0).split([H * K, H * K, HV * V], dim=-1)
    y = _advance(
        q.unflatten(-1, (H, K)),
        k.unflatten(-1, (H, K)),
        v.unflatten(-1, (HV, V)),
        pad(a, float("-inf")),
        pad(b, 0.0),
        A_log,
        dt_bias,
        state,
        u_ring,
        k_ring,
        g_ring,
        slots,
        start,
        count,
        length,
        flush_min(window, executed_width),
        window,
        scale,
        status,
    )
    out[token[real]] = y[real].to(out.dtype)


def ucache_flush(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    state: Tensor,
    u_cache: Tensor,
    k_cache: Tensor,
    g_cache: Tensor,
    state_indices: Tensor,
    hist_len: Tensor,
    cache_base: Tensor,
    output: Tensor,
    flush_min: int,
    window: int,
    scale: float,
) -> None:
    """One step from padded rows with per-row cursors. See `replaystate.gated_delta_rule_mtp_ucache_flush`."""
    keep = (state_indices >= 0).nonzero().squeeze(1)
    if keep.numel() == 0:
        return
    y = _advance(
        q[keep],
        k[keep],
        v[keep],
        a[keep],
        b[keep],
        A_log,
        dt_bias,
        state,
        u_cache,
        k_cache,
        g_cache,
        state_indices[keep].long(),
        cache_base[keep].long(),
        hist_len[keep].long(),
        torch.full_like(keep, q.shape[1]),
        flush_min,
        window,
        scale,
        None,
    )
    output[keep] = y.to(output.dtype)


def fold_slots(
    states: list[Tensor],
    u_rings: list[Tensor],
    k_rings: list[Tensor],
    g_rings: list[Tensor],
    src_slots: Tensor,
    dst_slots: Tensor,
    start: Tensor,
    count: Tensor,
    window: int,
    status: Tensor | None,
) -> None:
    """Into slot dst of every layer, the state after `count` window rows of slot src; negative slots skip the row."""
    keep = (src_slots >= 0) & (dst_slots >= 0)
    src, dst, start, count = (x[keep].long() for x in (src_slots, dst_slots, start, count))
    if src.numel() == 0:
        return
    copy = (count == 0)[:, None, None, None]
    for state, u_ring, k_ring, g_ring in zip(states, u_rings, k_rings, g_rings, strict=True):
        stored = state[src]
        folded = _fold(stored.float(), _read_window(u_ring, k_ring, g_ring, src, start, count, window))
        rounded, saturated = saturate(folded, state.dtype)
        state[dst] = torch.where(copy, stored, rounded)  # no rows: the same bits, NaN payloads included
        if status is not None:
            flag(status, dst, saturated, SlotStatus.STATE_SATURATED)


def read_state(
    state: Tensor,
    u_ring: Tensor,
    k_ring: Tensor,
    g_ring: Tensor,
    slots: Tensor,
    start: Tensor,
    count: Tensor,
    window: int,
    out: Tensor,
) -> None:
    """out[i] = the state of slot i after `count` rows, in float32; rows of negative slots are left as they are."""
    keep = (slots >= 0).nonzero().squeeze(1)
    slots, start, count = slots[keep], start[keep], count[keep]
    out[keep] = _fold(state[slots].float(), _read_window(u_ring, k_ring, g_ring, slots, start, count, window))


def commit(
    state_indices: Tensor,
    num_accepted: Tensor,
    ring_start: Tensor,
    num_committed: Tensor,
    step_records: Tensor,
    status: Tensor,
    window: int,
    ring_slots: int,
    null_slot: int,
) -> None:
    """Publish the cursors of a step. See `ReplayCache.commit`."""
    slots = state_indices.long()
    keep = (slots >= 0) & (slots < ring_start.shape[0]) & (slots != null_slot)
    slots, accepted = slots[keep], num_accepted[keep].long()
    if slots.numel() == 0:
        return
    records = step_records[slots]
    record = records.amax(1)
    no_step = records.amin(1) == 0
    flag(status, slots, no_step, SlotStatus.NO_STEP)
    flag(
        status, slots, no_step & (record != 0), SlotStatus.DEAD
    )  # some layers stepped: their rings and the others' differ
    width, length = (record >> 16).long(), (record & 0xFFFF).long()
    flag(status, slots, ~no_step & ((accepted < 0) | (accepted > length)), SlotStatus.ACCEPTED_CLAMPED)
    accepted = torch.minimum(accepted.clamp(min=0), length)
    start, count = ring_start[slots].long(), num_committed[slots].long()
    folded = count >= window + 1 - width
    live = ~no_step & ((status[slots] & int(SlotStatus.DEAD)) == 0)
    new_start = torch.where(folded, (start + count) % ring_slots, start)
    new_count = torch.where(folded, accepted, count + accepted)
    ring_start[slots] = torch.where(live, new_start, start).to(ring_start.dtype)
    num_committed[slots] = torch.where(live, new_count, count).to(num_committed.dtype)
    step_records[slots] = 0


def gated_delta_rule(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    query_start_loc: Tensor,
    out: Tensor,
    final_state: Tensor,
    scale: float,
) -> None:
    """Prefill: the recurrence over whole prompts, all rows at once. See `replaystate.gated_delta_rule`."""
    out.zero_()
    rows, HV, V, K = final_state.shape
    if initial_state is None:
        final_state.zero_()
    else:
        final_state.copy_(initial_state)
    key_dim = (mixed_qkv.shape[1] - HV * V) // 2
    bounds = query_start_loc.long().clamp(0, mixed_qkv.shape[0])
    begin, length = bounds[:-1], bounds.diff().clamp(min=0)
    longest = int(length.max()) if rows else 0
    if longest == 0:
        return
    q, k, v = mixed_qkv.split([key_dim, key_dim, HV * V], dim=-1)
    q = _per_value_head(_normalize(q.unflatten(-1, (-1, K)), scale), HV, 1)
    k = _per_value_head(_normalize(k.unflatten(-1, (-1, K))), HV, 1)
    v = v.unflatten(-1, (HV, V)).float()
    g, beta = _gates(a, b, A_log, dt_bias)
    decay = _exp(g.to(_wide(g.device)))
    # Longest rows first, so that the rows still running are always a prefix: states stay in place and are never
    # gathered.
    order = length.argsort(descending=True, stable=True)
    begin, running = begin[order], (length[:, None] > torch.arange(longest, device=length.device)).sum(0).tolist()
    S = final_state[order]
    for t, n in enumerate(running):
        token = begin[:n] + t
        head = S[:n]
        head *= decay[token][:, :, None, None]
        u = beta[token][..., None] * (v[token] - _apply(head, k[token]))
        head += u[..., None] * k[token][..., None, :]
        out[token] = _apply(head, q[token]).to(out.dtype)
    final_state[order] = S

"""The two functions that a model calls: `replay_step` to decode, `gated_delta_rule` to prefill."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from .cache import ReplayCache
from .checks import Indices, as_index_tensor, check_options
from .errors import ArgumentError, DTypeError, ProtocolError, SlotStatus
from .shapes import GDNShape, require_int


def replay_step(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    cache: ReplayCache,
    layer: int,
    state_indices: Indices,
    query_start_loc: Tensor,
    *,
    executed_width: int | None = None,
    out: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> Tensor:
    """One decode step of one layer, straight from packed ragged rows.

    For every row, with S_P the state of its slot (checkpoint and window), c_t the cumulative log-decay of the new
    tokens::

        u_t = beta_t (v_t - e^{c_t} S_P k^_t - sum_{s<t} e^{c_t - c_s} (k^_s . k^_t) u_s)
        y_t = e^{c_t} S_P q~_t + sum_{s<=t} e^{c_t - c_s} (k^_s . q~_t) u_s

    The row's (k^, u, g) are appended past its window, and a window with P >= W + 1 - executed_width is folded into the
    checkpoint. Outputs do not depend on whether it was. Cursors are read, never written: `cache.commit` publishes them
    once, after all layers.

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | mixed_qkv | [N, 2HK + HV V] | fp32, bf16, fp16 | in | per token q, k, v heads, after convolution and SiLU |
    | a | [N, HV] | float | in | raw gate input: g = -exp(A_log) softplus(a + dt_bias) |
    | b | [N, HV] | float | in | raw beta logit: beta = sigmoid(b) |
    | A_log, dt_bias | [HV] | float | in | layer parameters; may require grad, may be reloaded in place |
    | state_indices | [B] | int32, int64 | in | slot of each row; negative and null slots are padding |
    | query_start_loc | [B + 1] | int32 | in | row i holds tokens query_start_loc[i] .. query_start_loc[i + 1] - 1 |
    | out | [N, HV, V] | as mixed_qkv | out | y; exact zero for padding rows and for tokens of no row |
    | cache | | | in/out | rings of the named slots; checkpoints of folding rows; step records |

    Args:
        cache: owns checkpoints, rings and cursors.
        layer: which layer's.
        executed_width: launch width of the step, 1..max_query_len, the same for all layers; every row has at most
            so many tokens. Decides which rows fold. None: max_query_len.
        out: where to write; contiguous or row-strided, sharing no memory with an input. None: a fresh tensor.
        scale: of q; None: K^-1/2.
        backend: "auto", or the name of one of `replaystate.backends()`.

    Returns:
        out.

    Raises:
        ShapeError, DTypeError: a tensor that does not fit.
        ArgumentError: executed_width, query_start_loc or layer out of range; a row longer than executed_width; an input
            that requires grad; an overlap of out. (Values: when they are on the host.)
        SlotError: (host values) a slot past the pool, or a live slot named twice.
        ProtocolError: (host values) the slot's last step was not committed, or another layer had another width.
        DeadSlotError: (host values) a dead slot.
        BackendError: the backend asked for cannot run this call.

    Notes:
        Cost: one read of the checkpoint per row, HV V K elements, plus P rows of the ring; a fold writes the checkpoint
        once. A row's bits do not depend on the other rows. On a device nothing syncs with the host unless the backend
        says so (the torch backend does); values out of range are clamped and flagged in `cache.status`. On the `cuda`
        backend it can be captured in a CUDA graph after `cache.warmup`; replays read the slots, bounds and cursors of
        their time.

    Source: contract sections 2 to 4.

    >>> import torch
    >>> shape = GDNShape(num_k_heads=1, num_v_heads=2, head_k_dim=8, head_v_dim=8)
    >>> cache = ReplayCache(shape, num_layers=1, num_slots=4)
    >>> slot = cache.allocate()
    >>> tokens = 3  # one token and two drafts
    >>> qkv, a, b = torch.randn(tokens, shape.qkv_dim), torch.randn(tokens, 2), torch.randn(tokens, 2)
    >>> bounds = torch.tensor([0, tokens], dtype=torch.int32)
    >>> y = replay_step(qkv, a, b, torch.zeros(2), torch.zeros(2), cache, 0, [slot], bounds, executed_width=tokens)
    >>> cache.commit([slot], [2])  # the second draft was wrong
    >>> y.shape, int(cache.num_committed[slot])
    (torch.Size([3, 2, 8]), 2)
    """
    fn = "replay_step"
    _check_tensors(fn, {"mixed_qkv": mixed_qkv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias})
    _check_tensors(fn, {"query_start_loc": query_start_loc} | ({} if out is None else {"out": out}))
    check_options(fn, scale, backend)
    if not isinstance(cache, ReplayCache):
        raise DTypeError(f"{fn}: cache: expected a ReplayCache, got {type(cache).__name__}")
    u_ring, k_ring, g_ring = cache.rings(layer)
    width = cache.max_query_len if executed_width is None else executed_width
    require_int(fn, "executed_width", width, minimum=1)
    if width > cache.max_query_len:
        raise ArgumentError(f"{fn}: executed_width: expected 1..{cache.max_query_len} (max_query_len), got {width}")
    slots = as_index_tensor(fn, "state_indices", state_indices, cache.device)
    query_start_loc = query_start_loc.to(cache.device)
    if out is None:
        out = mixed_qkv.new_empty(mixed_qkv.shape[0], cache.shape.num_v_heads, cache.shape.head_v_dim)
    audited: list[tuple[int, tuple[int, int]]] = []
    if cache.audit is not None:
        if cache.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ProtocolError(
                f"{fn}: debug=True needs values on the host and cannot run while a CUDA graph is captured"
            )
        audited = _audit_rows(cache, layer, slots, query_start_loc)
    torch.ops.replaystate.replay_step(
        mixed_qkv, a, b, A_log.detach(), dt_bias.detach(), cache.checkpoint(layer), u_ring, k_ring, g_ring,
        cache.ring_start, cache.num_committed, cache._step_records, cache.status, out, slots, query_start_loc, layer,
        width, cache.window, cache._null, cache.shape.head_k_dim**-0.5 if scale is None else float(scale), backend,
    )  # fmt: skip
    if cache.audit is not None:
        rows, bounds = [row for row, _ in audited], [bound for _, bound in audited]
        cache.audit.step(layer, rows, bounds, mixed_qkv, a, b, A_log, dt_bias)
    return out


def _audit_rows(
    cache: ReplayCache, layer: int, slots: Tensor, query_start_loc: Tensor
) -> list[tuple[int, tuple[int, int]]]:
    """(slot, token bounds) of the rows that the audit follows; shadows of new slots start from the state before."""
    bounds = query_start_loc.tolist()
    real = cache._real(slots).tolist()
    rows = [
        (slot, (bounds[i], bounds[i + 1])) for i, slot in enumerate(slots.tolist()) if real[i] and i + 1 < len(bounds)
    ]
    fresh = [slot for slot, _ in rows if not int(cache._step_records[slot, layer])]
    if cache.audit is not None:
        cache.audit.before_step(layer, [slot for slot in fresh if not int(cache.status[slot]) & SlotStatus.DEAD])
    return rows


def gated_delta_rule(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    shape: GDNShape,
    query_start_loc: Tensor,
    *,
    initial_state: Tensor | None = None,
    scale: float | None = None,
    backend: str = "auto",
) -> tuple[Tensor, Tensor]:
    """Prefill whole prompts with the same recurrence.

    S_t = e^{g_t} S_{t-1} + u_t k^_t^T with u_t = beta_t (v_t - e^{g_t} S_{t-1} k^_t), y_t = S_t q~_t, from the initial
    state or zero.

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | mixed_qkv, a, b, A_log, dt_bias, query_start_loc | as in `replay_step` | | in | |
    | initial_state | [B, HV, V, K] | any float | in | None: zeros |
    | out | [N, HV, V] | as mixed_qkv | returned | y |
    | final_state | [B, HV, V, K] | float32 | returned | an empty row returns its initial state, or zeros |

    Args:
        shape: head counts and dims.
        scale: of q; None: K^-1/2.
        backend: "auto", or the name of one of `replaystate.backends()`.

    Raises:
        ShapeError, DTypeError: a tensor that does not fit.
        ArgumentError: query_start_loc out of order (host values), or an input that requires grad.
        BackendError: the backend asked for cannot run this call.

    Notes:
        Cost: HV V K multiply-adds of the state three times a token (predict, update, read out); the state stays in fast
        memory over a prompt on the `cpu` and `cuda` backends. A row's bits do not depend on the other rows. Nothing
        given is changed. No host sync on the `cuda` backend. The torch backend loops over tokens.

    Source: contract section 2.

    >>> import torch
    >>> shape = GDNShape(1, 2, 8, 8)
    >>> qkv, a, b = torch.randn(5, shape.qkv_dim), torch.randn(5, 2), torch.randn(5, 2)
    >>> y, state = gated_delta_rule(qkv, a, b, torch.zeros(2), torch.zeros(2), shape, torch.tensor([0, 3, 5]))
    >>> y.shape, state.shape
    (torch.Size([5, 2, 8]), torch.Size([2, 2, 8, 8]))
    """
    fn = "gated_delta_rule"
    _check_tensors(fn, {"mixed_qkv": mixed_qkv, "a": a, "b": b, "A_log": A_log, "dt_bias": dt_bias})
    _check_tensors(fn, {"query_start_loc": query_start_loc})
    _check_tensors(fn, {} if initial_state is None else {"initial_state": initial_state})
    check_options(fn, scale, backend)
    if not isinstance(shape, GDNShape):
        raise DTypeError(f"{fn}: shape: expected a GDNShape, got {type(shape).__name__}")
    out, final_state = torch.ops.replaystate.gated_delta_rule(
        mixed_qkv, a, b, A_log.detach(), dt_bias.detach(), initial_state, query_start_loc.to(mixed_qkv.device),
        *shape.sizes, shape.head_k_dim**-0.5 if scale is None else float(scale), backend,
    )  # fmt: skip
    return out, final_state


def _check_tensors(fn: str, arguments: Mapping[str, object]) -> None:
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise DTypeError(f"{fn}: {name}: expected a tensor, got {type(x).__name__}")

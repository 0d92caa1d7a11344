"""The kernel-level callables, with FlashInfer's names and keywords, on any device that torch has.

An engine that manages its own slots and cursors calls these. Unlike `replay_step` they take padded rows and cursors per
row, and know no cache object. Every callable carries `.g_layout`: ours read and write a g ring of per-token log-decays.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from . import ops as _ops  # noqa: F401  registers torch.ops.replaystate
from .checks import check_options, check_tensor
from .errors import ArgumentError, DTypeError, GLayoutError, ShapeError

GLayout = Literal["per_token", "cumulative"]


def gated_delta_rule_mtp_ucache_flush(
    A_log: Tensor,
    a: Tensor,
    dt_bias: Tensor,
    softplus_beta: float = 1.0,
    softplus_threshold: float = 20.0,
    q: Tensor | None = None,
    k: Tensor | None = None,
    v: Tensor | None = None,
    b: Tensor | None = None,
    initial_state_source: Tensor | None = None,
    initial_state_indices: Tensor | None = None,
    use_qk_l2norm_in_kernel: bool = True,
    scale: float | None = None,
    output: Tensor | None = None,
    k_cache: Tensor | None = None,
    u_cache: Tensor | None = None,
    g_cache: Tensor | None = None,
    hist_len: Tensor | None = None,
    cache_base: Tensor | None = None,
    flush_min: int | None = None,
    restart_hist_on_flush: bool = True,
    *,
    backend: str = "auto",
) -> Tensor:
    """Verify, append and fold for padded rows: one step of one layer.

    The mathematics is that of `replay_step`; all T lanes of a row run. Rows with hist_len >= flush_min fold their
    window.

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | q, k | [B, T, H, K] | fp32, bf16, fp16 | in | raw; normalised inside |
    | v | [B, T, HV, V] | float | in | values |
    | a, b | [B, T, HV] | float | in | raw gate input (-inf: no decay), raw beta logit |
    | A_log, dt_bias | [HV] | float | in | layer parameters |
    | initial_state_source | [pool, HV, V, K] | fp32, bf16, fp16 | in/out | checkpoints; written for folding rows |
    | initial_state_indices | [B] | int32 | in | slot of each row; negative: padding. None: 0..B-1 |
    | k_cache, u_cache | [pool, H, R, K], [pool, HV, R, V] | float | in/out | rings; T rows appended per row |
    | g_cache | [pool, HV, R] | fp32 | in/out | log-decay of each token (`g_layout` "per_token") |
    | hist_len, cache_base | [B] | int32 | in (in/out with restart) | window length 0..R/2 and origin 0..R-1 per row |
    | output | [B, T, HV, V] | float | out | y; padding rows untouched |

    Args:
        softplus_beta: only 1.0.
        softplus_threshold: only 20.0 (the softplus used is exact on both sides of it).
        use_qk_l2norm_in_kernel: only True.
        scale: of q; None: K^-1/2.
        output: None: a fresh tensor in q's dtype, padding rows zero.
        cache_base: None: zeros, only without restart_hist_on_flush.
        flush_min: 1..R/2 + 1 - T; None: the largest.
        restart_hist_on_flush: for callers without a commit of their own: after the launch folding rows get
            cache_base += hist_len (mod R) and hist_len = 0; the caller adds what it accepts. With layers that share
            cursors it must be False.
        backend: "auto", or the name of one of `replaystate.backends()`.

    Returns:
        output.

    Raises:
        ArgumentError, ShapeError, DTypeError: an argument that is missing or does not fit; (host values) cursors out of
            range.
        SlotError: (host values) a slot past the pool or named twice.

    Notes:
        Cost as `replay_step`. A row's bits do not depend on the other rows. No host sync on the `cuda` backend.

    Source: contract section 6. The window is R/2 rows, as upstream (16 of 32).

    >>> B, T, H, HV, K, V, R = 2, 4, 1, 2, 8, 8, 32
    >>> state, k_cache, u_cache = torch.zeros(B, HV, V, K), torch.zeros(B, H, R, K), torch.zeros(B, HV, R, V)
    >>> g_cache, hist_len, cache_base = torch.zeros(B, HV, R), *torch.zeros(2, B, dtype=torch.int32)
    >>> q, k = torch.randn(2, B, T, H, K)
    >>> y = gated_delta_rule_mtp_ucache_flush(
    ...     torch.zeros(HV),
    ...     torch.randn(B, T, HV),
    ...     torch.zeros(HV),
    ...     q=q,
    ...     k=k,
    ...     v=torch.randn(B, T, HV, V),
    ...     b=torch.randn(B, T, HV),
    ...     initial_state_source=state,
    ...     k_cache=k_cache,
    ...     u_cache=u_cache,
    ...     g_cache=g_cache,
    ...     hist_len=hist_len,
    ...     cache_base=cache_base,
    ... )
    >>> hist_len += 3  # the caller accepts three of the four tokens of every row
    >>> y.shape
    torch.Size([2, 4, 2, 8])
    """
    fn = "gated_delta_rule_mtp_ucache_flush"
    if softplus_beta != 1.0 or softplus_threshold != 20.0:
        raise ArgumentError(
            f"{fn}: softplus_beta, softplus_threshold: expected 1.0 and 20.0, "
            f"got {softplus_beta} and {softplus_threshold}"
        )
    if use_qk_l2norm_in_kernel is not True:
        raise ArgumentError(f"{fn}: use_qk_l2norm_in_kernel: expected True, got {use_qk_l2norm_in_kernel!r}")
    check_options(fn, scale, backend)
    given = _require(
        fn,
        {"A_log": A_log, "a": a, "dt_bias": dt_bias, "q": q, "k": k, "v": v, "b": b}
        | {"initial_state_source": initial_state_source, "k_cache": k_cache, "u_cache": u_cache, "g_cache": g_cache}
        | {"hist_len": hist_len},
    )
    q, v, state, hist_len = given["q"], given["v"], given["initial_state_source"], given["hist_len"]
    if q.dim() != 4 or v.dim() != 4:
        raise ShapeError(f"{fn}: q, v: expected [B, T, heads, dim], got {list(q.shape)} and {list(v.shape)}")
    rows, width, ring_slots = q.shape[0], q.shape[1], given["k_cache"].shape[2] if given["k_cache"].dim() == 4 else 0
    if initial_state_indices is None:
        initial_state_indices = torch.arange(rows, dtype=torch.int32, device=q.device)
    if cache_base is None:
        if restart_hist_on_flush:
            raise ArgumentError(
                f"{fn}: cache_base: expected a tensor with restart_hist_on_flush=True, which advances it"
            )
        cache_base = torch.zeros_like(hist_len)
    if output is None:
        output = q.new_zeros(rows, width, v.shape[2], v.shape[3])
    torch.ops.replaystate.ucache_flush(
        q, given["k"], v, given["a"], given["b"], given["A_log"].detach(), given["dt_bias"].detach(), state,
        given["u_cache"], given["k_cache"], given["g_cache"], initial_state_indices, hist_len, cache_base, output,
        ring_slots // 2 + 1 - width if flush_min is None else flush_min, restart_hist_on_flush,
        q.shape[3] ** -0.5 if scale is None else float(scale), backend,
    )  # fmt: skip
    return output


def gdn_prefix_materialize(
    state: Tensor,
    src_slots: Tensor,
    dst_slots: Tensor,
    k_cache: Tensor,
    u_cache: Tensor,
    g_cache: Tensor,
    cache_base: Tensor,
    count: Tensor,
    active_request_indices: Tensor | None = None,
    num_active: Tensor | None = None,
    *,
    backend: str = "auto",
) -> Tensor:
    """Write into slot dst the state after the first `count` window rows of slot src, for one layer.

    S_C = e^{G_C} S_0 + sum_{j < C} e^{G_C - G_j} u_j k^_j^T. count = 0 is a bit-exact copy. src, its ring and its
    cursors stay untouched (unless src == dst, which is right only for the whole window).

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | state | [pool, HV, V, K] | fp32, bf16, fp16 | in/out | checkpoints |
    | src_slots, dst_slots | [B] | int32 | in | negative: the row is skipped |
    | k_cache, u_cache, g_cache | as in the flush kernel | | in | rings of src (`g_layout` "per_token") |
    | cache_base | [B] | int32 | in | window origin of src, per row |
    | count | [B] | int32 | in | C; negative or above R/2: the row is skipped |
    | active_request_indices | [n] | int32 | in | rows to do, -1 tail; None: all |
    | num_active | [1] | int32 | in | how many of them; both or neither |

    Returns:
        state.

    Raises:
        ShapeError, DTypeError, ArgumentError: tensors that do not fit.
        SlotError: (host values) a slot past the pool, a dst named twice, or a dst that is another row's src.

    Notes:
        Cost: one read and one write of HV V K elements a row, plus `count` ring rows. No host sync is needed.

    Source: contract section 7.

    >>> state, k_cache, u_cache = torch.ones(4, 2, 8, 8), torch.zeros(4, 1, 32, 8), torch.zeros(4, 2, 32, 8)
    >>> src, dst, base, count = (torch.tensor([x], dtype=torch.int32) for x in (1, 3, 0, 0))
    >>> _ = state[3].zero_()
    >>> _ = gdn_prefix_materialize(state, src, dst, k_cache, u_cache, torch.zeros(4, 2, 32), base, count)
    >>> bool((state[3] == 1).all())  # count 0 copies the checkpoint
    True
    """
    fn = "gdn_prefix_materialize"
    given = {"state": state, "src_slots": src_slots, "dst_slots": dst_slots, "k_cache": k_cache, "u_cache": u_cache}
    _require(fn, given | {"g_cache": g_cache, "cache_base": cache_base, "count": count})
    torch.ops.replaystate.prefix_materialize(
        state,
        src_slots,
        dst_slots,
        k_cache,
        u_cache,
        g_cache,
        cache_base,
        count,
        active_request_indices,
        num_active,
        backend,
    )
    return state


# The layout of the g ring that each callable reads and writes; engines and loaders compare them.
gated_delta_rule_mtp_ucache_flush.g_layout = "per_token"  # type: ignore[attr-defined]
gdn_prefix_materialize.g_layout = "per_token"  # type: ignore[attr-defined]


def require_same_g_layout(kernel: Any, materializer: Any) -> None:
    """Refuse a kernel and a materializer that read the g ring differently: the states would be wrong without an error.

    Raises:
        GLayoutError: naming both layouts.
    """
    first, second = getattr(kernel, "g_layout", None), getattr(materializer, "g_layout", None)
    if first is None or second is None or first != second:
        raise GLayoutError(
            f"kernel and materializer disagree on the g ring: {first!r} and {second!r}; take both from one library, "
            "or translate the ring with convert_g_ring"
        )


def convert_g_ring(g: Tensor, ring_start: Tensor, num_committed: Tensor, *, to: GLayout) -> Tensor:
    """Translate g rings between per-token and cumulative log-decay; returns a new tensor.

    cumulative_j = sum_{i <= j} per_token_i over the live rows, restarting at the window's origin. Rows outside the
    window are copied. Towards "per_token" this takes differences, which round where one token decayed hard; a decay to
    nothing (-inf) followed by more rows cannot be undone.

    Args:
        g: [pool, HV, R] float32, holding the other layout.
        ring_start: [pool] int32.
        num_committed: [pool] int32.
        to: "per_token" or "cumulative".

    Raises:
        ArgumentError: another `to`, or (host values) a ring that cannot be undone.
        ShapeError, DTypeError: tensors that do not fit.

    Notes:
        One read and one write of the g ring, 4 bytes a slot, value head and ring row; nothing given is changed. Plain
        torch ops, no host sync on a device.

    Source: contract sections 3 and 5.

    >>> g = torch.tensor([[[-1.0, -2.0, -4.0, 9.0]]])
    >>> convert_g_ring(g, torch.tensor([0], dtype=torch.int32), torch.tensor([3], dtype=torch.int32), to="cumulative")
    tensor([[[-1., -3., -7.,  9.]]])
    """
    fn = "convert_g_ring"
    if to not in ("per_token", "cumulative"):
        raise ArgumentError(f"{fn}: to: expected 'per_token' or 'cumulative', got {to!r}")
    check_tensor(fn, "g", g, ["pool", "HV", "R"], [torch.float32])
    pool, heads, ring_slots = g.shape
    for name, x in (("ring_start", ring_start), ("num_committed", num_committed)):
        check_tensor(fn, name, x, [pool], [torch.int32], g.device)
    row = torch.arange(ring_slots, device=g.device)
    at = ((ring_start.long()[:, None] + row) % ring_slots)[:, None].expand(pool, heads, ring_slots)
    live = (row < num_committed[:, None])[:, None]
    rows = torch.where(live, g.gather(2, at), 0.0)
    if to == "cumulative":
        translated = rows.cumsum(2)
    else:
        before = torch.cat([torch.zeros_like(rows[..., :1]), rows[..., :-1]], dim=2)
        lost = live & torch.isneginf(before)
        if g.device.type == "cpu" and bool(lost.any()):
            slot = int(lost.nonzero()[0, 0])
            raise ArgumentError(
                f"{fn}: slot {slot}: a token decayed to nothing (-inf) and later rows cannot be told apart"
            )
        translated = rows - before
    return g.scatter(2, at, torch.where(live, translated, g.gather(2, at)))


def _require(fn: str, arguments: Mapping[str, Tensor | None]) -> dict[str, Tensor]:
    given: dict[str, Tensor] = {}
    for name, x in arguments.items():
        if not isinstance(x, Tensor):
            raise DTypeError(f"{fn}: {name}: expected a tensor, got {type(x).__name__}")
        given[name] = x
    return given

"""The serving adapter: the four functions that engines already call, with the same names, keywords and defaults.

An engine packs nothing itself: it gives ragged rows, per-slot cursors and block ids, and gets the outputs of the real
tokens. Slot 0 is the engine's null block. The kernel only reads cursors; the engine commits them once per model step.

Source: contract section 5.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .checks import FLOAT_DTYPES, INT_DTYPES, check_tensor
from .errors import ArgumentError, DTypeError, ShapeError
from .kernel_api import gated_delta_rule_mtp_ucache_flush, gdn_prefix_materialize, require_same_g_layout
from .kernels import flashinfer
from .ops import can_step_for_adapter
from .shapes import GDNShape, require_int
from .shapes import flush_min as _flush_min

NULL_BLOCK_ID = 0
"""The block id that engines use for padding."""

GDN_REPLAYSSM_LOGICAL_WINDOW = 16
"""W: rows that a window may hold before it must be folded."""

GDN_REPLAYSSM_RING_SLOTS = 32
"""R: physical ring slots."""

_ALIGNMENT = 16  # bytes; what device kernels ask of data pointers and row strides

Kernel = Callable[..., Any]

logger = logging.getLogger("replaystate")

_OURS, _FLASHINFER = "replaystate", "flashinfer"


class _Tagged:
    """A foreign kernel or materializer that says which g ring it reads."""

    def __init__(self, function: Kernel, g_layout: str) -> None:
        self._function = function
        self.g_layout = g_layout
        functools.update_wrapper(self, function)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)


_last_kernel_name: str | None = None


def load_gdn_replayssm_kernel(name: str | None = None) -> Kernel:
    """The kernel callable: FlashInfer's SM100 kernel where this machine can run it, else the library's own. Cached.

    Args:
        name: None to choose; "flashinfer" or "replaystate" to insist.

    Returns:
        A callable with the keywords of `replaystate.kernel_api.gated_delta_rule_mtp_ucache_flush` and a `.g_layout`.

    Raises:
        MissingDependencyError: (an ImportError) "flashinfer" was insisted on and cannot run here; the message names the
            function, the version floor and the reason.
        ArgumentError: another name.
    """
    global _last_kernel_name
    chosen = _resolve("load_gdn_replayssm_kernel", name)
    kernel = _kernel(chosen)
    _last_kernel_name = chosen
    return kernel


def load_gdn_replayssm_materializer(name: str | None = None) -> Kernel:
    """The materializer that reads the rings of the kernel loaded last. Cached.

    Args:
        name: None to follow the kernel loader's choice; "flashinfer" or "replaystate" to insist.

    Returns:
        A callable with the arguments of `replaystate.kernel_api.gdn_prefix_materialize` and a `.g_layout`.

    Raises:
        GLayoutError: the one insisted on reads the g ring otherwise than the loaded kernel writes it.
        MissingDependencyError: (an ImportError) FlashInfer's cannot be imported.
        ArgumentError: another name, or FlashInfer was imported for a state dtype other than fp16; the message names the
            dtype found and the remedy.
    """
    fn = "load_gdn_replayssm_materializer"
    kernel_name = _last_kernel_name
    if kernel_name is None:
        kernel_name = _resolve(fn, name)
        load_gdn_replayssm_kernel(kernel_name)
    materializer = _materializer(kernel_name if name is None else _resolve(fn, name))
    require_same_g_layout(_kernel(kernel_name), materializer)
    return materializer


def _resolve(fn: str, name: str | None) -> str:
    if name is None:
        return _preferred()
    if name not in (_OURS, _FLASHINFER):
        raise ArgumentError(f"{fn}: name: expected None, {_FLASHINFER!r} or {_OURS!r}, got {name!r}")
    return name


@functools.cache
def _preferred() -> str:
    """Decided and logged once a process."""
    reason = flashinfer.reason()
    if reason is not None:
        logger.info("GDN ReplaySSM runs on replaystate's own kernel (flashinfer: %s)", reason)
        return _OURS
    try:
        flashinfer.load_kernel()
    except ImportError as error:
        logger.info("GDN ReplaySSM runs on replaystate's own kernel (flashinfer: %s)", error)
        return _OURS
    logger.info("GDN ReplaySSM runs on FlashInfer's SM100 kernel")
    return _FLASHINFER


@functools.cache
def _kernel(name: str) -> Kernel:
    if name == _FLASHINFER:
        return _Tagged(flashinfer.load_kernel(), flashinfer.G_LAYOUT)
    return gated_delta_rule_mtp_ucache_flush


@functools.cache
def _materializer(name: str) -> Kernel:
    if name == _FLASHINFER:
        return _Tagged(flashinfer.load_materializer(), flashinfer.G_LAYOUT)
    return gdn_prefix_materialize


def pack_replayssm_rows(
    values: Tensor,
    query_start_loc: Tensor,
    executed_width: int,
    offsets: Tensor | None = None,
    padding_value: float = 0.0,
    uniform: bool = False,
    allow_strided_rows: bool = False,
) -> Tensor:
    """Ragged rows of tokens as [rows, executed_width, ...], without a host sync.

    Row i holds tokens query_start_loc[i] .. query_start_loc[i + 1] - 1, then padding_value. A row that is longer is
    cut.

    | tensor | shape | dtype | meaning |
    |---|---|---|---|
    | values | [N, ...] | any | one entry a token |
    | query_start_loc | [rows + 1] | int32, int64 | row bounds |
    | offsets | [>= executed_width] | int32, int64 | arange on the device, so that capture allocates none |

    Args:
        executed_width: lanes a row.
        padding_value: fills lanes without a token.
        uniform: a promise that every row has exactly executed_width tokens. The result is then a view of values where
            that is contiguous and its data pointer aligned to 16 bytes, else a contiguous aligned copy. Applies only if
            values.shape[0] == rows * executed_width.
        allow_strided_rows: with uniform, also keep a 2-D tensor with unit inner stride, rows that do not overlap and an
            aligned row stride as a view.

    Raises:
        ArgumentError: rows but no tokens (an empty tensor cannot be packed); (host values) a row longer than
            executed_width, or bounds that fall or leave the tokens; offsets too short.
        DTypeError, ShapeError: query_start_loc or offsets that do not fit.

    >>> pack_replayssm_rows(torch.arange(3), torch.tensor([0, 1, 3]), 2, padding_value=-1)
    tensor([[ 0, -1],
            [ 1,  2]])
    """
    fn = "pack_replayssm_rows"
    if not isinstance(values, Tensor) or values.dim() < 1:
        raise DTypeError(f"{fn}: values: expected a tensor with at least one dim, got {type(values).__name__}")
    require_int(fn, "executed_width", executed_width, minimum=1)
    check_tensor(fn, "query_start_loc", query_start_loc, ["rows + 1"], INT_DTYPES, values.device)
    rows, tokens, rest = query_start_loc.shape[0] - 1, values.shape[0], values.shape[1:]
    if rows < 0:
        raise ShapeError(f"{fn}: query_start_loc: expected rows + 1 >= 1 bounds, got none")
    if rows == 0:
        return values.new_empty(0, executed_width, *rest)
    if tokens == 0:
        raise ArgumentError(f"{fn}: values: an empty tensor cannot be packed into {rows} rows")
    if uniform and tokens == rows * executed_width:
        shape = (rows, executed_width, *rest)
        return _uniform_rows(values, allow_strided_rows).view(shape)
    if offsets is None:
        offsets = torch.arange(executed_width, device=values.device)
    else:
        check_tensor(fn, "offsets", offsets, ["n"], INT_DTYPES, values.device)
        if offsets.shape[0] < executed_width:
            raise ArgumentError(
                f"{fn}: offsets: expected at least executed_width={executed_width} entries, got {offsets.shape[0]}"
            )
        offsets = offsets[:executed_width]
    if query_start_loc.device.type == "cpu":
        _check_bounds(fn, query_start_loc.tolist(), tokens, executed_width)
    begin = query_start_loc[:-1, None]
    real = offsets < query_start_loc[1:, None] - begin
    packed = values[torch.where(real, begin + offsets, 0).clamp(0, tokens - 1).long()]
    return packed.masked_fill(~real.view(rows, executed_width, *(1 for _ in rest)), padding_value)


def _uniform_rows(values: Tensor, allow_strided_rows: bool) -> Tensor:
    aligned = values.data_ptr() % _ALIGNMENT == 0
    if values.is_contiguous():
        return values if aligned else values.clone()
    strided_rows = (
        allow_strided_rows
        and values.dim() == 2
        and values.stride(1) == 1
        and values.stride(0) >= values.shape[1]
        and values.stride(0) * values.element_size() % _ALIGNMENT == 0
    )
    return values if strided_rows and aligned else values.contiguous()


def _check_bounds(fn: str, bounds: list[int], tokens: int, executed_width: int) -> None:
    for i in range(len(bounds) - 1):
        length = bounds[i + 1] - bounds[i]
        if length > executed_width:
            raise ArgumentError(
                f"{fn}: query_start_loc: row {i} has {length} tokens, more than executed_width={executed_width}"
            )
        if length < 0 or bounds[i] < 0 or bounds[i + 1] > tokens:
            raise ArgumentError(
                f"{fn}: query_start_loc: row {i}: expected bounds inside the {tokens} tokens, "
                f"got {bounds[i]}..{bounds[i + 1]}"
            )


def run_gdn_replayssm(
    *,
    kernel: Kernel,
    executed_width: int,
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    checkpoint_state: Tensor,
    replayssm_cache: tuple[Tensor, Tensor, Tensor],
    ring_start: Tensor,
    num_committed: Tensor,
    query_start_loc: Tensor,
    state_indices: Tensor,
    output_indices: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    offsets: Tensor | None = None,
    uniform_query_length: int | None = None,
) -> Tensor:
    """One decode step of one layer over the replay rows of a batch; returns the outputs of the real tokens.

    | tensor | shape | dtype | direction | meaning |
    |---|---|---|---|---|
    | mixed_qkv | [N, 2HK + HV V] | io | in | packed q, k, v heads of each token, after convolution and SiLU |
    | a, b | [N, HV] | float | in | raw gate input, raw beta logit; may have another dtype than mixed_qkv |
    | A_log, dt_bias | [HV] | float | in | layer parameters; may require grad, may be reloaded in place |
    | checkpoint_state | [pool, HV, V, K] | state dtype | in/out | written for rows that fold |
    | replayssm_cache | u [pool, HV, R, V], k [pool, H, R, K], g [pool, HV, R] | float, g fp32 | in/out | |
    | ring_start, num_committed | [pool] | int32 | in | cursors per slot |
    | query_start_loc | [rows + 1] | int32 | in | row bounds |
    | state_indices | [rows] | int32 | in | slot of each row; <= 0 is padding |
    | output_indices | [M] | int | in | rows of the padded [rows * executed_width] output that are real tokens |
    | returns | [M, HV, V] | io | out | a fresh tensor; exact zero for lanes of padding rows |

    Args:
        kernel: any callable with the keywords of `replaystate.kernel_api.gated_delta_rule_mtp_ucache_flush`.
        executed_width: launch width T; rows with num_committed >= 16 + 1 - T fold.
        offsets: optional arange, see `pack_replayssm_rows`.
        uniform_query_length: equal to executed_width promises rows of exactly that length; anything else is ignored.

    Raises:
        ArgumentError, ShapeError, DTypeError: arguments that do not fit each other.

    Notes:
        Ragged rows are padded with a = -inf and q = k = v = b = 0, which cannot move the state. Nothing but the kernel
        writes to the pools. No host sync on a device. With rows but no tokens at all, a kernel call is still made where
        a row may have to fold. Cost as `replay_step`, plus
        the packing of ragged rows where the kernel is not our device kernel.

    Source: contract section 5.

    >>> H, HV, K, V, pool, tokens = 1, 2, 8, 8, 4, 3
    >>> rings = torch.zeros(pool, HV, 32, V), torch.zeros(pool, H, 32, K), torch.zeros(pool, HV, 32)
    >>> cursors = torch.zeros(2, pool, dtype=torch.int32)
    >>> y = run_gdn_replayssm(
    ...     kernel=load_gdn_replayssm_kernel("replaystate"),
    ...     executed_width=2,
    ...     mixed_qkv=torch.randn(tokens, 2 * H * K + HV * V),
    ...     a=torch.randn(tokens, HV),
    ...     b=torch.randn(tokens, HV),
    ...     A_log=torch.zeros(HV),
    ...     dt_bias=torch.zeros(HV),
    ...     checkpoint_state=torch.zeros(pool, HV, V, K),
    ...     replayssm_cache=rings,
    ...     ring_start=cursors[0],
    ...     num_committed=cursors[1],
    ...     query_start_loc=torch.tensor([0, 2, 3], dtype=torch.int32),
    ...     state_indices=torch.tensor([3, 1], dtype=torch.int32),
    ...     output_indices=torch.tensor([0, 1, 2]),  # lane 3 is the padding of the second row
    ...     num_k_heads=H,
    ...     num_v_heads=HV,
    ...     head_k_dim=K,
    ...     head_v_dim=V,
    ... )
    >>> y.shape
    torch.Size([3, 2, 8])
    """
    fn = "run_gdn_replayssm"
    shape = GDNShape(num_k_heads, num_v_heads, head_k_dim, head_v_dim)
    H, HV, K, V = shape.sizes
    require_int(fn, "executed_width", executed_width, minimum=1)
    if executed_width > GDN_REPLAYSSM_LOGICAL_WINDOW:
        raise ArgumentError(f"{fn}: executed_width: expected 1..{GDN_REPLAYSSM_LOGICAL_WINDOW}, got {executed_width}")
    check_tensor(fn, "mixed_qkv", mixed_qkv, ["N", shape.qkv_dim], FLOAT_DTYPES)
    tokens, device = mixed_qkv.shape[0], mixed_qkv.device
    for name, x in (("a", a), ("b", b)):
        check_tensor(fn, name, x, [tokens, HV], FLOAT_DTYPES, device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(fn, name, x, [HV], FLOAT_DTYPES, device)
    check_tensor(fn, "checkpoint_state", checkpoint_state, ["pool", HV, V, K], FLOAT_DTYPES, device)
    pool = checkpoint_state.shape[0]
    if len(replayssm_cache) != 3:
        raise ShapeError(f"{fn}: replayssm_cache: expected (u, k, g), got {len(replayssm_cache)} tensors")
    u_ring, k_ring, g_ring = replayssm_cache
    for name, x, heads, dim in (("u", u_ring, HV, V), ("k", k_ring, H, K)):
        check_tensor(
            fn, f"replayssm_cache {name}", x, [pool, heads, GDN_REPLAYSSM_RING_SLOTS, dim], FLOAT_DTYPES, device
        )
    check_tensor(fn, "replayssm_cache g", g_ring, [pool, HV, GDN_REPLAYSSM_RING_SLOTS], [torch.float32], device)
    for name, x in (("ring_start", ring_start), ("num_committed", num_committed)):
        check_tensor(fn, name, x, [pool], INT_DTYPES, device)
    check_tensor(fn, "state_indices", state_indices, ["rows"], INT_DTYPES, device)
    rows = state_indices.shape[0]
    check_tensor(fn, "query_start_loc", query_start_loc, [rows + 1], INT_DTYPES, device)
    check_tensor(fn, "output_indices", output_indices, ["M"], INT_DTYPES, device)
    output = mixed_qkv.new_zeros(rows * executed_width, HV, V)
    if rows == 0:
        return output[output_indices]

    if (
        kernel is gated_delta_rule_mtp_ucache_flush
        and ring_start.dtype == num_committed.dtype == torch.int32
        and device.type != "cpu"
        and can_step_for_adapter(mixed_qkv, checkpoint_state, k_ring, GDN_REPLAYSSM_LOGICAL_WINDOW, executed_width)
    ):
        # Our device kernel takes ragged rows and cursors per slot as they are: nothing is packed or looked up.
        padded = output.view(rows, executed_width, HV, V)
        torch.ops.replaystate.adapter_step(
            mixed_qkv, a, b, A_log.detach(), dt_bias.detach(), checkpoint_state, u_ring, k_ring, g_ring, ring_start,
            num_committed, padded, state_indices, query_start_loc, executed_width, GDN_REPLAYSSM_LOGICAL_WINDOW,
            NULL_BLOCK_ID, K**-0.5,
        )  # fmt: skip
        return output[output_indices]

    # Slot 0 and below are padding: -1 for the kernel, an empty window, and a cursor look-up that stays in the tensor.
    live = state_indices > NULL_BLOCK_ID
    slot = torch.where(live, state_indices, NULL_BLOCK_ID).clamp(max=pool - 1).long()
    hist_len = torch.where(live, num_committed[slot], 0).to(torch.int32)
    cache_base = torch.where(live, ring_start[slot], 0).to(torch.int32)
    flush_min = _flush_min(GDN_REPLAYSSM_LOGICAL_WINDOW, executed_width)
    if tokens == 0:
        if device.type == "cpu" and not bool((hist_len >= flush_min).any()):
            return output[output_indices]
        packed, gate, logit = (
            x.new_full((rows, executed_width, x.shape[1]), fill)
            for x, fill in ((mixed_qkv, 0.0), (a, -torch.inf), (b, 0.0))
        )
    else:
        uniform = uniform_query_length == executed_width
        pack = functools.partial(
            pack_replayssm_rows,
            query_start_loc=query_start_loc,
            executed_width=executed_width,
            offsets=offsets,
            uniform=uniform,
        )
        packed = pack(mixed_qkv, allow_strided_rows=True)
        gate, logit = pack(a, padding_value=-torch.inf), pack(b)
    q, k, v = packed.split([H * K, H * K, HV * V], dim=-1)
    kernel(
        A_log=A_log.detach(),
        a=gate,
        dt_bias=dt_bias.detach(),
        q=q.unflatten(-1, (H, K)),
        k=k.unflatten(-1, (H, K)),
        v=v.unflatten(-1, (HV, V)),
        b=logit,
        initial_state_source=checkpoint_state,
        initial_state_indices=torch.where(live, state_indices, -1).to(torch.int32),
        use_qk_l2norm_in_kernel=True,
        scale=K**-0.5,
        output=output.view(rows, executed_width, HV, V),
        k_cache=k_ring,
        u_cache=u_ring,
        g_cache=g_ring,
        hist_len=hist_len,
        cache_base=cache_base,
        flush_min=flush_min,
        restart_hist_on_flush=False,
    )
    return output[output_indices]

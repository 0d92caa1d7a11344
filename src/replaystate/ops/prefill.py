"""The op of the prefill."""

from __future__ import annotations

import torch
from torch import Tensor

from ..checks import FLOAT_DTYPES, INT_DTYPES, check_inference, check_query_start_loc, check_tensor
from ..errors import ShapeError
from ..kernels import Call, select
from .common import on_host


def gated_delta_rule(
    mixed_qkv: Tensor,
    a: Tensor,
    b: Tensor,
    A_log: Tensor,
    dt_bias: Tensor,
    initial_state: Tensor | None,
    query_start_loc: Tensor,
    num_k_heads: int,
    num_v_heads: int,
    head_k_dim: int,
    head_v_dim: int,
    scale: float,
    backend: str,
) -> tuple[Tensor, Tensor]:
    """Check, then prefill. See `replaystate.gated_delta_rule`."""
    fn, device = "gated_delta_rule", mixed_qkv.device
    H, HV, K, V = num_k_heads, num_v_heads, head_k_dim, head_v_dim
    check_tensor(fn, "mixed_qkv", mixed_qkv, ["N", 2 * H * K + HV * V], FLOAT_DTYPES)
    tokens = mixed_qkv.shape[0]
    for name, x in (("a", a), ("b", b)):
        check_tensor(fn, name, x, [tokens, HV], FLOAT_DTYPES, device)
    for name, x in (("A_log", A_log), ("dt_bias", dt_bias)):
        check_tensor(fn, name, x, [HV], FLOAT_DTYPES, device)
    check_inference(fn, {"mixed_qkv": mixed_qkv, "a": a, "b": b})
    check_tensor(fn, "query_start_loc", query_start_loc, ["B + 1"], INT_DTYPES, device)
    rows = query_start_loc.shape[0] - 1
    if rows < 0:
        raise ShapeError(f"{fn}: query_start_loc: expected B + 1 >= 1 bounds, got none")
    if initial_state is not None:
        check_tensor(fn, "initial_state", initial_state, [rows, HV, V, K], (*FLOAT_DTYPES, torch.float64), device)
        check_inference(fn, {"initial_state": initial_state})
    if on_host(mixed_qkv):
        check_query_start_loc(fn, query_start_loc.tolist(), tokens)
    out = mixed_qkv.new_empty(tokens, HV, V)
    final_state = mixed_qkv.new_empty(rows, HV, V, K, dtype=torch.float32)
    call = Call(fn, device.type, mixed_qkv.dtype, None, None, (H, HV, K, V))
    select(backend, call).gated_delta_rule(
        mixed_qkv, a, b, A_log, dt_bias, initial_state, query_start_loc, out, final_state, scale
    )
    return out, final_state

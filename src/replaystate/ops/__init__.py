"""The ops as torch sees them: schemas, fakes, argument checks, and dispatch to a backend.

`torch.ops.replaystate.*` mutate only buffers that their schema marks, allocate nothing but what they return, and can be
traced by torch.compile. The public functions (`functional.py`, `cache.py`, `kernel_api.py`) are thin layers over them.

Static checks always run. Checks that need values (slots, cursors, row bounds) run when those lie in host memory and
raise before anything is changed; on a device the kernel clamps and sets a bit of the status word instead.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .common import check_alive, usable
from .fold import flush, materialize, read_state
from .kernel_level import adapter_step, can_step_for_adapter, prefix_materialize, ucache_flush
from .prefill import gated_delta_rule
from .step import commit, replay_step

__all__ = ["can_step_for_adapter", "check_alive", "usable"]

_library = torch.library.Library("replaystate", "DEF")

_library.define(
    "replay_step(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, "
    "Tensor(b!) u_ring, Tensor(c!) k_ring, Tensor(d!) g_ring, Tensor ring_start, Tensor num_committed, "
    "Tensor(e!) step_records, Tensor(f!) status, Tensor(g!) out, Tensor state_indices, Tensor query_start_loc, "
    "int layer, int executed_width, int window, int null_slot, float scale, str backend) -> ()"
)
_library.define(
    "commit(Tensor state_indices, Tensor num_accepted, Tensor(a!) ring_start, Tensor(b!) num_committed, "
    "Tensor(c!) step_records, Tensor(d!) status, int window, int ring_slots, int null_slot, str backend) -> ()"
)
_library.define(
    "materialize(Tensor(a!)[] states, Tensor[] u_rings, Tensor[] k_rings, Tensor[] g_rings, Tensor src_slots, "
    "Tensor dst_slots, Tensor count, Tensor(b!) ring_start, Tensor(c!) num_committed, Tensor(d!) step_records, "
    "Tensor(e!) status, int window, int null_slot, str backend) -> ()"
)
_library.define(
    "flush(Tensor(a!)[] states, Tensor[] u_rings, Tensor[] k_rings, Tensor[] g_rings, Tensor slots, "
    "Tensor(b!) ring_start, Tensor(c!) num_committed, Tensor step_records, Tensor(d!) status, int window, "
    "int null_slot, str backend) -> ()"
)
_library.define(
    "read_state(Tensor state, Tensor u_ring, Tensor k_ring, Tensor g_ring, Tensor slots, Tensor ring_start, "
    "Tensor num_committed, int window, int null_slot, str backend) -> Tensor"
)
_library.define(
    "gated_delta_rule(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor? initial_state, "
    "Tensor query_start_loc, int num_k_heads, int num_v_heads, int head_k_dim, int head_v_dim, float scale, "
    "str backend) -> (Tensor, Tensor)"
)
_library.define(
    "ucache_flush(Tensor q, Tensor k, Tensor v, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, "
    "Tensor(b!) u_cache, Tensor(c!) k_cache, Tensor(d!) g_cache, Tensor state_indices, Tensor(e!) hist_len, "
    "Tensor(f!) cache_base, Tensor(g!) output, int flush_min, bool restart, float scale, str backend) -> ()"
)
_library.define(
    "prefix_materialize(Tensor(a!) state, Tensor src_slots, Tensor dst_slots, Tensor k_cache, Tensor u_cache, "
    "Tensor g_cache, Tensor cache_base, Tensor count, Tensor? active_request_indices, Tensor? num_active, str backend)"
    " -> ()"
)
_library.define(
    "adapter_step(Tensor mixed_qkv, Tensor a, Tensor b, Tensor A_log, Tensor dt_bias, Tensor(a!) state, "
    "Tensor(b!) u_ring, Tensor(c!) k_ring, Tensor(d!) g_ring, Tensor ring_start, Tensor num_committed, "
    "Tensor(e!) output, Tensor state_indices, Tensor query_start_loc, int executed_width, int window, int null_slot, "
    "float scale) -> ()"
)


# --- registration --------------------------------------------------------------------------------------------------


def _mutates_only(*_: object) -> None:
    """Fake of an op that returns nothing."""


def _read_state_fake(
    state: Tensor, u_ring: Tensor, k_ring: Tensor, g_ring: Tensor, slots: Tensor, *_: object
) -> Tensor:
    return state.new_empty(slots.shape[0], *state.shape[1:], dtype=torch.float32)


def _gated_delta_rule_fake(
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
    rows = query_start_loc.shape[0] - 1
    out = mixed_qkv.new_empty(mixed_qkv.shape[0], num_v_heads, head_v_dim)
    return out, mixed_qkv.new_empty(rows, num_v_heads, head_v_dim, head_k_dim, dtype=torch.float32)


for _name, _impl, _fake in (
    ("replay_step", replay_step, _mutates_only),
    ("commit", commit, _mutates_only),
    ("materialize", materialize, _mutates_only),
    ("flush", flush, _mutates_only),
    ("read_state", read_state, _read_state_fake),
    ("gated_delta_rule", gated_delta_rule, _gated_delta_rule_fake),
    ("ucache_flush", ucache_flush, _mutates_only),
    ("prefix_materialize", prefix_materialize, _mutates_only),
    ("adapter_step", adapter_step, _mutates_only),
):
    _library.impl(_name, _impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"replaystate::{_name}", _fake, lib=_library)

"""A small engine on a `Rig`: steps rows in all layers, commits, and compares with `TokenModel` on the way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from replaystate import GDNShape, gated_delta_rule_mtp_ucache_flush, replay_step
from replaystate.replayssm import run_gdn_replayssm

from .rig import Rig, output_error, state_error
from .token_model import Layer, TokenModel, Tokens, cat, make_layers, make_tokens, stack

TOLERANCE = {torch.float32: 2e-6, torch.float16: 1.5e-3, torch.bfloat16: 1.1e-2}
"""Relative error by the coarsest of state and ring dtype: contract section 9, times 1.5 (float32: see test_rounds)."""


@dataclass
class Step:
    """What a step left for its commit: by slot the tokens of all layers, and the states after each."""

    width: int
    tokens: dict[int, list[Tokens]]
    states: dict[int, list[list[Tensor]]]


class Driver:
    """Steps, commits and checks one cache.

    Args:
        rig: the cache; its slots start with whatever they hold until `begin`.
        backend: of the steps.
        seed: of parameters and tokens.
    """

    def __init__(self, rig: Rig, backend: str = "auto", seed: int = 0, io_dtype: torch.dtype = torch.float32) -> None:
        self.rig, self.cache, self.backend, self.io_dtype = rig, rig.cache, backend, io_dtype
        self.shape: GDNShape = rig.cache.shape
        self.rng = torch.Generator().manual_seed(seed)
        self.layers: list[Layer] = make_layers(self.shape, rig.cache.num_layers, self.rng)
        self.model = TokenModel(self.shape, self.layers, rig.cache.window, rig.cache.ring_slots)
        self.tolerance = max(TOLERANCE[rig.cache.state_dtype], TOLERANCE[rig.cache.ring_dtype])
        self.pending: Step | None = None

    def begin(self, *slots: int, start: int = 0) -> None:
        """Slots from scratch, with the window's origin at `start`, as after many folds."""
        self.cache.reset(slots)
        for slot in slots:
            self.model.new(slot)
            self.model.slots[slot].start = start
            self.cache.ring_start[slot] = start

    def fill(self, slot: int, count: int, start: int = 0) -> None:
        """A slot with some older tokens in its checkpoint and `count` tokens in its window."""
        T = self.cache.max_query_len
        self.begin(slot)
        self.run([(slot, T)], width=T)
        self.cache.flush(slot)
        self.model.flush(slot)
        self.model.slots[slot].start = start
        self.cache.ring_start[slot] = start
        for n in [1] * (count % T) + [T] * (count // T):
            self.run([(slot, n)], width=n)  # just fits, so nothing folds
        assert int(self.cache.num_committed[slot]) == count

    def tokens(self, n: int) -> Tokens:
        return make_tokens(self.shape, n, self.rng, self.io_dtype)

    def call(
        self, layer: int, rows: Sequence[tuple[int, int]], tokens: Tokens, width: int | None, out: Tensor | None = None
    ) -> Tensor:
        """One `replay_step`; rows are (slot, length)."""
        bounds = torch.tensor([0, *(length for _, length in rows)]).cumsum(0).int()
        weights = self.layers[layer]
        return replay_step(
            tokens.mixed_qkv, tokens.a, tokens.b, weights.A_log, weights.dt_bias, self.cache, layer,
            [slot for slot, _ in rows], bounds, executed_width=width, out=out, backend=self.backend,
        )  # fmt: skip

    def kernel(self, layer: int, slots: Sequence[int], tokens: Tokens, width: int, **other: object) -> Tensor:
        """`gated_delta_rule_mtp_ucache_flush` on rows of `width` tokens, with the cache's cursors looked up per row."""
        H, HV, K, V = self.shape.sizes
        rows = len(slots)
        live, at = (
            torch.tensor([slot >= 0 for slot in slots], dtype=torch.bool),
            torch.tensor(slots, dtype=torch.int64).clamp(min=0),
        )
        q, k, v = tokens.mixed_qkv.view(rows, width, self.shape.qkv_dim).split([H * K, H * K, HV * V], dim=-1)
        u_ring, k_ring, g_ring = self.cache.rings(layer)
        given: dict[str, object] = {
            "A_log": self.layers[layer].A_log,
            "a": tokens.a.view(rows, width, HV),
            "dt_bias": self.layers[layer].dt_bias,
            "q": q.unflatten(-1, (H, K)),
            "k": k.unflatten(-1, (H, K)),
            "v": v.unflatten(-1, (HV, V)),
            "b": tokens.b.view(rows, width, HV),
            "initial_state_source": self.cache.checkpoint(layer),
            "initial_state_indices": torch.tensor(slots, dtype=torch.int32),
            "k_cache": k_ring,
            "u_cache": u_ring,
            "g_cache": g_ring,
            "hist_len": torch.where(live, self.cache.num_committed[at], 0).int(),
            "cache_base": torch.where(live, self.cache.ring_start[at], 0).int(),
            "restart_hist_on_flush": False,
            "backend": self.backend,
        }
        return gated_delta_rule_mtp_ucache_flush(**given | other)

    def adapter(
        self, layer: int, rows: Sequence[tuple[int, int]], tokens: Tokens, width: int, **other: object
    ) -> Tensor:
        """`run_gdn_replayssm` with the library's own kernel: the outputs of all tokens of rows (slot, length)."""
        H, HV, K, V = self.shape.sizes
        lanes = [i * width + t for i, (_, length) in enumerate(rows) for t in range(length)]
        given: dict[str, object] = {
            "kernel": gated_delta_rule_mtp_ucache_flush,
            "executed_width": width,
            "mixed_qkv": tokens.mixed_qkv,
            "a": tokens.a,
            "b": tokens.b,
            "A_log": self.layers[layer].A_log,
            "dt_bias": self.layers[layer].dt_bias,
            "checkpoint_state": self.cache.checkpoint(layer),
            "replayssm_cache": self.cache.rings(layer),
            "ring_start": self.cache.ring_start,
            "num_committed": self.cache.num_committed,
            "query_start_loc": torch.tensor([0, *(length for _, length in rows)]).cumsum(0).int(),
            "state_indices": torch.tensor([slot for slot, _ in rows], dtype=torch.int32),
            "output_indices": torch.tensor(lanes, dtype=torch.int64),
            "num_k_heads": H,
            "num_v_heads": HV,
            "head_k_dim": K,
            "head_v_dim": V,
        }
        return run_gdn_replayssm(**given | other)

    def step(self, rows: Sequence[tuple[int, int]], width: int | None = None) -> list[Tensor]:
        """All layers; returns the outputs of each layer. Every row is compared with the model."""
        real = [i for i, (slot, _) in enumerate(rows) if slot in self.model.slots]
        slots = [rows[i][0] for i in real]
        step = Step(width or self.cache.max_query_len, {s: [] for s in slots}, {s: [] for s in slots})
        outputs = []
        for layer in range(self.cache.num_layers):
            parts = [self.tokens(length) for _, length in rows]
            y = self.call(layer, rows, cat([*parts, self.tokens(0)]), width)
            outputs.append(y)
            pieces = y.split([length for _, length in rows]) if rows else ()
            for i, (truth, states) in zip(
                real, self.model.step_rows(slots, layer, [parts[i] for i in real]), strict=True
            ):
                if truth.numel():
                    self.check_output(pieces[i], truth)
                step.tokens[rows[i][0]].append(parts[i])
                step.states[rows[i][0]].append(states)
        self.pending = step
        return outputs

    def commit(self, slots: Sequence[int], accepted: Sequence[int]) -> None:
        """Publish, on both sides, and compare cursors."""
        self.cache.commit(slots, accepted)
        step = self.pending
        assert step is not None
        for slot, n in zip(slots, accepted, strict=True):
            if slot in step.tokens:
                kept = [stack([tokens[t] for tokens in step.tokens[slot]]) for t in range(n)]
                self.model.commit(slot, step.width, kept, step.states[slot])
        self.check(*[slot for slot in slots if slot in step.tokens])

    def run(
        self, rows: Sequence[tuple[int, int]], width: int | None = None, accepted: Sequence[int] | None = None
    ) -> list[Tensor]:
        """Step and commit; None accepts all."""
        outputs = self.step(rows, width)
        self.commit([slot for slot, _ in rows], [n for _, n in rows] if accepted is None else accepted)
        return outputs

    def check_output(self, y: Tensor, truth: Tensor) -> None:
        """The outputs of one row. Twice the state's tolerance: that is for a whole step, one token may do worse."""
        error = output_error(y, truth, self.shape.head_k_dim)
        assert error < 2 * self.tolerance + torch.finfo(self.io_dtype).eps, f"outputs: {error:.3g}"

    def check(self, *slots: int) -> None:
        """Cursors and states of the slots (all when none is named) are the model's."""
        for slot in slots or self.model.slots:
            s = self.model.slots[slot]
            found = (int(self.cache.ring_start[slot]), int(self.cache.num_committed[slot]))
            assert found == (s.start, s.window), f"slot {slot}: cursors {found}, expected {(s.start, s.window)}"
            for layer in range(self.cache.num_layers):
                truth = self.model.state(slot, layer)
                state = self.cache.state(layer, slot)[0]
                error = state_error(state, truth)
                assert error < self.tolerance, f"slot {slot}, layer {layer}: {error:.3g}"

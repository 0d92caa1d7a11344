"""The recurrent states of one cache: all its Gated DeltaNet layers, in one `ReplayCache` per device.

transformers calls layer after layer and never says "that was the forward". Here the calls become the protocol of
a `ReplayCache`: the first Gated DeltaNet layer of a forward plans it, the last one commits it, and `crop` takes
committed tokens back. Batch row i is slot i. All rows run the same number of tokens (padding is zeroed, not
skipped), so one window length on the host mirrors the cursors of all slots, and nothing here waits for a device.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from .. import GDNShape, ReplayCache, gated_delta_rule, replay_step
from ..errors import ArgumentError, ProtocolError, ShapeError
from ..shapes import flush_min
from .stats import ReplayStats

DRAFT_TAIL = 2
"""Tokens of a forward that an assistant's cache keeps in its window.

An assistant is called with the token that the target chose and perhaps the one before it, then decodes n - 1
single tokens, and is cropped by at most n: so 2 + n - 1 window rows suffice, and a longer prompt must not fill
the window first.
"""

_UNDER_WAY = -1


@dataclass(frozen=True)
class Settings:
    """How caches of an enabled model keep their states.

    Args:
        window: W, tokens a window holds; a power of two.
        max_query_len: T, tokens a forward may take back; at most window.
        state_dtype: dtype of the checkpoints.
        ring_dtype: dtype of the k and u rings.
    """

    window: int
    max_query_len: int
    state_dtype: torch.dtype
    ring_dtype: torch.dtype


@dataclass(frozen=True)
class _Plan:
    """One forward: `head` tokens of each row go through the prefill rule, the `tail` after them through a step."""

    head: int
    tail: int


@dataclass
class _Pool:
    """The layers of one device."""

    cache: ReplayCache
    slots: Tensor
    """[B] int32, 0..B-1."""
    bounds: dict[int, Tensor]
    """query_start_loc of B rows of n tokens, by n."""
    counts: dict[int, Tensor]
    """[B] int32, n everywhere, by n."""


class GDNStates:
    """All Gated DeltaNet states of one cache, with the cursors mirrored on the host.

    Args:
        shape: head counts and dims, the same for every layer.
        devices: device of each Gated DeltaNet layer by layer index, in the order of a forward.
        settings: window, width and dtypes.
        stats: counters of the model that made the cache.

    Memory: per batch row and layer `HV V K` checkpoint elements, `R (H K + HV V)` ring elements and `R HV` of
    float32, with R = 32 ring slots for a window of 16. Allocated at the first forward, when the batch is known.
    """

    def __init__(
        self, shape: GDNShape, devices: dict[int, torch.device], settings: Settings, stats: ReplayStats
    ) -> None:
        self.shape = shape
        self.devices = devices
        self.settings = settings
        self.stats = stats
        self.draft = False
        self._recording = False
        self.batch = 0
        self.window_len = 0
        self.tokens = 0
        self._fresh = True
        self._next = 0
        self._plan = _Plan(0, 0)
        self._order = {layer: ordinal for ordinal, layer in enumerate(devices)}
        self._local: dict[int, int] = {}
        self._pools: dict[torch.device, _Pool] = {}

    # --- a forward -------------------------------------------------------------------------------------------------

    def enter(self, layer: int, B: int, T: int, stats: ReplayStats) -> None:
        """Announce one layer's turn with T new tokens in each of B rows; the first layer's turn plans the forward.

        Raises:
            ProtocolError: a layer out of turn, i.e. the forward before this one did not finish.
            ShapeError: another batch size than that of the tokens held.
        """
        ordinal = self._order[layer]
        if ordinal != self._next:
            raise ProtocolError(
                f"replay: layer {layer} is not the one due: the forward before this one did not finish, and the cache "
                "holds half of it. Call cache.reset(), or use a new cache"
            )
        if ordinal == 0:
            self._begin(B, T, stats)
        self._next = _UNDER_WAY  # an error from here on leaves the cache unusable, not wrong

    def run(self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        """Run the announced layer over the T new tokens of every batch row; the last layer commits the forward.

        | tensor | shape | meaning |
        |---|---|---|
        | mixed_qkv | [B, T, 2 H K + HV V] | q heads, k heads, v heads after the convolution |
        | a, b | [B, T, HV] | raw gate input and raw beta logit |
        | A_log, dt_bias | [HV] | layer parameters |
        | returns | [B, T, HV, V] | outputs |
        """
        out = self._run_layer(layer, mixed_qkv, a, b, A_log, dt_bias)
        self._next = self._order[layer] + 1
        if self._next == len(self._order):
            self._commit()
        return out

    def _begin(self, B: int, T: int, stats: ReplayStats) -> None:
        if B != self.batch:
            if not self._fresh:
                raise ShapeError(
                    f"replay: batch: the cache holds {self.batch} rows, the forward has {B}; use a new cache"
                )
            self._allocate(B)
        self.stats = stats
        limit = min(DRAFT_TAIL, self.settings.max_query_len) if self.draft else self.settings.max_query_len
        # Without past recording nobody may crop, and a long forward goes through the prefill rule as a whole.
        tail = T if T <= limit else (limit if self.recording else 0)
        self._plan = _Plan(T - tail, tail)
        if self._plan.head and self.window_len:
            self.flush()
        stats.model_calls += 1
        stats.tokens += B * T
        stats.prefill_tokens += B * self._plan.head
        stats.step_tokens += B * tail
        checkpoints, row = self._layer_bytes()
        if self._plan.head:
            stats.state_bytes_read += 0 if self._fresh else checkpoints
            stats.state_bytes_written += checkpoints
        if tail:
            folds = self.window_len >= flush_min(self.settings.window, tail)
            stats.folds += B * folds
            stats.state_bytes_read += checkpoints + self.window_len * row
            stats.state_bytes_written += tail * row + checkpoints * folds
            if folds:
                self.window_len = 0

    def _run_layer(self, layer: int, mixed_qkv: Tensor, a: Tensor, b: Tensor, A_log: Tensor, dt_bias: Tensor) -> Tensor:
        B, T, width = mixed_qkv.shape
        pool, local = self._pools[self.devices[layer]], self._local[layer]
        HV, V = self.shape.num_v_heads, self.shape.head_v_dim
        head, tail = self._plan.head, self._plan.tail
        outs: list[Tensor] = []
        if head:
            initial = None if self._fresh else pool.cache.state(local, pool.slots)
            y, final = gated_delta_rule(
                mixed_qkv[:, :head].reshape(B * head, width),
                a[:, :head].reshape(B * head, HV),
                b[:, :head].reshape(B * head, HV),
                A_log,
                dt_bias,
                self.shape,
                self._bounds(pool, head),
                initial_state=initial,
            )
            pool.cache.load_state(local, pool.slots, final)
            outs.append(y.view(B, head, HV, V))
        if tail:
            y = replay_step(
                mixed_qkv[:, head:].reshape(B * tail, width),
                a[:, head:].reshape(B * tail, HV),
                b[:, head:].reshape(B * tail, HV),
                A_log,
                dt_bias,
                pool.cache,
                local,
                pool.slots,
                self._bounds(pool, tail),
                executed_width=tail,
            )
            outs.append(y.view(B, tail, HV, V))
        return outs[0] if len(outs) == 1 else torch.cat(outs, dim=1)

    def _commit(self) -> None:
        tail = self._plan.tail
        if tail:
            for pool in self._pools.values():
                pool.cache.commit(pool.slots, self._counts(pool, tail))
            self.window_len += tail
        self.tokens += self._plan.head + tail
        self._fresh = False
        self._next = 0

    # --- life cycle ------------------------------------------------------------------------------------------------

    @property
    def recording(self) -> bool:
        """Whether forwards keep what a crop needs. Tokens from before it was switched on cannot be cropped."""
        return self._recording

    @recording.setter
    def recording(self, value: bool) -> None:
        if value and not self._recording:
            self.flush()
        self._recording = value

    def is_first(self, layer: int) -> bool:
        """Whether a forward begins with this Gated DeltaNet layer."""
        return self._order[layer] == 0

    def check_idle(self, fn: str) -> None:
        """Refuse to touch states of a forward that did not finish.

        Raises:
            ProtocolError: a forward is under way or broke off.
        """
        if self._next:
            raise ProtocolError(f"{fn}: the last forward did not finish; only reset() can bring this cache back")

    def check_crop(self, num_tokens: int) -> None:
        """Refuse a crop that the windows cannot take back, before anything is changed.

        Raises:
            ProtocolError: the past is not recorded, or a forward did not finish.
            ArgumentError: more tokens than the window holds.
        """
        self.check_idle("crop")
        if not self.recording:
            raise ProtocolError(
                "crop: the cache does not record its past: call activate_past_recording() before the forward"
            )
        if num_tokens > self.window_len:
            raise ArgumentError(
                f"crop: tokens_to_remove: expected at most {self.window_len} tokens, the window since the last fold, "
                f"got {num_tokens}. The last forward can be taken back up to its last {self.settings.max_query_len} "
                f"tokens; for the last {self.settings.window} single tokens, call flush() before them"
            )

    def crop(self, num_tokens: int) -> None:
        """Forget the last num_tokens tokens of every row; an assistant's windows are folded after it."""
        self.check_crop(num_tokens)
        if num_tokens:
            for pool in self._pools.values():
                pool.cache.crop(pool.slots, num_tokens)
            self.window_len -= num_tokens
            self.tokens -= num_tokens
            self.stats.cropped_tokens += self.batch * num_tokens
        if self.draft:
            self.flush()

    def flush(self) -> None:
        """Fold every window into its checkpoint, so that the next `window` tokens can be taken back."""
        self.check_idle("flush")
        if self.window_len:
            for pool in self._pools.values():
                pool.cache.flush(pool.slots)
            checkpoints, row = self._layer_bytes()
            self.stats.folds += self.batch
            self.stats.state_bytes_read += checkpoints + self.window_len * row
            self.stats.state_bytes_written += checkpoints
            self.window_len = 0

    def reset(self) -> None:
        """Forget everything; buffers are kept for the next use."""
        for pool in self._pools.values():
            pool.cache.reset(pool.slots)
        self.window_len = 0
        self.tokens = 0
        self._next = 0
        self._fresh = True

    def reorder(self, rows: Tensor) -> None:
        """Row i continues from what row rows[i] held (beam search; repeats are allowed)."""
        self.check_idle("reorder_cache")
        for pool in self._pools.values():
            pool.cache.fork(rows.to(pool.slots.device), pool.slots)

    def state(self, layer: int) -> Tensor:
        """Current state of one layer, [B, HV, V, K] fp32.

        Raises:
            ProtocolError: before the first forward, or a forward did not finish.
        """
        self.check_idle("state")
        if not self.batch:
            raise ProtocolError("state: no forward has run with this cache yet")
        pool = self._pools[self.devices[layer]]
        state: Tensor = pool.cache.state(self._local[layer], pool.slots)
        return state

    @property
    def nbytes(self) -> int:
        """Bytes of all checkpoints, rings and cursors; 0 before the first forward."""
        return sum(pool.cache.nbytes for pool in self._pools.values())

    # --- buffers ---------------------------------------------------------------------------------------------------

    def _allocate(self, B: int) -> None:
        groups: dict[torch.device, list[int]] = {}
        for layer, device in self.devices.items():
            groups.setdefault(device, []).append(layer)
        self._pools, self._local = {}, {}
        # Buffers made under inference_mode could not be written outside it, and a cache outlives that block.
        with torch.inference_mode(False):
            for device, layers in groups.items():
                cache = ReplayCache(
                    self.shape,
                    len(layers),
                    B,
                    window=self.settings.window,
                    max_query_len=self.settings.max_query_len,
                    state_dtype=self.settings.state_dtype,
                    ring_dtype=self.settings.ring_dtype,
                    device=device,
                    null_slot=None,
                )
                slots = torch.arange(B, dtype=torch.int32, device=device)
                self._pools[device] = _Pool(cache, slots, {}, {})
                self._local.update({layer: local for local, layer in enumerate(layers)})
        self.batch = B

    def _bounds(self, pool: _Pool, n: int) -> Tensor:
        if n not in pool.bounds:
            with torch.inference_mode(False):
                bounds = torch.arange(self.batch + 1, dtype=torch.int32, device=pool.slots.device) * n
            if n > self.settings.max_query_len:  # a prompt length seldom comes twice
                return bounds
            pool.bounds[n] = bounds
        return pool.bounds[n]

    def _counts(self, pool: _Pool, n: int) -> Tensor:
        if n not in pool.counts:
            with torch.inference_mode(False):
                pool.counts[n] = torch.full((self.batch,), n, dtype=torch.int32, device=pool.slots.device)
        return pool.counts[n]

    def _layer_bytes(self) -> tuple[int, int]:
        """(bytes of all checkpoints, bytes of one ring row of all slots), over layers."""
        H, HV, K, V = self.shape.sizes
        rows = self.batch * len(self.devices)
        ring = (H * K + HV * V) * self.settings.ring_dtype.itemsize + HV * 4
        return rows * HV * V * K * self.settings.state_dtype.itemsize, rows * ring

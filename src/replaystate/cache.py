"""ReplayCache: checkpoints, rings and cursors of all GDN layers, and every way in which they may change."""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from .audit import Audit
from .checks import FLOAT_DTYPES, Indices, as_index_tensor, check_slots, check_tensor, dtype_name, flag, saturate
from .errors import (
    ArgumentError,
    CapacityError,
    DTypeError,
    ProtocolError,
    ShapeError,
    SlotError,
    SlotStatus,
    SlotStatusError,
    explain_status,
)
from .export import pack_slot, unpack_slot
from .kernels import Call, fused, select
from .ops import check_alive, usable  # importing ops registers torch.ops.replaystate
from .pool import Pool, default_ring_dtype, wrap_pool, zero_pool
from .shapes import GDNShape, check_window, require_int

__all__ = ["ReplayCache", "from_k_major", "to_k_major"]


def to_k_major(state: Tensor) -> Tensor:
    """[..., V, K] -> [..., K, V], contiguous: for engines that keep the state K-major (transformers, vLLM on CPU).

    >>> to_k_major(torch.zeros(4, 32, 64)).shape
    torch.Size([4, 64, 32])
    """
    return state.transpose(-1, -2).contiguous()


def from_k_major(state: Tensor) -> Tensor:
    """[..., K, V] -> [..., V, K], contiguous.

    >>> from_k_major(torch.zeros(4, 64, 32)).shape
    torch.Size([4, 32, 64])
    """
    return state.transpose(-1, -2).contiguous()


class ReplayCache:
    """Decode state of all GDN layers of a model for a pool of slots (one slot a request).

    A slot holds, for every layer, a checkpoint S_0 and a ring of the inputs since; one pair of cursors for all
    layers says which ring rows count::

        S_P = e^{G_P} S_0 + sum_{j < P} e^{G_P - G_j} u_j k^_j^T        P = num_committed, row j at (ring_start + j)
        mod R

    A model step calls `replay_step` once per layer and then `commit` once. Rejected drafts cost nothing: the cursor
    does not pass them. Negative slots and `null_slot` are padding in every method that takes several slots: nothing
    is read or written for them, and what is returned for them is zero.

    | attribute | shape | dtype | meaning |
    |---|---|---|---|
    | ring_start | [num_slots] | int32 | window origin, 0..R-1 |
    | num_committed | [num_slots] | int32 | window length P, 0..W |
    | status | [num_slots] | int32 | bits of `SlotStatus`, set by kernels |
    | checkpoint(layer) | [num_slots, HV, V, K] | state_dtype | S_0 |
    | rings(layer)[0] | [num_slots, HV, R, V] | ring_dtype | corrections u |
    | rings(layer)[1] | [num_slots, H, R, K] | ring_dtype | normalised keys |
    | rings(layer)[2] | [num_slots, HV, R] | float32 | log-decay of each token |

    Args:
        shape: head counts and dims.
        num_layers: GDN layers that share the cursors.
        num_slots: slots in the pool, the null slot counted in.
        window: W, a power of two: rows that a window may hold before it must be folded.
        max_query_len: T, the widest step, at most W.
        state_dtype: of the checkpoints: float32, float16 or bfloat16.
        ring_dtype: of the k and u rings. None: float32 beside a float32 state, else float16.
        device: where everything lies.
        null_slot: a slot that is padding and never allocated, or None.
        debug: keep a shadow float32 recurrence beside the rings (`replaystate.audit`) and compare after every change.

    Raises:
        ArgumentError: sizes that do not fit each other; the message names the numbers.
        DTypeError: a dtype outside those above.

    Notes:
        Values on the host (ints, sequences, CPU tensors) are checked and refused with typed errors before anything
        changes. Values on a device are clamped by the kernel, which sets a status bit; `check` raises it later.
        Methods that need values on the host (`allocate`, `free`, `export`, `load`, `check`, `debug=True`) refuse to run
        while a CUDA graph is captured.

    Source: contract sections 1, 3, 4 and 7.

    >>> cache = ReplayCache(GDNShape(2, 4, 64, 64), num_layers=3, num_slots=8)
    >>> slot = cache.allocate()
    >>> slot, cache.num_free, cache.ring_slots
    (1, 6, 32)
    """

    def __init__(
        self,
        shape: GDNShape,
        num_layers: int,
        num_slots: int,
        *,
        window: int = 16,
        max_query_len: int = 8,
        state_dtype: torch.dtype = torch.float16,
        ring_dtype: torch.dtype | None = None,
        device: torch.device | str = "cpu",
        null_slot: int | None = 0,
        debug: bool = False,
    ) -> None:
        fn = "ReplayCache"
        _check_shape(fn, shape)
        require_int(fn, "num_layers", num_layers, minimum=1)
        require_int(fn, "num_slots", num_slots, minimum=1)
        ring_slots = check_window(fn, window, max_query_len)
        ring_dtype = default_ring_dtype(state_dtype) if ring_dtype is None else ring_dtype
        _check_null_slot(fn, null_slot, num_slots)
        pool = zero_pool(shape, num_layers, num_slots, ring_slots, state_dtype, ring_dtype, device)
        self._set_up(shape, pool, window, max_query_len, null_slot, debug)

    @classmethod
    def from_tensors(
        cls,
        shape: GDNShape,
        checkpoints: Sequence[Tensor],
        rings: Sequence[tuple[Tensor, Tensor, Tensor]],
        ring_start: Tensor,
        num_committed: Tensor,
        *,
        window: int,
        max_query_len: int,
        null_slot: int | None,
        debug: bool = False,
    ) -> ReplayCache:
        """Wrap tensors that an engine owns; nothing is copied or written.

        | tensor | shape | dtype | meaning |
        |---|---|---|---|
        | checkpoints[layer] | [num_slots, HV, V, K] | fp32, fp16, bf16 | dim 0 may be strided, the rest dense |
        | rings[layer] | (u, k, g): [num_slots, HV, R, V], [.., H, R, K], [.., HV, R] | u, k alike, g fp32 | likewise |
        | ring_start, num_committed | [num_slots] | int32 | cursors, owned by the engine, updated by `commit` |

        Raises:
            ArgumentError, ShapeError, DTypeError: tensors that do not fit shape, window or each other.
        """
        fn = "ReplayCache.from_tensors"
        _check_shape(fn, shape)
        pool = wrap_pool(shape, checkpoints, rings, ring_start, num_committed, window, max_query_len)
        _check_null_slot(fn, null_slot, len(ring_start))
        cache = cls.__new__(cls)
        cache._set_up(shape, pool, window, max_query_len, null_slot, debug)
        return cache

    def _set_up(
        self, shape: GDNShape, pool: Pool, window: int, max_query_len: int, null_slot: int | None, debug: bool
    ) -> None:
        self.shape, self.window, self.max_query_len, self.null_slot = shape, window, max_query_len, null_slot
        self._states, self._u_rings, self._k_rings, self._g_rings, self.ring_start, self.num_committed = pool
        self.num_layers, self.num_slots = len(self._states), self.ring_start.shape[0]
        self.ring_slots: int = self._k_rings[0].shape[2]
        self.state_dtype, self.ring_dtype = self._states[0].dtype, self._k_rings[0].dtype
        self.device = self._states[0].device
        self.status = torch.zeros_like(self.ring_start)
        # What each layer's last step leaves for its commit (shapes.step_record), 0 when nothing is pending.
        self._step_records = torch.zeros(self.num_slots, self.num_layers, dtype=torch.int32, device=self.device)
        self._null = -1 if null_slot is None else null_slot
        self._free = [slot for slot in range(self.num_slots) if slot != null_slot]
        self._is_free = [slot != null_slot for slot in range(self.num_slots)]
        self.audit = Audit(self) if debug else None
        # A device backend's own slot upkeep, which never waits for the host.
        self._upkeep: Any = None
        if self.device.type != "cpu":
            call = Call("slot_upkeep", self.device.type, None, self.state_dtype, self.ring_dtype, shape.sizes)
            self._upkeep = fused(select("auto", call), "upkeep")

    def __repr__(self) -> str:
        return (
            f"ReplayCache({self.shape}, num_layers={self.num_layers}, num_slots={self.num_slots}, "
            f"window={self.window}, max_query_len={self.max_query_len}, state_dtype={dtype_name(self.state_dtype)}, "
            f"ring_dtype={dtype_name(self.ring_dtype)}, device={str(self.device)!r}, null_slot={self.null_slot}, "
            f"nbytes={self.nbytes})"
        )

    # --- sizes and views -------------------------------------------------------------------------------------------

    @property
    def nbytes(self) -> int:
        """Bytes of checkpoints, rings, cursors, status and step records; gaps between strided slots are not counted."""
        tensors = (*self._states, *self._u_rings, *self._k_rings, *self._g_rings)
        words = (self.ring_start, self.num_committed, self.status, self._step_records)
        return sum(x.numel() * x.element_size() for x in (*tensors, *words))

    @property
    def num_free(self) -> int:
        """Slots that `allocate` can still give."""
        return len(self._free)

    def checkpoint(self, layer: int) -> Tensor:
        """The checkpoints S_0 of a layer, [num_slots, HV, V, K]: the cache's own tensor, not a copy."""
        return self._states[self._layer("checkpoint", layer)]

    def rings(self, layer: int) -> tuple[Tensor, Tensor, Tensor]:
        """The (u, k, g) rings of a layer: the cache's own tensors, not copies."""
        layer = self._layer("rings", layer)
        return self._u_rings[layer], self._k_rings[layer], self._g_rings[layer]

    def warmup(
        self, io_dtypes: Sequence[torch.dtype] = (torch.bfloat16,), *, executed_widths: Sequence[int] = ()
    ) -> int:
        """Compile every kernel that calls on this cache may need, so that none compiles later or under graph capture.

        No byte of any pool changes. On the CPU there is nothing to do.

        Args:
            io_dtypes: dtypes of mixed_qkv that steps will have.
            executed_widths: launch widths that steps will have; none given: all of 1..max_query_len.

        Returns:
            How many kernels were compiled now (0 when all were on disk or loaded).

        Raises:
            DTypeError: an io dtype outside float32, float16 and bfloat16.
            ArgumentError: an executed width outside 1..max_query_len.
        """
        for dtype in io_dtypes:
            if dtype not in FLOAT_DTYPES:
                raise DTypeError(f"warmup: io_dtypes: expected float32, float16 or bfloat16, got {dtype}")
        widths = tuple(executed_widths) or tuple(range(1, self.max_query_len + 1))
        for width in widths:
            require_int("warmup", "executed_widths", width, minimum=1)
            if width > self.max_query_len:
                raise ArgumentError(f"warmup: executed_widths: expected 1..{self.max_query_len}, got {width}")
        if self.device.type == "cpu":
            return 0
        call = Call("warmup", self.device.type, None, self.state_dtype, self.ring_dtype, self.shape.sizes, self.window)
        whole = fused(select("auto", call), "warmup")
        if whole is None:
            return 0
        compiled: int = whole(
            self.shape.sizes,
            self.window,
            widths,
            self.state_dtype,
            self.ring_dtype,
            tuple(io_dtypes),
            self.device.index,
        )
        return compiled

    # --- slots -----------------------------------------------------------------------------------------------------

    def allocate(self) -> int:
        """Take the lowest free slot, with zero checkpoints and cursors. For engines without block ids of their own.

        Raises:
            CapacityError: no slot is free.
        """
        self._need_host("allocate")
        if not self._free:
            raise CapacityError(
                f"allocate: all {self.num_slots} slots are taken (null_slot={self.null_slot} is never given)"
            )
        slot = heapq.heappop(self._free)
        self._is_free[slot] = False
        self.reset(slot)
        return slot

    def free(self, slot: int) -> None:
        """Give an allocated slot back.

        Raises:
            SlotError: the slot was not allocated.
        """
        self._need_host("free")
        slot = self._one_slot("free", slot)
        if self._is_free[slot]:
            raise SlotError(f"free: slot {slot} is not allocated")
        self._is_free[slot] = True
        heapq.heappush(self._free, slot)

    def reset(self, slots: Indices) -> None:
        """Start the slots from scratch: checkpoint zero in all layers, cursors 0, status 0, no step pending.

        Ring rows are left as they are; nothing outside a window is ever read. Writes HV V K elements a slot and layer.
        No host sync on the `cuda` backend.
        """
        where = self._slots("reset", "slots", slots, distinct=False)
        if self._upkeep is not None:
            self._upkeep.reset(self, where)
            if self.audit is not None:
                self.audit.forget(where[self._real(where)].tolist())
            return
        where = where[self._real(where)]
        for state in self._states:
            state[where] = 0
        for word in (self.ring_start, self.num_committed, self.status, self._step_records):
            word[where] = 0
        if self.audit is not None:
            self.audit.forget(where.tolist())

    def invalidate(self, slots: Indices) -> None:
        """Mark slots dead, e.g. when weights changed under live windows. Folds nothing; `reset` or `load` revives.

        Writes one word of `status` a slot. No host sync on the `cuda` backend.
        """
        where = self._slots("invalidate", "slots", slots, distinct=False)
        if self._upkeep is not None:
            self._upkeep.invalidate(self, where)
        else:
            where = where[self._real(where)]
            self.status[where] = self.status[where] | int(SlotStatus.DEAD)
        if self.audit is not None:
            self.audit.forget(where[self._real(where)].tolist())

    def check(self, slots: Indices | None = None) -> None:
        """Raise when a status bit is set in one of the slots (all when None). Syncs with the device.

        Raises:
            SlotStatusError: naming each slot and cause.
        """
        self._need_host("check")
        where = (
            torch.arange(self.num_slots, device="cpu")
            if slots is None
            else self._slots("check", "slots", slots, distinct=False).cpu()
        )
        words = self.status.cpu()
        found = [
            f"slot {slot}: {explain_status(int(words[slot]))}"
            for slot in where.tolist()
            if 0 <= slot < self.num_slots and int(words[slot])
        ]
        if found:
            raise SlotStatusError(f"check: {'; '.join(found)}")

    # --- states ----------------------------------------------------------------------------------------------------

    def state(self, layer: int, slots: Indices) -> Tensor:
        """The current states of a layer, float32 [n, HV, V, K]; a fresh tensor.

        S_P = e^{G_P} S_0 + sum_{j < P} e^{G_P - G_j} u_j k^_j^T, in float32, not rounded to the state dtype.

        Raises:
            ProtocolError, DeadSlotError: (host values) a step of this layer is pending, or the slot is dead.

        Notes:
            Reads a checkpoint and P ring rows a slot; changes nothing. No host sync on the `cuda` backend.
        """
        layer = self._layer("state", layer)
        where = self._slots("state", "slots", slots, distinct=False)
        self._require_alive("state", where, layer)
        u, k, g = self.rings(layer)
        result: Tensor = torch.ops.replaystate.read_state(
            self._states[layer], u, k, g, where, self.ring_start, self.num_committed, self.window, self._null, "auto"
        )
        return result

    def load_state(self, layer: int, slots: Indices, state: Tensor) -> None:
        """Write the checkpoint of a layer after a prefill. The window must be empty: `flush` a live one first.

        Args:
            layer: the layer.
            slots: n distinct slots.
            state: [n, HV, V, K], any float dtype; values outside the state dtype's range are saturated and flagged.

        Raises:
            ProtocolError: (host values) a window is not empty, or a step of this layer is pending.
            DeadSlotError: (host values) a dead slot.
            ShapeError, DTypeError: a state that does not fit.

        Notes:
            One write of HV V K elements a slot. No host sync on the `cuda` backend, where a live window is left alone
            and flagged instead.
        """
        fn = "load_state"
        layer = self._layer(fn, layer)
        where = self._slots(fn, "slots", slots)
        _, HV, K, V = self.shape.sizes
        check_tensor(fn, "state", state, [where.shape[0], HV, V, K], (*FLOAT_DTYPES, torch.float64), self.device)
        self._require_alive(fn, where, layer)
        if self._upkeep is not None:
            self._upkeep.load_state(self, layer, where, state)
            if self.audit is not None:
                self.audit.forget(where[self._real(where)].tolist(), layer)
            return
        keep = self._real(where)
        where, state = where[keep], state.detach()[keep]
        if self._on_host():
            for slot, live in zip(where.tolist(), self.num_committed[where].tolist(), strict=True):
                if live:
                    raise ProtocolError(
                        f"{fn}: slot {slot} has a live window of {live} tokens: flush or reset it first"
                    )
        empty = self.num_committed[where] == 0
        flag(self.status, where, ~empty, SlotStatus.WINDOW_NOT_EMPTY)
        keep = empty & usable(where, self._step_records[:, layer : layer + 1], self.status)
        where, (stored, saturated) = where[keep], saturate(state[keep], self.state_dtype)
        self._states[layer][where] = stored
        flag(self.status, where, saturated, SlotStatus.STATE_SATURATED)
        if self.audit is not None:
            self.audit.forget(where.tolist(), layer)

    def flush(self, slots: Indices) -> None:
        """Fold the whole window of the slots now, in all layers.

        S_0 <- e^{G_P} S_0 + sum_{j < P} e^{G_P - G_j} u_j k^_j^T, then ring_start += P (mod R), P = 0.

        Raises:
            ProtocolError, DeadSlotError: (host values) a step is pending, or the slot is dead.

        Notes:
            One read and one write of HV V K elements a slot and layer, plus P ring rows; slots without a window cost
            nothing. Writes checkpoints, cursors and status. No host sync on the `cuda` backend.

        Source: contract section 3.
        """
        where = self._slots("flush", "slots", slots)
        if self.audit is not None:
            self._require_alive("flush", where)
            self.audit.watch(where[self._real(where)].tolist())
        torch.ops.replaystate.flush(
            self._states, self._u_rings, self._k_rings, self._g_rings, where, self.ring_start, self.num_committed,
            self._step_records, self.status, self.window, self._null, "auto",
        )  # fmt: skip
        if self.audit is not None:
            self.audit.flush(where[self._real(where)].tolist())

    # --- the step's other half -------------------------------------------------------------------------------------

    def commit(self, state_indices: Indices, num_accepted: Indices) -> None:
        """Publish the cursors of a model step, once, after every layer ran.

        Rows that folded (P >= W + 1 - executed_width): ring_start += P (mod R), num_committed = accepted. Other rows:
        num_committed = P + accepted. The width is the one that the step recorded. Rows may come in another order.

        | argument | shape | meaning |
        |---|---|---|
        | state_indices | [B] | slots; negative and null ones are ignored |
        | num_accepted | [B] or one int for all | leading rows kept, 0..row length; with 0 a fold stays a fold |

        Raises:
            ProtocolError: (host values) no step to commit, a layer without a step, or accepted outside 0..row length.
            SlotError: (host values) a slot past the pool or named twice.
            DeadSlotError: (host values) a dead slot.

        Notes:
            One small launch. Mutates ring_start, num_committed, and clears the record. Capture-safe on a device,
            where a bad commit sets a status bit instead of raising.
        """
        fn = "commit"
        where = as_index_tensor(fn, "state_indices", state_indices, self.device)
        accepted = as_index_tensor(fn, "num_accepted", num_accepted, self.device)
        if isinstance(num_accepted, int):
            accepted = accepted.expand(where.shape[0])
        torch.ops.replaystate.commit(
            where, accepted, self.ring_start, self.num_committed, self._step_records, self.status, self.window,
            self.ring_slots, self._null, "auto",
        )  # fmt: skip
        if self.audit is not None:
            real = self._real(where)
            self.audit.commit(where[real].tolist(), accepted[real].tolist())

    def crop(self, slots: Indices, num_tokens: Indices) -> None:
        """Forget the last committed tokens of the slots. Touches num_committed only.

        Args:
            slots: distinct slots.
            num_tokens: how many, >= 0 and at most what the window holds; one int for all slots, or one each.

        Raises:
            ArgumentError: (host values) a negative count, or more than the window holds.
            ProtocolError, DeadSlotError: (host values) a step is pending, or the slot is dead.

        Notes:
            Costs one word a slot: no state moves. No host sync on the `cuda` backend, where a count outside the window
            is clamped and flagged instead.
        """
        fn = "crop"
        where = self._slots(fn, "slots", slots)
        counts = as_index_tensor(fn, "num_tokens", num_tokens, self.device).long()
        if isinstance(num_tokens, int):
            counts = counts.expand(where.shape[0])
        if counts.shape != where.shape:
            raise ShapeError(f"{fn}: num_tokens: expected {where.shape[0]} counts or one int, got {counts.shape[0]}")
        self._require_alive(fn, where)
        if self._upkeep is not None:
            self._upkeep.crop(self, where, counts)
            if self.audit is not None:
                real = self._real(where)
                self.audit.crop(where[real].tolist(), counts[real].tolist())
            return
        keep = self._real(where)
        where, counts = where[keep], counts[keep]
        if self._on_host():
            lengths = self.num_committed[where].tolist()
            for slot, count, live in zip(where.tolist(), counts.tolist(), lengths, strict=True):
                if not 0 <= count <= live:
                    raise ArgumentError(f"{fn}: num_tokens: slot {slot}: expected 0..{live} (its window), got {count}")
        if self.audit is not None:
            self.audit.watch(where.tolist())
        alive = usable(where, self._step_records, self.status)
        where, counts = where[alive], counts[alive]
        held = self.num_committed[where].long()
        bad = (counts < 0) | (counts > held)
        flag(self.status, where, bad, SlotStatus.BAD_COUNT)
        counts = torch.minimum(counts.clamp(min=0), held)
        self.num_committed[where] = (held - counts).to(torch.int32)
        if self.audit is not None:
            self.audit.crop(where.tolist(), counts.tolist())

    # --- slot to slot ----------------------------------------------------------------------------------------------

    def materialize(self, src_slots: Indices, dst_slots: Indices, count: Indices) -> None:
        """Write into slot dst, in all layers, the exact state after the first `count` window tokens of slot src.

        S_C = e^{G_C} S_0 + sum_{j < C} e^{G_C - G_j} u_j k^_j^T; the destination's cursors become 0, the source stays.
        This is how a prefix cache gets the state at a block boundary that lies inside the window.

        Args:
            src_slots: n slots to read.
            dst_slots: n slots to write; one may be its own src, with the whole window only.
            count: C, 0..num_committed of src; 0 copies the checkpoint bit for bit. One int for all rows, or one each.

        Raises:
            ArgumentError: (host values) count outside the window, or part of it with src == dst.
            SlotError: (host values) a dst named twice, or a dst that another row reads.
            ProtocolError, DeadSlotError: (host values) a step of src is pending, or src is dead.

        Notes:
            One read and one write of HV V K elements a row and layer, plus `count` ring rows. On the `cuda` backend
            one launch for all layers and no host sync; a bad count is skipped and flagged instead.

        Source: contract sections 3 and 7.
        """
        fn = "materialize"
        src = as_index_tensor(fn, "src_slots", src_slots, self.device)
        dst = as_index_tensor(fn, "dst_slots", dst_slots, self.device)
        counts = as_index_tensor(fn, "count", count, self.device)
        if isinstance(count, int):
            counts = counts.expand(src.shape[0])
        if self.audit is not None:
            self._require_alive(fn, src)
            self.audit.watch(src[self._real(src)].tolist())
        torch.ops.replaystate.materialize(
            self._states, self._u_rings, self._k_rings, self._g_rings, src, dst, counts, self.ring_start,
            self.num_committed, self._step_records, self.status, self.window, self._null, "auto",
        )  # fmt: skip
        if self.audit is not None:
            real = self._real(src) & self._real(dst)
            self.audit.materialize(src[real].tolist(), dst[real].tolist(), counts[real].tolist())

    def fork(self, src: Indices, dst: Indices) -> None:
        """Copy slots with their pending windows and cursors, in all layers; dst in use is overwritten.

        All sources are read before anything is written, so that a beam reorder with repeats (src [1, 1, 0] to
        dst [0, 1, 2]) works.

        Raises:
            SlotError: (host values) a dst named twice, or a slot past the pool.
            ProtocolError, DeadSlotError: (host values) a step of src is pending, or src is dead.

        Notes:
            Copies checkpoints and whole rings: HV V K + R (H K + HV V) elements and R HV float32 a slot and layer.
        """
        fn = "fork"
        sources = self._slots(fn, "src", src, distinct=False)
        targets = self._slots(fn, "dst", dst)
        if sources.shape != targets.shape:
            raise ShapeError(f"{fn}: dst: expected as many slots as src ({sources.shape[0]}), got {targets.shape[0]}")
        self._require_alive(fn, sources)
        if self._upkeep is not None:
            self._upkeep.fork(self, sources, targets)
            if self.audit is not None:
                real = self._real(sources) & self._real(targets)
                self.audit.fork(sources[real].tolist(), targets[real].tolist())
            return
        real = self._real(sources) & self._real(targets)
        sources, targets = sources[real], targets[real]
        if self.audit is not None:
            self.audit.watch(sources.tolist())
        alive = usable(sources, self._step_records, self.status)
        flag(self.status, targets, ~alive, SlotStatus.DEAD)  # whoever continues from dst must learn that nothing came
        sources, targets = sources[alive], targets[alive]
        words = (self.ring_start, self.num_committed, self.status)
        for x in (*self._states, *self._u_rings, *self._k_rings, *self._g_rings, *words):
            x[targets] = x[sources]
        self._step_records[targets] = 0
        if self.audit is not None:
            self.audit.fork(sources.tolist(), targets.tolist())

    def export(self, slot: int) -> dict[str, Tensor]:
        """One slot as a dict of CPU tensors that `load` continues from bit for bit; fits safetensors' save_file.

        Holds the checkpoints, the live window rows (never stale ones, which may be another request's), the cursors
        and a format version. See `replaystate.export` for the table.

        Raises:
            ProtocolError, DeadSlotError: a step is pending, or the slot is dead.
            SlotError: not a real slot.

        Notes:
            Copies a checkpoint and P ring rows a layer to the host, and waits for the device. Changes nothing.
        """
        self._need_host("export")
        slot = self._one_slot("export", slot)
        self._require_alive("export", torch.tensor([slot], device=self.device))
        return pack_slot(self, slot)

    def load(self, slot: int, exported: dict[str, Tensor]) -> None:
        """Continue in `slot` from what `export` gave; what was in the slot, dead or alive, is overwritten.

        Raises:
            FormatError: another format version, shape, number of layers, window or dtype, or a damaged dict.
            SlotError: not a real slot.

        Notes:
            Everything is checked first: after an error nothing has changed.
        """
        self._need_host("load")
        slot = self._one_slot("load", slot)
        unpack_slot(self, slot, exported)
        if self.audit is not None:
            self.audit.forget([slot])

    # --- helpers ---------------------------------------------------------------------------------------------------

    def _on_host(self) -> bool:
        return self.device.type == "cpu"

    def _layer(self, fn: str, layer: int) -> int:
        require_int(fn, "layer", layer, minimum=0)
        if layer >= self.num_layers:
            raise ArgumentError(f"{fn}: layer: expected 0..{self.num_layers - 1}, got {layer}")
        return layer

    def _one_slot(self, fn: str, slot: int) -> int:
        require_int(fn, "slot", slot, minimum=0)
        if slot >= self.num_slots or slot == self.null_slot:
            raise SlotError(
                f"{fn}: slot: expected below num_slots={self.num_slots} and not null_slot={self.null_slot}, got {slot}"
            )
        return slot

    def _slots(self, fn: str, name: str, slots: Indices, *, distinct: bool = True) -> Tensor:
        """int64 slots on the device; checked when their values are on the host."""
        where = as_index_tensor(fn, name, slots, self.device).long()
        if not isinstance(slots, Tensor) or slots.device.type == "cpu":
            host: list[int] = where.tolist()
            if distinct:
                check_slots(fn, name, host, self.num_slots, self.null_slot)
            elif any(slot >= self.num_slots for slot in host):
                raise SlotError(f"{fn}: {name}: expected slots below num_slots={self.num_slots}, got {host}")
        return where

    def _real(self, slots: Tensor) -> Tensor:
        """Which entries name a real slot: inside the pool, not negative, not the null slot."""
        return (slots >= 0) & (slots < self.num_slots) & (slots != self._null)

    def _require_alive(self, fn: str, slots: Tensor, layer: int | None = None) -> None:
        """Host side: none of the slots is dead, or has a step pending (in one layer, or in any)."""
        if self._on_host():
            records = self._step_records if layer is None else self._step_records[:, layer : layer + 1]
            live = slots[self._real(slots)].tolist()
            cursors = (self.ring_start, self.num_committed)
            check_alive(fn, live, records, self.status, *cursors, self.ring_slots, self.window)

    def _need_host(self, fn: str) -> None:
        if self.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
            raise ProtocolError(f"{fn}: needs values on the host and cannot run while a CUDA graph is captured")


def _check_null_slot(fn: str, null_slot: int | None, num_slots: int) -> None:
    """None, or a slot of the pool."""
    if null_slot is not None:
        require_int(fn, "null_slot", null_slot, minimum=0)
        if null_slot >= num_slots:
            raise ArgumentError(f"{fn}: null_slot: expected below num_slots={num_slots} or None, got {null_slot}")


def _check_shape(fn: str, shape: GDNShape) -> None:
    if not isinstance(shape, GDNShape):
        raise DTypeError(f"{fn}: shape: expected a GDNShape, got {type(shape).__name__}")

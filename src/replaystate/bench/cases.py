"""What is timed: pools, inputs and calls of one workload. Each case says which bytes it must move and checks itself.

A case owns buffers for several groups of slots, enough that a group is no longer in a cache when its turn comes again.
`prepare(i)` puts the cursors of group i where the workload wants them, `run(i)` is the call that is timed, and `check`
compares what the call wrote with a float64 recurrence from the same stored bits (`replaystate.bench.gate`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from ..cache import ReplayCache
from ..functional import gated_delta_rule, replay_step
from ..reference import Window, gates, normalize, split_qkv, window_of
from ..replayssm import GDN_REPLAYSSM_LOGICAL_WINDOW, load_gdn_replayssm_kernel, run_gdn_replayssm
from ..shapes import GDNShape, flush_min, step_record
from .bytes_model import StepBytes, step_bytes
from .gate import GATE_TOKENS, Error, Row, Storage, Tokens, prefill_errors, prefix_errors, sample, step_errors

INPUT_SETS = 4
MAX_GROUPS = 400
BLOCK_SLOTS = 64
"""Random values of so many slots are repeated over a pool: kernels do not look at them, and making them is slow."""


@dataclass(frozen=True)
class Settings:
    """What all cases of one line of results share.

    Args:
        shape: sizes of the layer.
        layers: GDN layers of the model: what a commit publishes for.
        rows: B.
        io, state, ring: dtypes of inputs and outputs, of checkpoints, and of the k and u rings.
        device: where it runs.
        cold_bytes: slots rotate over at least so many bytes.
        prompt_tokens: length of each prompt of the workload prefill.
    """

    shape: GDNShape
    layers: int
    rows: int
    io: torch.dtype
    state: torch.dtype
    ring: torch.dtype
    device: torch.device
    cold_bytes: int
    prompt_tokens: int

    def groups(self, bytes_per_group: int) -> int:
        """How many groups of slots to rotate over."""
        return max(2, min(MAX_GROUPS, -(-self.cold_bytes // bytes_per_group)))


def model_bytes(settings: Settings, width: int, window: int, lengths: list[int]) -> StepBytes:
    """Bytes of a step of one row for each window length; rows that must fold do."""
    total = StepBytes(0, 0, 0, 0, 0)
    for P in sorted(set(lengths)):
        total += step_bytes(
            settings.shape, rows=lengths.count(P), tokens=width, window_rows=P, folds=P >= flush_min(window, width),
            state_dtype=settings.state, ring_dtype=settings.ring, io_dtype=settings.io,
        )  # fmt: skip
    return total


def fill(x: Tensor, scale: float) -> None:
    """Normal values, repeated along the first dim."""
    block = (torch.randn(min(BLOCK_SLOTS, len(x)), *x.shape[1:], device=x.device) * scale).to(x.dtype)
    for begin in range(0, len(x), len(block)):
        x[begin : begin + len(block)] = block[: len(x) - begin]


def fill_pool(cache: ReplayCache) -> None:
    """States, keys of length one, corrections and decays such as a model has them; windows begin anywhere."""
    u, k, g = cache.rings(0)
    fill(cache.checkpoint(0), 0.3)
    fill(u, 0.5)
    fill(k, cache.shape.head_k_dim**-0.5)
    g.uniform_(-0.1, 0.0)
    cache.ring_start.random_(0, cache.ring_slots)


def make_inputs(settings: Settings, tokens: int) -> Tokens:
    """So many tokens."""
    HV, device = settings.shape.num_v_heads, settings.device
    widths = (settings.shape.qkv_dim, HV, HV)
    return Tokens(*(torch.randn(tokens, width, device=device).to(settings.io) for width in widths))


class Case(ABC):
    """One workload on one backend, ready to be checked and timed."""

    groups: int
    model: StepBytes

    def prepare(self, number: int) -> None:  # noqa: B027
        """Before each call, not timed; nothing where a call finds everything as the last one left it."""

    def prepare_all(self) -> None:
        """The same for all groups at once: the head of a CUDA graph that holds a call for each."""
        for number in range(self.groups):
            self.prepare(number)

    @abstractmethod
    def run(self, number: int) -> object:
        """The call that is timed, on group number % groups."""

    @abstractmethod
    def check(self) -> list[Error]:
        """Run the call once and measure what it wrote against float64."""


class _Steps(Case):
    """Pools and inputs of a step: rows of T tokens after windows of the lengths given."""

    def __init__(self, settings: Settings, width: int, window: int, lengths: list[int], storage: Storage) -> None:
        self.settings, self.width, self.window, self.lengths, self.storage = settings, width, window, lengths, storage
        shape, rows, device = settings.shape, settings.rows, settings.device
        self.model = model_bytes(settings, width, window, lengths)
        self.groups = settings.groups(self.model.total)
        self.cache = ReplayCache(
            shape, 1, self.groups * rows + 1, window=window, max_query_len=width, state_dtype=settings.state,
            ring_dtype=settings.ring, device=device,
        )  # fmt: skip
        fill_pool(self.cache)
        # Rows of a group lie apart in the pool.
        order = torch.randperm(self.groups * rows).view(self.groups, rows) + 1
        self.slots = order.to(torch.int32).to(device)
        self.counts = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.cache.num_committed[self.slots.flatten().long()] = self.counts.repeat(self.groups)
        N, HV = rows * width, shape.num_v_heads
        self.bounds = torch.arange(0, N + 1, width, dtype=torch.int32, device=device)
        self.inputs = [make_inputs(settings, N) for _ in range(min(INPUT_SETS, self.groups))]
        self.A_log = torch.linspace(-4.0, 0.0, HV, device=device)
        self.dt_bias = torch.zeros(HV, device=device)
        self.out = torch.empty(N, HV, shape.head_v_dim, dtype=settings.io, device=device)

    def prepare(self, number: int) -> None:
        """As if the step before had been committed and had left the window's length where the workload wants it."""
        slots = self.slots[number % self.groups].long()
        self.cache._step_records[slots] = 0
        self.cache.num_committed[slots] = self.counts

    def prepare_all(self) -> None:
        """A step leaves num_committed alone."""
        self.cache._step_records.zero_()

    def check(self) -> list[Error]:
        """Rows of every window length in the batch, its first and its last."""
        slots, cache, T = self.slots[0].tolist(), self.cache, self.width
        chosen = sample(self.lengths)
        before = [self._row(slots[i], i) for i in chosen]
        self.prepare(0)
        out = self.run(0)
        assert isinstance(out, Tensor)
        after: list[tuple[Tensor, Window]] = []
        for i in chosen:
            slot, P = slots[i], self.lengths[i]
            folded = P >= flush_min(self.window, T)
            start = int(cache.ring_start[slot]) + (P if folded else 0)
            u, k, g = (x[slot].cpu() for x in cache.rings(0))
            after.append((cache.checkpoint(0)[slot].cpu(), window_of(u, k, g, start, T if folded else P + T)))
        outputs = [out[i * T : (i + 1) * T].cpu() for i in chosen]
        return step_errors(before, outputs, after, self.storage)

    def _row(self, slot: int, row: int) -> Row:
        """What float64 starts from: bits and tokens of one row, on the host."""
        cache, T = self.cache, self.width
        u, k, g = (x[slot].cpu() for x in cache.rings(0))
        window = window_of(u, k, g, int(cache.ring_start[slot]), self.lengths[row])
        tokens = self.inputs[0].rows(row * T, (row + 1) * T).to("cpu")
        folds = self.lengths[row] >= flush_min(self.window, T)
        checkpoint = cache.checkpoint(0)[slot].cpu().clone()
        return Row(self.settings.shape, checkpoint, window, tokens, self.A_log.cpu(), self.dt_bias.cpu(), folds)


class Step(_Steps):
    """`replay_step` on one backend."""

    def __init__(self, settings: Settings, width: int, window: int, lengths: list[int], backend: str) -> None:
        super().__init__(settings, width, window, lengths, Storage(settings.io, settings.state, settings.ring))
        self.backend = backend

    def run(self, number: int) -> Tensor:
        """The public call, its checks and all."""
        return replay_step(
            *self.inputs[number % len(self.inputs)], self.A_log, self.dt_bias, self.cache, 0,
            self.slots[number % self.groups], self.bounds, executed_width=self.width, out=self.out,
            backend=self.backend,
        )  # fmt: skip


class Adapter(_Steps):
    """`run_gdn_replayssm`, the whole adapter step of a serving engine: look-ups, packing, kernel, selection."""

    def __init__(self, settings: Settings, width: int, lengths: list[int]) -> None:
        storage = Storage(settings.io, settings.state, settings.ring)
        super().__init__(settings, width, GDN_REPLAYSSM_LOGICAL_WINDOW, lengths, storage)
        self.kernel = load_gdn_replayssm_kernel("replaystate")
        self.output_indices = torch.arange(settings.rows * width, device=settings.device)
        self.offsets = torch.arange(width, device=settings.device)

    def run(self, number: int) -> Tensor:
        """One step of one layer."""
        H, HV, K, V = self.settings.shape.sizes
        mixed_qkv, a, b = self.inputs[number % len(self.inputs)]
        return run_gdn_replayssm(
            kernel=self.kernel, executed_width=self.width, mixed_qkv=mixed_qkv, a=a, b=b, A_log=self.A_log,
            dt_bias=self.dt_bias, checkpoint_state=self.cache.checkpoint(0), replayssm_cache=self.cache.rings(0),
            ring_start=self.cache.ring_start, num_committed=self.cache.num_committed, query_start_loc=self.bounds,
            state_indices=self.slots[number % self.groups], output_indices=self.output_indices, num_k_heads=H,
            num_v_heads=HV, head_k_dim=K, head_v_dim=V, offsets=self.offsets, uniform_query_length=self.width,
        )  # fmt: skip


class Recurrence(Case):
    """The baseline: the recurrence in plain torch, float32 states as stock transformers has them.

    For T > 1 the state after each token is written to a place of its own, as engines do that must be able to take
    drafts back.
    """

    def __init__(self, settings: Settings, width: int) -> None:
        self.settings, self.width = settings, width
        shape, rows, device = settings.shape, settings.rows, settings.device
        _, HV, K, V = shape.sizes
        state = rows * HV * V * K * 4
        io = step_bytes(
            shape, rows=rows, tokens=width, window_rows=0, folds=False, state_dtype=torch.float32,
            ring_dtype=torch.float32, io_dtype=settings.io,
        ).io  # fmt: skip
        self.model = StepBytes(state, state * width, 0, 0, io)
        self.groups = settings.groups(self.model.total)
        slots = self.groups * rows
        self.states = torch.zeros(width, slots, HV, V, K, device=device)
        fill(self.states[0], 0.3)
        self.slots = torch.randperm(slots).view(self.groups, rows).to(device)
        self.inputs = [make_inputs(settings, rows * width) for _ in range(min(INPUT_SETS, self.groups))]
        self.A_log = torch.linspace(-4.0, 0.0, HV, device=device)
        self.dt_bias = torch.zeros(HV, device=device)

    def run(self, number: int) -> Tensor:
        """T tokens of every row, one after the other."""
        slots, T, shape = self.slots[number % self.groups], self.width, self.settings.shape
        mixed_qkv, a, b = (x.view(self.settings.rows, T, -1).float() for x in self.inputs[number % len(self.inputs)])
        q, k, v = (x.unflatten(0, (-1, T)) for x in split_qkv(mixed_qkv.flatten(0, 1), shape))
        g, beta = gates(a, b, self.A_log, self.dt_bias)
        q, k = normalize(q, shape.head_k_dim**-0.5), normalize(k)
        q, k = (x.repeat_interleave(shape.heads_per_key, dim=2) for x in (q, k))
        S, out = self.states[0][slots], torch.empty_like(v)
        for t in range(T):
            S = S * g[:, t].exp()[..., None, None]
            u = beta[:, t][..., None] * (v[:, t] - (S @ k[:, t][..., None])[..., 0])
            S = S + u[..., None] * k[:, t][..., None, :]
            out[:, t] = (S @ q[:, t][..., None])[..., 0]
            self.states[t][slots] = S
        return out.flatten(0, 1).to(self.settings.io)

    def check(self) -> list[Error]:
        """The first row and the last."""
        chosen = sorted({0, self.settings.rows - 1})
        T, slots = self.width, self.slots[0].tolist()
        empty = Window(
            torch.empty(0, self.settings.shape.num_k_heads, self.settings.shape.head_k_dim),
            torch.empty(0, self.settings.shape.num_v_heads, self.settings.shape.head_v_dim),
            torch.empty(0, self.settings.shape.num_v_heads),
        )
        weights = self.A_log.cpu(), self.dt_bias.cpu()
        before = []
        for i in chosen:
            tokens = self.inputs[0].rows(i * T, (i + 1) * T).to("cpu")
            before.append(
                Row(self.settings.shape, self.states[0][slots[i]].cpu().clone(), empty, tokens, *weights, False)
            )
        out = self.run(0)
        after = [(self.states[T - 1][slots[i]].cpu(), empty) for i in chosen]
        outputs = [out[i * T : (i + 1) * T].cpu() for i in chosen]
        return step_errors(before, outputs, after, Storage(self.settings.io, torch.float32, torch.float32))


class Materialize(Case):
    """`materialize` of whole windows into other slots, one layer."""

    def __init__(self, settings: Settings, window: int, backend: str) -> None:
        self.settings, self.window, self.backend = settings, window, backend
        shape, rows, device = settings.shape, settings.rows, settings.device
        once = model_bytes(settings, 0, window, [window] * rows)
        self.model = StepBytes(once.state_read, once.state_read, once.ring_read, 0, 0)
        self.groups = settings.groups(self.model.total)
        self.cache = ReplayCache(
            shape, 1, 2 * self.groups * rows + 1, window=window, max_query_len=1, state_dtype=settings.state,
            ring_dtype=settings.ring, device=device,
        )  # fmt: skip
        fill_pool(self.cache)
        self.cache.num_committed.fill_(window)
        order = torch.randperm(2 * self.groups * rows).view(2, self.groups, rows) + 1
        self.src, self.dst = order.to(torch.int32).to(device)
        self.count = torch.full((rows,), window, dtype=torch.int32, device=device)

    def run(self, number: int) -> None:
        """Sources to destinations of one group."""
        cache, i = self.cache, number % self.groups
        torch.ops.replaystate.materialize(
            [cache.checkpoint(0)], *([ring] for ring in cache.rings(0)), self.src[i], self.dst[i], self.count,
            cache.ring_start, cache.num_committed, cache._step_records, cache.status, self.window, 0, self.backend,
        )  # fmt: skip

    def check(self) -> list[Error]:
        """The first row and the last."""
        cache = self.cache
        self.run(0)
        rows = []
        for i in sorted({0, self.settings.rows - 1}):
            src, dst = int(self.src[0, i]), int(self.dst[0, i])
            u, k, g = (x[src].cpu() for x in cache.rings(0))
            window = window_of(u, k, g, int(cache.ring_start[src]), self.window)
            rows.append((cache.checkpoint(0)[src].cpu(), window, cache.checkpoint(0)[dst].cpu()))
        return prefix_errors(rows)


class Commit(Case):
    """`commit` of one model step. It touches cursors and records only, so the layers' pools are made tiny."""

    def __init__(self, settings: Settings, width: int, window: int, backend: str) -> None:
        self.settings, self.width, self.window, self.backend = settings, width, window, backend
        rows, device = settings.rows, settings.device
        self.groups = 8
        self.cache = ReplayCache(
            GDNShape(1, 1, 1, 1), settings.layers, self.groups * rows + 1, window=window, max_query_len=width,
            device=device,
        )  # fmt: skip
        order = torch.randperm(self.groups * rows).view(self.groups, rows) + 1
        self.slots = order.to(torch.int32).to(device)
        self.accepted = torch.full((rows,), width, dtype=torch.int32, device=device)
        self.held = window // 2
        # Each row: two cursors and the status read, the cursors written, the records of all layers read and cleared.
        words = rows * (3 + settings.layers)
        self.model = StepBytes(4 * words, 4 * rows * (2 + settings.layers), 0, 0, 0)

    def prepare(self, number: int) -> None:
        """As every layer's step leaves them."""
        slots = self.slots[number % self.groups].long()
        self.cache._step_records[slots] = step_record(self.width, self.width)
        self.cache.num_committed[slots] = self.held

    def prepare_all(self) -> None:
        """All groups in two launches."""
        self.cache._step_records.fill_(step_record(self.width, self.width))
        self.cache.num_committed.fill_(self.held)

    def run(self, number: int) -> None:
        """One group."""
        cache = self.cache
        torch.ops.replaystate.commit(
            self.slots[number % self.groups], self.accepted, cache.ring_start, cache.num_committed,
            cache._step_records, cache.status, self.window, cache.ring_slots, 0, self.backend,
        )  # fmt: skip

    def check(self) -> list[Error]:
        """Integers: right or wrong."""
        self.prepare(0)
        self.run(0)
        cache, slots = self.cache, self.slots[0].long()
        right = bool((cache.num_committed[slots] == self.held + self.width).all())
        right &= not bool(cache._step_records[slots].any() | cache.status[slots].any())
        return [Error("cursors", 0.0 if right else float("inf"), 0.0)]


class Prefill(Case):
    """`gated_delta_rule` over whole prompts from nothing."""

    def __init__(self, settings: Settings, backend: str) -> None:
        self.settings, self.backend = settings, backend
        shape, tokens, device = settings.shape, settings.prompt_tokens, settings.device
        _, HV, K, V = shape.sizes
        N = settings.rows * tokens
        self.groups = INPUT_SETS
        self.inputs = [make_inputs(settings, N) for _ in range(self.groups)]
        self.A_log = torch.linspace(-4.0, 0.0, HV, device=device)
        self.dt_bias = torch.zeros(HV, device=device)
        self.bounds = torch.arange(0, N + 1, tokens, dtype=torch.int32, device=device)
        io = N * (shape.qkv_dim + HV * V + 2 * HV) * settings.io.itemsize
        self.model = StepBytes(0, settings.rows * HV * V * K * 4, 0, 0, io)

    def run(self, number: int) -> tuple[Tensor, Tensor]:
        """Outputs and final states."""
        return gated_delta_rule(
            *self.inputs[number % self.groups], self.A_log, self.dt_bias, self.settings.shape, self.bounds,
            backend=self.backend,
        )  # fmt: skip

    def check(self) -> list[Error]:
        """Every token of the first prompt, and its state; at most GATE_TOKENS of them, the rest by another call."""
        shape, tokens = self.settings.shape, self.settings.prompt_tokens
        out, final = self.run(0)
        prompt, A_log, dt_bias = self.inputs[0].rows(0, tokens), self.A_log.cpu(), self.dt_bias.cpu()
        errors = prefill_errors(prompt, A_log, dt_bias, shape, out[:tokens], final[:1])
        if tokens > GATE_TOKENS:  # the state of a long prompt was not compared
            short = prompt.rows(0, GATE_TOKENS)
            bounds = torch.tensor([0, GATE_TOKENS], dtype=torch.int32, device=self.bounds.device)
            again, state = gated_delta_rule(
                *short, self.A_log, self.dt_bias, shape, bounds, backend=self.backend
            )  # fmt: skip
            errors += prefill_errors(short, A_log, dt_bias, shape, again, state)
        return errors

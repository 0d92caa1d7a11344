"""One kernel-level step, with every input in hand: what the tests here run, compare and vary.

`Step` holds the arguments of `replay_step` as plain tensors. `run(backend)` works on clones of the pools and returns
all that the call wrote, so the same step can run on two backends, on other threads, or from other memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from replaystate import GDNShape, reference
from replaystate.kernels import cpu_backend, registry, torch_backend
from replaystate.reference import Window

BACKENDS: dict[str, registry.Backend] = {"cpu": cpu_backend, "torch": torch_backend}
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
POOLS = ("state", "u_ring", "k_ring", "g_ring")


@dataclass
class Result:
    """All that a step wrote."""

    out: Tensor
    state: Tensor
    u_ring: Tensor
    k_ring: Tensor
    g_ring: Tensor
    step_records: Tensor
    status: Tensor

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(vars(self).items())


@dataclass
class Step:
    """A step of `len(slots)` rows; row i has lengths[i] tokens and its slot's window is windows[i] = (start, P)."""

    shape: GDNShape
    slots: list[int]
    lengths: list[int]
    windows: list[tuple[int, int]]
    width: int = 4
    window: int = 16
    ring_slots: int = 32
    io: torch.dtype = F32
    gates: torch.dtype = F32
    state_dtype: torch.dtype = F32
    ring_dtype: torch.dtype = F32
    pool: int = 6
    null_slot: int = 0
    seed: int = 0
    poison: bool = True
    tensors: dict[str, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.tensors:
            return
        rng = torch.Generator().manual_seed(self.seed)
        H, HV, K, V = self.shape.sizes
        R, N = self.ring_slots, sum(self.lengths)

        def normal(*size: int) -> Tensor:
            return torch.randn(*size, generator=rng)

        nan = float("nan")
        pools = {
            "state": torch.full((self.pool, HV, V, K), nan, dtype=self.state_dtype),
            "u_ring": torch.full((self.pool, HV, R, V), nan, dtype=self.ring_dtype),
            "k_ring": torch.full((self.pool, H, R, K), nan, dtype=self.ring_dtype),
            "g_ring": torch.full((self.pool, HV, R), nan),
        }
        starts, counts = torch.zeros(self.pool, dtype=torch.int32), torch.zeros(self.pool, dtype=torch.int32)
        for slot, (start, count) in zip(self.slots, self.windows, strict=True):
            if slot < 0 or slot == self.null_slot:
                continue
            rows = [(start + j) % R for j in range(count)]
            pools["state"][slot] = (normal(HV, V, K) * 0.5).to(self.state_dtype)
            pools["u_ring"][slot][:, rows] = (normal(HV, count, V) * 0.5).to(self.ring_dtype)
            pools["k_ring"][slot][:, rows] = reference.normalize(normal(H, count, K)).to(self.ring_dtype)
            pools["g_ring"][slot][:, rows] = -torch.rand(HV, count, generator=rng) * 0.3
            starts[slot], counts[slot] = start, count
        self.tensors = {
            "mixed_qkv": normal(N, self.shape.qkv_dim).to(self.io),
            "a": normal(N, HV).to(self.gates),
            "b": normal(N, HV).to(self.gates),
            "A_log": normal(HV) * 0.5 - 1,
            "dt_bias": normal(HV) * 0.5,
            **pools,
            "ring_start": starts,
            "num_committed": counts,
            "step_records": torch.zeros(self.pool, 2, dtype=torch.int32),
            "status": torch.zeros(self.pool, dtype=torch.int32),
            "out": torch.full((N, HV, V), nan, dtype=self.io),
            "state_indices": torch.tensor(self.slots, dtype=torch.int32),
            "query_start_loc": torch.tensor([0, *torch.tensor(self.lengths).cumsum(0).tolist()], dtype=torch.int32),
        }

    def scalars(self) -> tuple[int, int, int, int, float]:
        """layer, executed_width, window, null_slot, scale."""
        return 1, self.width, self.window, self.null_slot, self.shape.head_k_dim**-0.5

    def run(self, backend: str = "cpu", place: Callable[[Tensor], Tensor] = Tensor.clone) -> Result:
        """Run on copies of all tensors, each put where `place` says."""
        given = {name: place(x) for name, x in self.tensors.items()}
        BACKENDS[backend].replay_step(*given.values(), *self.scalars())
        return Result(given["out"], *(given[name] for name in POOLS), given["step_records"], given["status"])

    def rows(self, index: Sequence[int]) -> Step:
        """The same step with these rows only, in this order; pools and cursors are the same tensors."""
        bounds = self.tensors["query_start_loc"].tolist()
        tokens = [t for i in index for t in range(bounds[i], bounds[i + 1])]
        lengths = [self.lengths[i] for i in index]
        changed = {name: self.tensors[name][tokens] for name in ("mixed_qkv", "a", "b", "out")}
        changed["state_indices"] = self.tensors["state_indices"][list(index)]
        changed["query_start_loc"] = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
        return replace(
            self,
            slots=[self.slots[i] for i in index],
            lengths=lengths,
            windows=[self.windows[i] for i in index],
            tensors={**self.tensors, **changed},
        )

    def live(self) -> list[int]:
        """Rows that are not padding."""
        return [i for i, slot in enumerate(self.slots) if slot >= 0 and slot != self.null_slot]

    def tokens(self, row: int) -> slice:
        """The tokens of a row."""
        bounds = self.tensors["query_start_loc"].tolist()
        return slice(bounds[row], bounds[row + 1])

    def truth(self, row: int) -> tuple[Tensor, Window, Tensor]:
        """float64: outputs and appended rows of one row, and its folded checkpoint."""
        slot, (start, count) = self.slots[row], self.windows[row]
        state, u, k, g = (self.tensors[name][slot].double() for name in POOLS)
        window = reference.window_of(u, k, g, start, count)
        inputs = [self.tensors[name][self.tokens(row)].double() for name in ("mixed_qkv", "a", "b")]
        parameters = [self.tensors[name].double() for name in ("A_log", "dt_bias")]
        out, appended = reference.replay(*inputs, *parameters, self.shape, state, window)
        return out, appended, reference.fold(state, window)

    def appended(self, result: Result, row: int) -> Window:
        """What a run wrote into the ring for a row."""
        slot, (start, count) = self.slots[row], self.windows[row]
        at = [(start + count + t) % self.ring_slots for t in range(self.lengths[row])]
        u, k, g = result.u_ring[slot], result.k_ring[slot], result.g_ring[slot]
        return Window(k[:, at].transpose(0, 1), u[:, at].transpose(0, 1), g[:, at].transpose(0, 1))


def odd_place(x: Tensor) -> Tensor:
    """A copy at an odd element offset of its storage, with NaN (or -1) around it."""
    fill = float("nan") if x.is_floating_point() else -1
    whole = torch.full((x.numel() + 2,), fill, dtype=x.dtype)
    inside = whole[1 : 1 + x.numel()].view(x.shape)
    inside.copy_(x)
    return inside


def bits(x: Tensor) -> Tensor:
    """Bit patterns as integers."""
    x = x.contiguous()
    return x.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]) if x.is_floating_point() else x


def assert_same_bits(x: Result, y: Result) -> None:
    """Every tensor that the two steps wrote has the same bits."""
    for (name, one), (_, other) in zip(x, y, strict=True):
        assert torch.equal(bits(one), bits(other)), name

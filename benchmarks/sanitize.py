"""A reduced run of every kernel for compute-sanitizer.

    compute-sanitizer --tool memcheck --report-api-errors no python benchmarks/sanitize.py

Small pools, every kernel once or twice, no torch work worth mentioning beside them.
"""

from __future__ import annotations

import torch

from replaystate import GDNShape, ReplayCache, gated_delta_rule, replay_step

SHAPE = GDNShape(1, 2, 128, 128)
F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32


def step_all(shape: GDNShape, io: torch.dtype, state: torch.dtype, width: int) -> None:
    """Two layers, a folding, a plain, an empty and a padding row."""
    cache = ReplayCache(shape, 2, 6, max_query_len=width, state_dtype=state, device="cuda")
    cache.num_committed.copy_(torch.tensor([0, 16, 5, 0, 16, 3]))
    cache.ring_start.fill_(27)
    lengths = [width, 1, 0, width, 1]
    N = sum(lengths)
    qkv = torch.randn(N + 1, shape.qkv_dim, device="cuda").to(io)
    a, b = torch.randn(2, N + 1, shape.num_v_heads, device="cuda").to(io)
    A_log, dt_bias = torch.zeros(2, shape.num_v_heads, device="cuda")
    bounds = torch.tensor([0, *lengths]).cumsum(0).int().cuda()
    slots = torch.tensor([1, 2, 3, -1, 4], dtype=torch.int32, device="cuda")
    for layer in range(2):
        replay_step(qkv, a, b, A_log, dt_bias, cache, layer, slots, bounds, backend="cuda")
    cache.commit(slots, torch.zeros_like(slots))
    cache.materialize(torch.tensor([2]).cuda(), torch.tensor([5]).cuda(), torch.tensor([1]).cuda())
    cache.fork(slots, torch.tensor([2, 1, 5, 3, 0]).cuda())
    cache.flush(slots)
    cache.crop(slots, torch.zeros_like(slots))
    cache.state(1, slots)
    cache.reset(slots[:2])
    cache.load_state(0, slots[:1], torch.randn(1, shape.num_v_heads, shape.head_v_dim, shape.head_k_dim, device="cuda"))
    gated_delta_rule(qkv, a, b, A_log, dt_bias, shape, bounds, backend="cuda")


def main() -> None:
    """Every kernel, the fast and the general ones."""
    for io, state, width in ((BF16, F16, 4), (BF16, BF16, 4), (BF16, F16, 8), (F32, F32, 4)):
        step_all(SHAPE, io, state, width)
    step_all(GDNShape(1, 1, 96, 40), F16, F16, 3)
    torch.cuda.synchronize()
    print("done")


if __name__ == "__main__":
    main()

"""How far 8192 chained tokens drift from float64, for every dtype triple, beside the plain recurrence.

Slow decay (A_log near -3), correlated keys, T = 4, random accepts; relative error of the state at the end and of the
outputs over the first and the last 256 tokens. `python benchmarks/drift.py --json FILE`
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

import torch
from torch import Tensor

from replaystate import GDNShape, ReplayCache, replay_step
from replaystate.reference import gates

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
TRIPLES = [
    (F16, F16, BF16), (F16, F16, F32), (F16, BF16, BF16), (BF16, BF16, BF16), (BF16, F16, BF16), (F32, F16, F32),
    (F32, F32, F32),
]  # fmt: skip
SHAPE = GDNShape(1, 2, 128, 128)
TOKENS = 8192


def truth(qkv: Tensor, decay: Tensor, beta: Tensor, rounded: torch.dtype | None) -> tuple[Tensor, Tensor]:
    """(outputs, state) of the recurrence in float64, the state rounded after each token where a dtype is given."""
    H, HV, K, V = SHAPE.sizes
    q, k, v = qkv.double().split([H * K, H * K, HV * V], dim=-1)
    q, k = (x / torch.sqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q, v = q * K**-0.5, v.unflatten(-1, (HV, V))
    S = torch.zeros(HV, V, K, dtype=torch.float64, device=qkv.device)
    outs = []
    for t in range(len(q)):
        S = S * decay[t, :, None, None]
        u = beta[t, :, None] * (v[t] - S @ k[t])
        S = S + u[..., None] * k[t]
        outs.append(S @ q[t])
        if rounded is not None:
            S = S.to(rounded).double()
    return torch.stack(outs), S


def error(x: Tensor, y: Tensor) -> float:
    """Relative, Frobenius."""
    return float((x.double() - y).norm() / y.norm())


def main() -> None:
    """Print a line a triple; write JSON."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rng = random.Random(0)
    torch.manual_seed(0)
    H, HV, K, V = SHAPE.sizes
    common = torch.randn(SHAPE.qkv_dim)
    qkv = (torch.randn(TOKENS, SHAPE.qkv_dim) + 0.7 * common).to(BF16).cuda()
    a, b = (torch.randn(2, TOKENS, HV) * 0.5 - 2).to(BF16).cuda()
    A_log, dt_bias = torch.full((HV,), -3.0, device="cuda"), torch.zeros(HV, device="cuda")
    g, beta = gates(a.double(), b.double() + 2.0, A_log.double(), dt_bias.double())
    b = (b.double() + 2.0).to(BF16)
    g, beta = gates(a.double(), b.double(), A_log.double(), dt_bias.double())
    exact, state = truth(qkv, torch.exp(g), beta, None)
    plan, at = [], 0
    while at < TOKENS:
        drafted = min(4, TOKENS - at)
        kept = rng.randint(1, drafted)
        plan.append((at, drafted, kept))
        at += kept
    rows = []

    def row(form: str, state_dtype: object, ring: object, io: object, y: Tensor, S: Tensor) -> dict[str, object]:
        names = [str(x or "").removeprefix("torch.") for x in (state_dtype, ring, io)]
        first, last = error(y[:256], exact[:256]), error(y[-256:], exact[-256:])
        kind = dict(zip(("state", "ring", "io"), names, strict=True))
        return {"form": form, **kind, "first": first, "last": last, "end": error(S, state)}

    for dtype in (F32, F16, BF16):
        y, S = truth(qkv, torch.exp(g), beta, dtype)
        rows.append(row("recurrence", dtype, None, None, y, S))
    slot = torch.tensor([1], dtype=torch.int32, device="cuda")
    bounds = [torch.tensor([0, n], dtype=torch.int32, device="cuda") for n in range(5)]
    kept_of = [torch.tensor([n], dtype=torch.int32, device="cuda") for n in range(5)]
    for state_dtype, ring_dtype, io in TRIPLES:
        cache = ReplayCache(SHAPE, 1, 2, max_query_len=4, state_dtype=state_dtype, ring_dtype=ring_dtype, device="cuda")
        x, ga, gb = qkv.to(io), a.to(io), b.to(io)
        out = torch.empty(TOKENS, HV, V, dtype=io, device="cuda")
        for begin, drafted, kept in plan:
            part = slice(begin, begin + drafted)
            replay_step(x[part], ga[part], gb[part], A_log, dt_bias, cache, 0, slot, bounds[drafted], out=out[part])
            cache.commit(slot, kept_of[kept])
        cache.check()
        rows.append(row("replay", state_dtype, ring_dtype, io, out, cache.state(0, [1])[0]))
    for r in rows:
        kind = f"{r['form']:10s} state {r['state']:9s} ring {r['ring']:9s} io {r['io']:9s}"
        print(f"{kind} first {r['first']:.1e} last {r['last']:.1e} state {r['end']:.1e}")
    if options.json:
        record = {"device": torch.cuda.get_device_name(), "torch": torch.__version__, "tokens": TOKENS, "rows": rows}
        options.json.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

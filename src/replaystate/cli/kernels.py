"""The commands for the CUDA kernels: warmup compiles them ahead of use, tune measures how to split them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from enum import Enum
from typing import Annotated

import torch
import typer

from ..bench import tune as tuning
from ..errors import ArgumentError
from ..kernels import cuda
from ..shapes import GDNShape
from . import output
from .exits import Exit


class DType(str, Enum):
    """Storage and inputs."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"

    @property
    def torch(self) -> torch.dtype:
        """The dtype itself."""
        return getattr(torch, self.value)  # type: ignore[no-any-return]


KeyHeads = Annotated[int, typer.Option("--key-heads", min=1, metavar="H", help="Key heads of a layer.")]
ValueHeads = Annotated[int, typer.Option("--value-heads", min=1, metavar="HV", help="Value heads of a layer.")]
KeyDim = Annotated[int, typer.Option("--key-dim", min=1, metavar="K", help="Size of a key.")]
ValueDim = Annotated[int, typer.Option("--value-dim", min=1, metavar="V", help="Size of a value.")]
Width = Annotated[int, typer.Option("--max-query-len", min=1, max=16, metavar="T", help="Tokens of a step, at most.")]
Window = Annotated[int, typer.Option("--window", min=1, metavar="W", help="Tokens between folds.")]
State = Annotated[DType, typer.Option("--state-dtype", help="Of checkpoints.")]
Ring = Annotated[DType, typer.Option("--ring-dtype", help="Of rings.")]
IO = Annotated[DType, typer.Option("--io-dtype", help="Of inputs and outputs.")]


def register(app: typer.Typer, errors_as_exit_codes: Callable[[], AbstractContextManager[None]]) -> None:
    """Add the two commands."""

    @app.command("warmup", short_help="Compile the CUDA kernels of a configuration ahead of use.")
    def warmup_command(
        key_heads: KeyHeads,
        value_heads: ValueHeads,
        key_dim: KeyDim = 128,
        value_dim: ValueDim = 128,
        max_query_len: Width = 4,
        window: Window = 16,
        state_dtype: State = DType.float16,
        ring_dtype: Ring = DType.float16,
        io_dtype: IO = DType.bfloat16,
        arch: Annotated[
            str | None, typer.Option(metavar="SM", help="Compile for this architecture, e.g. sm_90; needs no GPU.")
        ] = None,
    ) -> None:
        """Compile every CUDA kernel that a configuration can launch into the disk cache.

        After it no step of the configuration compiles. The cache is $REPLAYSTATE_CACHE_DIR, else replaystate/ in the
        user's cache directory.
        """
        with errors_as_exit_codes():
            if arch is None:
                _need_gpu("warmup", "; name an architecture to compile for one that is not here, e.g. --arch sm_90")
                arch = cuda.compiler.architecture(torch.cuda.current_device())
            digits = arch.removeprefix("sm_")
            if not digits.isdecimal() or not arch.startswith("sm_") or int(digits) < 80:
                raise ArgumentError(f"--arch: expected sm_80 or a later one, got {arch}")
            shape = GDNShape(key_heads, value_heads, key_dim, value_dim)
            compiled = cuda.compile_for(
                arch, shape.sizes, window=window, widths=range(1, max_query_len + 1), state_dtype=state_dtype.torch,
                ring_dtype=ring_dtype.torch, io_dtypes=(io_dtype.torch,),
            )  # fmt: skip
        where = cuda.compiler.cache_dir()
        output.results().print(f"compiled {compiled} kernels for {arch} into {where}", soft_wrap=True)

    @app.command("tune", short_help="Measure the fastest split of the CUDA step on this GPU.")
    def tune_command(
        key_heads: KeyHeads,
        value_heads: ValueHeads,
        max_query_len: Width = 4,
        window: Window = 16,
        state_dtype: State = DType.float16,
        ring_dtype: Ring = DType.float16,
        io_dtype: IO = DType.bfloat16,
    ) -> None:
        """Time the ways to split a step over blocks, batch by batch, and keep the fastest in the user's table.

        The table is $REPLAYSTATE_TUNING, else tuning.json beside the compiled kernels. It changes the time of a step,
        never a bit of its result.
        """
        with errors_as_exit_codes():
            _need_gpu("tune", "")
            kind, rows = tuning.tune(
                GDNShape(key_heads, value_heads, 128, 128), width=max_query_len, window=window,
                state_dtype=state_dtype.torch, ring_dtype=ring_dtype.torch, io_dtype=io_dtype.torch, note=output.note,
            )  # fmt: skip
            path = tuning.write(kind, rows)
        output.results().print(f"{kind}: {rows} in {path}", soft_wrap=True)


def _need_gpu(command: str, hint: str) -> None:
    reason = cuda.usable()
    if reason:
        output.note(f"{command} needs a CUDA GPU: {reason}{hint}")
        raise typer.Exit(Exit.USAGE)

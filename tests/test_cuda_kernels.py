"""What can be said of the CUDA kernels without a GPU: they compile for every architecture, and the disk cache holds.

How this tests: NVRTC needs no GPU. Where cuda-core is not installed these tests are skipped; the reasons that the
registry gives are tested everywhere.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch

from replaystate import GDNShape, ReplayCache, backends
from replaystate.errors import ArgumentError, BackendError, DTypeError
from replaystate.kernels import Call, cuda, select
from replaystate.kernels.cuda import compile_for, compiler, fast, launch, upkeep

needs_compiler = pytest.mark.skipif(compiler.missing() is not None, reason="cuda-core is not installed")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32

SMALL = {
    "commit": launch.commit_program(),
    "slots": upkeep.program(),
    "prefill": launch.prefill_program(128),
    "prefill K=192": launch.prefill_program(192),
    "fold fp32": launch.fold_program(F32, 128),
    "fold bf16 K=256": launch.fold_program(BF16, 256),
    "fold tensor cores": launch.fold_fast_program(F16, F16, 16),
    "fold tensor cores bf16": launch.fold_fast_program(BF16, BF16, 32),
    "step fp32 T=4": launch.general_step(F32, 4, 128),
    "step fp16 T=16 K=256": launch.general_step(F16, 16, 256),
    "step bf16 T=1": launch.general_step(BF16, 1, 64),
}


def test_a_machine_without_a_gpu_says_why() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    info = {info.name: info for info in backends()}["cuda"]
    assert not info.usable
    assert "CUDA" in str(info.reason)
    call = Call("replay_step", "cpu", F32, F32, F32, (1, 2, 128, 128), 16, 4)
    with pytest.raises(BackendError, match="'cuda' was asked for but cannot run this call: "):
        select("cuda", call)


def test_reasons_name_the_numbers() -> None:
    sizes = (1, 2, 128, 128)
    assert "are on cpu" in str(cuda.supports(Call("replay_step", "cpu", F32, F32, F32, sizes, 0, 4)))
    assert "320 is above 256" in str(cuda.supports(Call("replay_step", "cuda", F32, F32, F32, (1, 2, 320, 128), 0, 4)))
    assert "17 is above 16" in str(cuda.supports(Call("replay_step", "cuda", F32, F32, F32, sizes, 0, 17)))
    assert cuda.supports(Call("commit", "cuda", None, None, None, (0, 0, 0, 0), 16)) is None


def test_warmup_on_the_cpu_checks_its_arguments_and_has_nothing_to_do() -> None:
    cache = ReplayCache(GDNShape(1, 2, 8, 8), 1, 2, max_query_len=4)
    assert cache.warmup() == 0
    with pytest.raises(DTypeError, match="io_dtypes: expected float32, float16 or bfloat16"):
        cache.warmup((torch.float64,))
    with pytest.raises(ArgumentError, match=r"executed_widths: expected 1\.\.4, got 5"):
        cache.warmup(executed_widths=[5])


def test_the_tuning_table_covers_every_batch() -> None:
    for arch in (*compiler.ARCHITECTURES, "sm_103"):
        for heads in (1, 64, 512, 513, 10**6):
            for group in (1, 2, 3, 4, 8):
                for lanes, splits in itertools.product((4, 8, 16), (False, True)):
                    nhv, vs, cpw = fast.split(arch, lanes, splits, heads, group)
                    assert group % nhv == 0
                    assert 4 % (vs * cpw) == 0
    assert len(fast.SHIPPED) <= 40


@needs_compiler
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_120"])  # the slow ones: oldest, the one we run, newest
@pytest.mark.parametrize("name", SMALL)
def test_general_kernels_compile(name: str, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSTATE_CACHE_DIR", str(tmp_path))
    assert compiler.compile_program(SMALL[name], arch)[:4] == b"\x7fELF"


@needs_compiler
@pytest.mark.parametrize("arch", compiler.ARCHITECTURES)
@pytest.mark.parametrize("variant", fast.SHIPPED, ids=lambda v: "-".join(str(x).removeprefix("torch.") for x in v))
def test_shipped_fast_variants_compile(
    variant: fast.Variant, arch: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("REPLAYSTATE_CACHE_DIR", str(tmp_path))
    assert compiler.compile_program(variant.program, arch)[:4] == b"\x7fELF"
    assert variant.shared_bytes <= 163 * 1024, "more shared memory than a block has on sm_80"
    least = variant._replace(
        **dict(zip(("nhv", "vs", "cpw"), fast._rare_split(variant.lanes, variant.splits), strict=True))
    )
    assert least.shared_bytes <= 99 * 1024, "what runs where there is less, such as on sm_86"


@needs_compiler
def test_a_second_process_compiles_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REPLAYSTATE_CACHE_DIR", str(tmp_path))
    program = launch.commit_program()
    code = compiler.compile_program(program, "sm_90")
    before = compiler.counters.compiled
    assert compiler.compile_program(program, "sm_90") == code
    assert compiler.counters.compiled == before
    (stored,) = tmp_path.iterdir()
    stored.write_bytes(stored.read_bytes()[:-1])  # a damaged file is compiled again, not loaded
    assert compiler.compile_program(program, "sm_90") == code
    assert compiler.counters.compiled == before + 1
    assert compile_for("sm_90", (1, 2, 12, 10)) > 0  # what `replaystate warmup --arch` calls
    assert compile_for("sm_90", (1, 2, 12, 10)) == 0

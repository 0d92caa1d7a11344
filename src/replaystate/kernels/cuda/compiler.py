"""Compile the kernels with NVRTC, keep what was compiled on disk, and launch it on torch's stream.

The one module that imports cuda-core and cuda-bindings, on first use. A compiled kernel is stored under a name that is
a hash of all that went into it (source, macros, architecture, compiler version), so a second process compiles nothing
and a changed source never meets an old binary. Files appear by an atomic rename: a reader sees a whole one or none.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import importlib
import importlib.util
import logging
import os
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import BackendError, MissingDependencyError

logger = logging.getLogger("replaystate")

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""What the shipped kernels are compiled for in the tests. Any other from sm_80 on is compiled on demand."""

_SOURCE_DIR = Path(__file__).parent
_CUDA_ERROR_INVALID_CONTEXT = 201


@dataclass(frozen=True)
class Program:
    """A kernel to compile: its source files (joined by +), entry point, macros, and the block it is launched with."""

    source: str
    entry: str
    macros: tuple[tuple[str, int], ...]
    threads: int


@dataclass
class Counters:
    """How many kernels this process compiled, and how many it took from disk."""

    compiled: int = 0
    from_disk: int = 0


counters = Counters()
_lock = threading.Lock()
_importing = threading.Lock()
_kernels: dict[tuple[Program, int], Any] = {}
_shared_bytes: dict[tuple[Program, int], int] = {}


def missing() -> str | None:
    """Why kernels cannot be compiled here, or None."""
    for name in ("cuda.core", "cuda.bindings"):
        try:
            found = importlib.util.find_spec(name)
        except ModuleNotFoundError:
            found = None
        if found is None:
            return "cuda-core is not installed: pip install 'replaystate[cuda]'"
    return None


@functools.cache
def _driver() -> Any:
    return importlib.import_module("cuda.bindings.driver")


@functools.cache
def _core() -> Any:
    reason = missing()
    if reason:
        raise MissingDependencyError(f"replaystate's CUDA backend: {reason}")
    with _importing:  # a warm-up asks from several threads at once, and the package does not bear that
        return importlib.import_module("cuda.core")


@functools.cache
def _compiler_version() -> str:
    error, major, minor = importlib.import_module("cuda.bindings.nvrtc").nvrtcVersion()
    return f"{major}.{minor}"


@functools.cache
def _source(name: str) -> str:
    return "".join((_SOURCE_DIR / part).read_text() for part in ("common.cuh", *name.split("+")))


def cache_dir() -> Path:
    """Where compiled kernels are kept: $REPLAYSTATE_CACHE_DIR, else replaystate/ in the user's cache directory."""
    chosen = os.environ.get("REPLAYSTATE_CACHE_DIR")
    if chosen:
        return Path(chosen)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "replaystate"


def compile_program(program: Program, arch: str) -> bytes:
    """The machine code of a program for an architecture, from disk when it is there. Needs no GPU.

    Raises:
        MissingDependencyError: cuda-core is not installed.
        BackendError: the compiler refused the program.
    """
    _core()
    parts = (_source(program.source), program.entry, repr(program.macros), arch, _compiler_version())
    path = cache_dir() / f"{program.entry}-{arch}-{hashlib.sha256(chr(0).join(parts).encode()).hexdigest()[:40]}.cubin"
    stored = _read(path)
    if stored is not None:
        counters.from_disk += 1
        return stored
    core = _core()
    options: dict[str, Any] = {"arch": arch, "std": "c++17"}
    if program.macros:
        options["define_macro"] = [(name, str(value)) for name, value in program.macros]
    try:
        code: bytes = core.Program(_source(program.source), "c++", core.ProgramOptions(**options)).compile("cubin").code
    except Exception as error:
        raise BackendError(f"compiling {program.source} {dict(program.macros)} for {arch} failed: {error}") from error
    counters.compiled += 1
    logger.info("compiled %s %s for %s", program.source, dict(program.macros), arch)
    _write(path, code)
    return code


def _read(path: Path) -> bytes | None:
    """The code in a stored file, None when there is none or it is damaged."""
    try:
        data = path.read_bytes()
    except OSError:
        return None
    digest, code = data[:32], data[32:]
    return code if hashlib.sha256(code).digest() == digest else None


def _write(path: Path, code: bytes) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=path.name)
        with os.fdopen(handle, "wb") as file:
            file.write(hashlib.sha256(code).digest() + code)
        os.replace(temporary, path)
    except OSError as error:
        logger.warning("compiled kernels cannot be kept in %s, every process compiles its own: %s", path.parent, error)


@functools.lru_cache(maxsize=64)
def architecture(device: int) -> str:
    """'sm_90' for a device of compute capability 9.0."""
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _check(error: Any, what: str) -> None:
    if int(error):
        raise BackendError(f"{what} failed: {error.name}")


def load(program: Program, device: int, shared_bytes: int) -> Any:
    """The kernel on a device, compiled if need be, allowed to use so much dynamic shared memory."""
    key = program, device
    kernel = _kernels.get(key)
    if kernel is not None and _shared_bytes[key] >= shared_bytes:
        return kernel
    with _lock:
        driver = _driver()
        if key not in _kernels:
            code = compile_program(program, architecture(device))
            module = _core().ObjectCode.from_cubin(code)
            loaded = module.get_kernel(program.entry)
            _kernels[key] = (driver.CUfunction(int(loaded.handle)), driver.CUkernel(int(loaded.handle)), loaded, module)
            _shared_bytes[key] = 0
        kernel = _kernels[key]
        if _shared_bytes[key] < shared_bytes:
            limit = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
            (error,) = driver.cuKernelSetAttribute(limit, shared_bytes, kernel[1], device)
            _check(error, f"{program.entry}: {shared_bytes} bytes of shared memory a block")
            _shared_bytes[key] = shared_bytes
    return kernel


def launch(program: Program, device: int, blocks: int, shared_bytes: int, arguments: bytes, rows: int = 1) -> None:
    """Run a kernel whose one parameter is a struct of these bytes, on torch's current stream of the device."""
    if device != torch.cuda.current_device():
        with torch.cuda.device(device):
            launch(program, device, blocks, shared_bytes, arguments, rows)
        return
    kernel = load(program, device, shared_bytes)
    held = ctypes.create_string_buffer(arguments, len(arguments))
    pointers = (ctypes.c_void_p * 1)(ctypes.addressof(held))
    config = _launch_config(device)
    config.gridDimX, config.gridDimY, config.blockDimX = blocks, rows, program.threads
    config.sharedMemBytes = shared_bytes
    config.hStream = torch._C._cuda_getCurrentRawStream(device)
    error: Any = 0
    for attempt in range(2):
        (error,) = _driver().cuLaunchKernelEx(config, kernel[0], ctypes.addressof(pointers), 0)
        if int(error) != _CUDA_ERROR_INVALID_CONTEXT or attempt:
            break
        torch.cuda.set_device(device)  # a thread that torch has not used yet has no current context
    _check(error, f"launch of {program.entry}")


_configs = threading.local()


def _launch_config(device: int) -> Any:
    """This thread's launch parameters for a device, to be filled in.

    From sm_90 on a launch may overlap the end of the kernel before it: every kernel of ours waits for that one first.
    """
    held: dict[int, Any] = _configs.__dict__.setdefault("held", {})
    config = held.get(device)
    if config is None:
        driver = _driver()
        config = held[device] = driver.CUlaunchConfig()
        config.gridDimZ = config.blockDimY = config.blockDimZ = 1
        if torch.cuda.get_device_capability(device)[0] >= 9 and not os.environ.get("REPLAYSTATE_SERIAL"):
            attribute = driver.CUlaunchAttribute()
            attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
            attribute.value.programmaticStreamSerializationAllowed = 1
            config.attrs, config.numAttrs = [attribute], 1
    return config

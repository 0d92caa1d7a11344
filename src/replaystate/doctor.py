"""What a bug report needs to know of this machine: versions, devices, and which backend runs and why.

Nothing here identifies a user: no host name, no paths but what a variable of `VARIABLES` holds, and no other variables.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from . import __version__
from .kernels import BackendInfo, backends, cpu_backend, flashinfer

PACKAGES = (
    "numpy",
    "triton",
    "cuda-core",
    "cuda-bindings",
    "nvidia-cuda-nvrtc",
    "flashinfer-python",
    "transformers",
    "tokenizers",
    "safetensors",
    "huggingface-hub",
    "flash-linear-attention",
    "causal-conv1d",
    "vllm",
    "typer",
    "rich",
    "simpy",
)

EXTRAS = {
    "hf": ("transformers", "safetensors"),
    "cli": ("typer", "rich"),
    "cuda": ("cuda-core", "cuda-bindings"),
    "simulate": ("simpy",),
}
"""The packages of each extra that a user may want."""

VARIABLES = (
    "REPLAYSTATE_CPU_KERNELS",
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "CUDA_VISIBLE_DEVICES",
    "PYTORCH_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "NVIDIA_TF32_OVERRIDE",
    "GDN_UCACHE_STATE_DTYPE",
    "HF_HUB_OFFLINE",
    "USE_HUB_KERNELS",
)


def examine() -> dict[str, Any]:
    """Look at this machine; the result can be written as JSON.

    | key | value |
    |---|---|
    | replaystate, python, platform | versions, as text |
    | torch | version, CUDA or HIP version, threads, CPU capability |
    | packages | version by name; None where not installed |
    | extras | by name: installed, missing packages |
    | transformers | usable, and the reason why not: whether `replaystate.transformers` can be imported |
    | devices | type, name, and what is known of each |
    | backends | name, usable, reason of each, best first; isa of the CPU kernels: the instruction set that runs |
    | flashinfer | usable, reason: whether the serving adapter would take FlashInfer's kernel |
    | environment | the variables of `VARIABLES` that are set |

    Notes: imports transformers where it is installed (seconds), and asks CUDA which devices there are.

    >>> found = examine()
    >>> "torch" in [backend["name"] for backend in found["backends"] if backend["usable"]]
    True
    """
    packages = {name: _version(name) for name in PACKAGES}
    why_not_hf = _integration_reason()
    flashinfer_reason = flashinfer.reason()
    return {
        "replaystate": __version__,
        "python": f"{platform.python_version()} ({platform.python_implementation()})",
        "platform": f"{platform.system()} {platform.release()} {platform.machine()}",
        "torch": {
            "version": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "threads": torch.get_num_threads(),
            "cpu_capability": torch.backends.cpu.get_cpu_capability(),
            "float32_matmul_precision": torch.get_float32_matmul_precision(),
        },
        "packages": packages,
        "extras": {name: _extra(needed) for name, needed in EXTRAS.items()},
        "transformers": {"usable": why_not_hf is None, "reason": why_not_hf},
        "devices": _devices(),
        "backends": [_backend(info) for info in backends()],
        "flashinfer": {"usable": flashinfer_reason is None, "reason": flashinfer_reason},
        "environment": {name: os.environ[name] for name in VARIABLES if name in os.environ},
    }


def as_text(found: dict[str, Any]) -> str:
    """What `examine` found, as plain text to paste into a bug report."""
    pytorch = found["torch"]
    build = (
        f"CUDA {pytorch['cuda']}" if pytorch["cuda"] else f"HIP {pytorch['hip']}" if pytorch["hip"] else "no GPU build"
    )
    installed = {name: version for name, version in found["packages"].items() if version is not None}
    absent = [name for name, version in found["packages"].items() if version is None]
    sections: dict[str, list[tuple[str, str]]] = {
        "versions": [
            ("replaystate", found["replaystate"]),
            ("python", found["python"]),
            ("platform", found["platform"]),
            ("torch", f"{pytorch['version']}, {build}, threads: {pytorch['threads']}, {pytorch['cpu_capability']}"),
            *installed.items(),
            ("not installed", ", ".join(absent) or "-"),
        ],
        "extras": [(f"[{name}]", _extra_text(extra)) for name, extra in found["extras"].items()],
        "devices": [(device["type"], _device_text(device)) for device in found["devices"]],
        "backends (best first)": [(backend["name"], _usable_text(backend)) for backend in found["backends"]],
        "integrations": [
            ("transformers", _usable_text(found["transformers"])),
            ("flashinfer", _usable_text(found["flashinfer"])),
        ],
    }
    if found["environment"]:
        sections["environment"] = list(found["environment"].items())
    width = 2 + max(len(name) for rows in sections.values() for name, _ in rows)
    blocks = [
        "\n".join([title, *(f"  {name:<{width}}{value}" for name, value in rows)]) for title, rows in sections.items()
    ]
    return "\n\n".join(blocks)


def _backend(info: BackendInfo) -> dict[str, Any]:
    entry: dict[str, Any] = {"name": info.name, "usable": info.usable, "reason": info.reason}
    if info.name == cpu_backend.NAME and info.usable:
        entry["isa"] = cpu_backend.isa()
    return entry


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _extra(needed: tuple[str, ...]) -> dict[str, Any]:
    missing = [name for name in needed if _version(name) is None]
    return {"installed": not missing, "missing": missing}


def _integration_reason() -> str | None:
    """Why `replaystate.transformers` cannot be imported, or None."""
    try:
        importlib.import_module("replaystate.transformers")
    except Exception as error:  # a broken transformers may raise anything, and the report must say what
        return f"{type(error).__name__}: {' '.join(str(error).split())}"
    return None


def _devices() -> list[dict[str, Any]]:
    devices: list[dict[str, Any]] = [{"type": "cpu", "name": _cpu_name(), "cores": _usable_cores()}]
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            devices.append(
                {
                    "type": f"cuda:{index}",
                    "name": properties.name,
                    "capability": f"sm_{properties.major}{properties.minor}",
                    "memory_bytes": properties.total_memory,
                }
            )
    if torch.backends.mps.is_available():
        devices.append({"type": "mps", "name": "Apple GPU"})
    return devices


def _usable_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _device_text(device: dict[str, Any]) -> str:
    parts = [device["name"]]
    if "cores" in device:
        parts.append(f"cores: {device['cores']}")
    if "capability" in device:
        parts += [device["capability"], f"{device['memory_bytes'] / 2**30:.0f} GiB"]
    return ", ".join(parts)


def _usable_text(entry: dict[str, Any]) -> str:
    if not entry["usable"]:
        return f"not usable: {entry['reason']}"
    return f"usable ({entry['isa']})" if "isa" in entry else "usable"


def _extra_text(extra: dict[str, Any]) -> str:
    return "installed" if extra["installed"] else f"missing {', '.join(extra['missing'])}"

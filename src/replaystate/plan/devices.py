"""Devices that a plan can be made for: memory, bandwidth and arithmetic from their makers' pages."""

from __future__ import annotations

from dataclasses import dataclass

from ..errors import ArgumentError


@dataclass(frozen=True)
class Device:
    """One accelerator, or one CPU socket.

    Args:
        name: what the command calls it.
        memory_bytes: its memory, in the decimal gigabytes of the data sheet.
        bytes_per_s: peak bandwidth of that memory.
        flops: peak dense 16-bit matrix arithmetic, without sparsity.
        source: address of the maker's page.
        checked: what the figures were compared with, and when.
    """

    name: str
    memory_bytes: float
    bytes_per_s: float
    flops: float
    source: str
    checked: str


def _device(name: str, gb: float, gb_per_s: float, tflops: float, source: str, checked: str) -> Device:
    return Device(name, gb * 1e9, gb_per_s * 1e9, tflops * 1e12, source, f"2026-12-01: {checked}")


# The makers' pages were out of reach when this table was written; `checked` says what public text repeats the figures.
DEVICES: dict[str, Device] = {
    device.name: device
    for device in (
        _device(
            "A100",
            80,
            2039,
            312,
            "https://www.nvidia.com/en-us/data-center/a100/",
            "SXM, 80 GB: glennklockwood.com/garden/processors/A100, which cites the data sheet",
        ),
        _device(
            "H100",
            80,
            3350,
            989.4,
            "https://www.nvidia.com/en-us/data-center/h100/",
            "SXM: glennklockwood.com/garden/processors/h100",
        ),
        _device(
            "H200",
            141,
            4800,
            989.4,
            "https://www.nvidia.com/en-us/data-center/h200/",
            "SXM: itkb.uw.cz/2026/06/nvidia-h200-vs-b300-precisions-cores.html; benchmarks/results/h200.json has the "
            "copy bandwidth that was measured",
        ),
        _device(
            "B200",
            180,
            7700,
            2250,
            "https://www.nvidia.com/en-us/data-center/hgx/",
            "HGX: datacrunch.io/blog/nvidia-b300-vs-b200-complete-gpu-comparison-to-date, which cites the technical "
            "brief; other pages say 192 GB and 8 TB/s",
        ),
        _device(
            "B300",
            288,
            8000,
            2250,
            "https://www.nvidia.com/en-us/data-center/hgx/",
            "HGX: glennklockwood.com/garden/processors/B300; other pages say more arithmetic",
        ),
        _device(
            "L40S",
            48,
            864,
            362.05,
            "https://www.nvidia.com/en-us/data-center/l40s/",
            "the data sheet's table as mullet.se repeats it",
        ),
        _device(
            "RTX4090",
            24,
            1008,
            165.15,
            "https://www.nvidia.com/en-us/geforce/graphics-cards/40-series/rtx-4090/",
            "waredb.com/processor/nvidia-geforce-rtx-4090; float32 accumulation",
        ),
        _device(
            "MI300X",
            192,
            5300,
            1307.4,
            "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
            "jaredwatkins.com/research/ai-accelerators/amd-instinct/mi300-series (192 GB, 5.3 TB/s, about 1.3 PFLOPS); "
            "1307.4 itself is not confirmed",
        ),
        _device(
            "EPYC-9654",
            384,
            460.8,
            14.7,
            "https://www.amd.com/en/products/processors/server/epyc/4th-generation-9004-and-8004-series/amd-epyc-9654.html",
            "hpctech.co.jp/product/amd-epyc-9004-series: 96 cores, 2.4 GHz, 12 channels of DDR5-4800, from which 460.8 "
            "GB/s and 96 x 2.4 GHz x 64 operations a cycle follow; 384 GB is a choice, 12 modules of 32 GB",
        ),
    )
}
"""Devices by name."""


def find_device(name: str) -> Device:
    """A device of the table; case, spaces and dashes in the name do not matter.

    Raises:
        ArgumentError: an unknown name; the message lists the known ones.

    >>> find_device("rtx 4090").bytes_per_s
    1008000000000.0
    """
    plain = {_plain(known): device for known, device in DEVICES.items()}
    try:
        return plain[_plain(name)]
    except KeyError:
        raise ArgumentError(f"device: expected one of {', '.join(DEVICES)}, got {name!r}") from None


def _plain(name: str) -> str:
    return name.lower().replace(" ", "").replace("-", "").replace("_", "")

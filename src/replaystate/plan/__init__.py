"""Planning: what a model's requests take on a device, how fast decode steps can be, and whether replay pays.

`make_plan(Setting(model, device, ...))` is what `replaystate plan` prints. Everything here is arithmetic on published
sizes: no device is touched, nothing is measured, nothing is downloaded.
"""

from .chart import concurrency_chart
from .cost import StepCost, StepTime, native_step_bytes, window_distribution
from .devices import DEVICES, Device, find_device
from .memory import RequestBytes, max_requests, request_bytes, request_memory_bytes, weight_bytes
from .planner import DraftLength, Plan, Side, Verdict, WindowChoice, best_window, make_plan
from .setting import CACHE_BYTES, DTYPES, WEIGHT_BYTES, Setting

__all__ = [
    "CACHE_BYTES",
    "DEVICES",
    "DTYPES",
    "WEIGHT_BYTES",
    "Device",
    "DraftLength",
    "Plan",
    "RequestBytes",
    "Setting",
    "Side",
    "StepCost",
    "StepTime",
    "Verdict",
    "WindowChoice",
    "best_window",
    "concurrency_chart",
    "find_device",
    "make_plan",
    "max_requests",
    "native_step_bytes",
    "request_bytes",
    "request_memory_bytes",
    "weight_bytes",
    "window_distribution",
]

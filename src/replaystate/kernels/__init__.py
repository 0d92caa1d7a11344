"""Backends: the registry, and one module per backend that computes the ops of `replaystate.ops`."""

from .cpu_backend import step_holds
from .registry import Backend, BackendInfo, Call, backends, fused, select

__all__ = ["Backend", "BackendInfo", "Call", "backends", "fused", "select", "step_holds"]

"""Backends: the registry, and one module per backend that computes the ops of `replaystate.ops`."""

from .registry import Backend, BackendInfo, Call, backends, fused, select

__all__ = ["Backend", "BackendInfo", "Call", "backends", "fused", "select"]

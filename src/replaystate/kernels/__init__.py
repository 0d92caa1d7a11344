"""Backends: the registry, and one module per backend that computes the ops of `replaystate.ops`."""

from .registry import BackendInfo, Call, backends, select

__all__ = ["BackendInfo", "Call", "backends", "select"]

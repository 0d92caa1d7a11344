"""Placeholder until written."""

from __future__ import annotations


def install_adapter() -> None:
    """TODO."""

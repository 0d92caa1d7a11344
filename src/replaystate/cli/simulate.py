"""`replaystate simulate`: its options, and what it prints."""

from __future__ import annotations


def simulate_command() -> None:
    """Simulate."""

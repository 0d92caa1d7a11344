"""Measuring: a timer that compares in turn, the bytes a step must move, and results as JSON. Used by benchmarks/."""

from .bytes_model import StepBytes, step_bytes
from .report import Check, Report, environment
from .timer import Timing, measure, timing

__all__ = ["Check", "Report", "StepBytes", "Timing", "environment", "measure", "step_bytes", "timing"]

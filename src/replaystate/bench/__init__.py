"""Measuring: a timer that compares in turn, the bytes a step must move, results as JSON, and what is made of them.

`cases` and `workloads` say what is timed, `gate` checks it first, `run` times it; `results` reads files back, `compare`
judges two of them, `page` draws them.
"""

from .bytes_model import StepBytes, step_bytes
from .compare import Change, Comparison, compare, run_against
from .page import page
from .report import Check, Report, environment
from .results import Result, ResultFile, read_results
from .timer import Timing, measure, measure_graphs, pinned_threads, timing

__all__ = [
    "Change",
    "Check",
    "Comparison",
    "Report",
    "Result",
    "ResultFile",
    "StepBytes",
    "Timing",
    "compare",
    "environment",
    "measure",
    "measure_graphs",
    "page",
    "pinned_threads",
    "read_results",
    "run_against",
    "step_bytes",
    "timing",
]

"""Simulation of a fleet that serves a model, request by request; what `replaystate simulate` runs.

Needs simpy (extra `simulate`), which `fleet` alone imports.
"""

from .fleet import ROUTERS, Fleet, Log, simulate
from .step_times import MeasuredTimes, RooflineTimes, StepTimes, read_measured
from .study import PERCENTILES, Figures, Study, both, figures
from .workload import TRACES, Workload, decode_steps, poisson, read_trace, synthetic

__all__ = [
    "PERCENTILES",
    "ROUTERS",
    "TRACES",
    "Figures",
    "Fleet",
    "Log",
    "MeasuredTimes",
    "RooflineTimes",
    "StepTimes",
    "Study",
    "Workload",
    "both",
    "decode_steps",
    "figures",
    "poisson",
    "read_measured",
    "read_trace",
    "simulate",
    "synthetic",
]

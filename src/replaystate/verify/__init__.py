"""Numerics of the backends on this machine, against float64.

Every op of a backend runs on small made-up layers: all dtypes that states, rings and inputs may have, several widths
and head ratios, K != V, windows that fold and that do not, rings that wrap, decays to nothing. The truth is
`replaystate.reference` in float64. The limit is the 2x rule: a backend's error may be twice what plain torch makes (a
float32 recurrence, rounded wherever storage rounds), plus `FLOOR`. Nothing that was not named may be read or written.

    error = max over heads and rows of |got - truth| / max over the head's rows of |truth|        |.| over the last dim
"""

from .checks import FLOOR, WIDTHS
from .report import Check, Report, Skip, verify

__all__ = ["FLOOR", "WIDTHS", "Check", "Report", "Skip", "verify"]

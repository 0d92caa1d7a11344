"""The plan: memory, concurrency, step times, the best window and draft length, and whether replay is worth it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, replace
from typing import Any

from ..errors import ArgumentError
from ..shapes import require_int
from .cost import StepCost
from .memory import RequestBytes, max_requests, request_bytes, request_memory_bytes, weight_bytes
from .setting import Setting

WORTH = 1.03
"""Gains below 3 % are not called gains: the model leaves out more than that."""

WINDOWS = (4, 8, 16, 32, 64)
"""Windows that are tried. Larger ones would need rings that are larger than the states."""

NEAR = 1.01
"""A window is as good as the best one within 1 %; of those the smallest is taken, because its rings are."""

MAX_DRAFTS = 15
"""Draft lengths that are tried: 0 to 15, as wide as a window of 16 can hold."""


@dataclass(frozen=True)
class Side:
    """One of the two designs in one setting.

    Args:
        request_bytes: of one request on one device.
        max_requests: that fit at once; 0 where not one does.
        rows: the batch of the figures that follow.
        step_us, gdn_us: predicted time of a step of `rows` rows, and the Gated DeltaNet layers' part of it.
        tokens_per_s: tokens kept, with `rows` rows.
        gdn_tokens_per_s: the same, if the Gated DeltaNet layers were all there is.
        most_tokens_per_s: tokens kept with as many rows as fit.
    """

    request_bytes: float
    max_requests: int
    rows: int
    step_us: float
    gdn_us: float
    tokens_per_s: float
    gdn_tokens_per_s: float
    most_tokens_per_s: float


@dataclass(frozen=True)
class WindowChoice:
    """What a window length costs.

    Args:
        window, ring_slots: W and R.
        ring_bytes: rings of one request.
        fold_share: steps that fold.
        gdn_bytes_per_token: bytes that the Gated DeltaNet layers move for each token kept.
        max_requests: that fit.
    """

    window: int
    ring_slots: int
    ring_bytes: float
    fold_share: float
    gdn_bytes_per_token: float
    max_requests: int


@dataclass(frozen=True)
class DraftLength:
    """Both designs at one draft length."""

    drafts: int
    tokens_per_step: float
    native: Side
    replay: Side


@dataclass(frozen=True)
class Verdict:
    """Whether replay pays in this setting.

    Args:
        worth: it does.
        reasons: sentences, the decisive one first.
    """

    worth: bool
    reasons: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """All that `replaystate plan` prints.

    Args:
        setting: what the plan is for; its window is the chosen one.
        bytes: of a request, on one device.
        weight_bytes, request_memory_bytes: of one device: its weights, and what is left for requests.
        native, replay: the two designs.
        windows: every window tried, of which `setting.window` is the best or the one asked for.
        draft_lengths: both designs from 0 drafts on, each with its own best window unless one was asked for.
        best_drafts: the draft length with the most tokens a second under replay.
        break_even_rows: the smallest batch at which replay is 3 % faster than native; None where there is none that
            native can hold.
        verdict: whether replay pays.
    """

    setting: Setting
    bytes: RequestBytes
    weight_bytes: float
    request_memory_bytes: float
    native: Side
    replay: Side
    windows: tuple[WindowChoice, ...]
    draft_lengths: tuple[DraftLength, ...]
    best_drafts: int
    break_even_rows: int | None
    verdict: Verdict

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        s = self.setting
        setting = {
            name: getattr(s, name)
            for name in (
                "tp context_tokens drafts state_dtype ring_dtype native_state_dtype kv_dtype weight_dtype window "
                "ring_slots memory_share bandwidth_share overhead_us tokens_per_step"
            ).split()
        }
        return {
            "command": "plan",
            "model": asdict(s.model) | {"parameters": s.model.parameters.total},
            "device": asdict(s.device),
            "setting": setting | {"acceptance": list(s.acceptance)},
            "bytes_per_request": asdict(self.bytes)
            | {"replay_total": self.bytes.replay, "native_total": self.bytes.native},
            "weight_bytes": self.weight_bytes,
            "request_memory_bytes": self.request_memory_bytes,
            "native": asdict(self.native),
            "replay": asdict(self.replay),
            "windows": [asdict(choice) for choice in self.windows],
            "draft_lengths": [asdict(length) for length in self.draft_lengths],
            "best_drafts": self.best_drafts,
            "break_even_rows": self.break_even_rows,
            "verdict": asdict(self.verdict),
        }


def make_plan(setting: Setting, *, window: int | None = None, rows: int | None = None) -> Plan:
    """Plan a setting.

    Args:
        setting: the model, the device and the rest; its own window is not looked at.
        window: W; None: `best_window`.
        rows: the batch to compare at; None: as many as both can hold.

    Raises:
        ArgumentError: weights that do not fit; a window or a batch that is no positive number.
    """
    if window is not None:
        require_int("plan", "window", window, minimum=1)
    if rows is not None:
        require_int("plan", "rows", rows, minimum=1)
    request_memory_bytes(setting)  # refuses what does not fit before anything else is said
    tried = window_choices(setting)
    chosen = replace(setting, window=best_window(setting) if window is None else window)
    if window is not None and window not in [choice.window for choice in tried]:
        tried = tuple(sorted((*tried, _choice(chosen)), key=lambda choice: choice.window))
    native, replay = sides(chosen, rows)
    lengths = []
    for drafts in range(MAX_DRAFTS + 1):
        if window is not None and drafts + 1 > window:
            break
        other = replace(setting, drafts=drafts, window=max(WINDOWS) if window is None else window)
        other = replace(other, window=best_window(other) if window is None else window)
        lengths.append(DraftLength(drafts, other.tokens_per_step, *sides(other, rows)))
    best = max(lengths, key=lambda it: it.replay.most_tokens_per_s if rows is None else it.replay.tokens_per_s)
    return Plan(
        setting=chosen,
        bytes=request_bytes(chosen),
        weight_bytes=weight_bytes(chosen),
        request_memory_bytes=request_memory_bytes(chosen),
        native=native,
        replay=replay,
        windows=tried,
        draft_lengths=tuple(lengths),
        best_drafts=best.drafts,
        break_even_rows=break_even_rows(chosen, native.max_requests),
        verdict=verdict(chosen, native, replay, rows=rows),
    )


def sides(setting: Setting, rows: int | None = None) -> tuple[Side, Side]:
    """(native, replay) at the same number of rows, see `make_plan`; one that cannot hold them has fewer."""
    memory, sizes = request_memory_bytes(setting), request_bytes(setting)
    fits = {False: max_requests(memory, sizes.native), True: max_requests(memory, sizes.replay)}
    common = rows if rows is not None else min(filter(None, fits.values()), default=0)

    def side(replay: bool) -> Side:
        cost, used = StepCost(setting, replay), min(common, fits[replay])
        time = cost.step(used)
        kept = used * setting.tokens_per_step
        return Side(
            request_bytes=sizes.replay if replay else sizes.native,
            max_requests=fits[replay],
            rows=used,
            step_us=time.total_s * 1e6,
            gdn_us=time.gdn_s * 1e6,
            tokens_per_s=cost.tokens_per_s(used),
            gdn_tokens_per_s=kept / time.gdn_s if used else 0.0,
            most_tokens_per_s=cost.tokens_per_s(fits[replay]),
        )

    return side(False), side(True)


def window_choices(setting: Setting) -> tuple[WindowChoice, ...]:
    """Every window that can hold a step of this width.

    Raises:
        ArgumentError: none can.
    """
    if setting.tokens > max(WINDOWS):
        raise ArgumentError(f"plan: drafts: expected at most {max(WINDOWS) - 1}, got {setting.drafts}")
    return tuple(_choice(replace(setting, window=window)) for window in WINDOWS if window >= setting.tokens)


def best_window(setting: Setting) -> int:
    """The smallest window whose Gated DeltaNet traffic per token is within 1 % of the least."""
    choices = window_choices(setting)
    least = min(choice.gdn_bytes_per_token for choice in choices)
    return next(choice.window for choice in choices if choice.gdn_bytes_per_token <= NEAR * least)


def _choice(setting: Setting) -> WindowChoice:
    cost = StepCost(setting, replay=True)
    return WindowChoice(
        window=setting.window,
        ring_slots=setting.ring_slots,
        ring_bytes=cost.request.rings,
        fold_share=cost.fold_share,
        gdn_bytes_per_token=cost.gdn_bytes / setting.tokens_per_step,
        max_requests=max_requests(request_memory_bytes(setting), cost.request.replay),
    )


def break_even_rows(setting: Setting, most: int) -> int | None:
    """The smallest batch, up to `most`, at which a native step takes 3 % longer than one under replay.

    Doubling finds the first power of two that gains, and halving the first batch between it and the last that did not.
    """
    native, replay = StepCost(setting, replay=False), StepCost(setting, replay=True)

    def gains(rows: int) -> bool:
        return native.step(rows).total_s >= WORTH * replay.step(rows).total_s

    low, high = 0, 1
    while high <= most and not gains(high):
        low, high = high, 2 * high
    if high > most:
        high = most
        if high < 1 or not gains(high):
            return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if gains(middle) else (middle, high)
    return high


def verdict(setting: Setting, native: Side, replay: Side, *, rows: int | None) -> Verdict:
    """Whether replay pays: 3 % more tokens a second with as many requests as fit, or with the batch asked for."""
    if not replay.max_requests:
        also = f"{native.max_requests} do without it" if native.max_requests else "none without it either"
        return Verdict(False, (f"not one request fits under replay, and {also}",))
    if not native.max_requests:
        return Verdict(True, (f"without replay not one request fits; with it {replay.max_requests} do",))
    faster = replay.tokens_per_s / native.tokens_per_s
    most = replay.most_tokens_per_s / native.most_tokens_per_s
    reasons = []
    if rows is None:
        reasons.append(f"with as many requests as fit, tokens a second are {_times(most)}")
        reasons.append(f"with {native.rows} requests in both they are {_times(faster)}")
    else:
        held = "" if native.rows == replay.rows else f" (native holds {native.rows} of them, replay {replay.rows})"
        reasons.append(f"with {rows} requests{held}, tokens a second are {_times(faster)}")
    if max(faster, most) < WORTH:
        share = native.gdn_us / native.step_us
        reasons.append(f"Gated DeltaNet layers are {share:.0%} of a native step, and only they get faster")
    room = replay.max_requests / native.max_requests
    if room >= WORTH:
        reasons.append(f"{room:.2f}x as many requests fit ({replay.max_requests} against {native.max_requests})")
    elif room < 1:
        rings = request_bytes(setting).rings / 2**20
        reasons.append(
            f"fewer requests fit ({replay.max_requests} against {native.max_requests}): rings take {rings:.1f} MiB each"
            + ("" if setting.drafts else ", and without drafts there are no copies to save")
        )
    return Verdict((most if rows is None else faster) >= WORTH, tuple(reasons))


def _times(ratio: float) -> str:
    if abs(ratio - 1) < WORTH - 1:
        return "the same within 3 %"
    return f"{ratio:.2f}x native's" if ratio > 1 else f"{1 / ratio:.2f}x below native's"

"""What a fleet is asked to do: requests with arrival times, lengths and prefixes, from a file or made up."""

from __future__ import annotations

import math
from array import array
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..checks import parse_json
from ..errors import ArgumentError
from ..shapes import require_int

NO_PREFIX = -1
MOST_TOKENS = 1 << 22  # of a prompt or an output
MOST_REQUESTS = 10_000_000


@dataclass(frozen=True)
class Workload:
    """Requests in the order of their arrival; entry i of every array is request i.

    Args:
        name: of the trace.
        arrival_s: seconds from the start.
        prompt_tokens, output_tokens: at least 1 each.
        prefix: number of the prompt's shared beginning; -1: none.
        prefix_tokens: its length, below prompt_tokens.
    """

    name: str
    arrival_s: array[float]
    prompt_tokens: array[int]
    output_tokens: array[int]
    prefix: array[int]
    prefix_tokens: array[int]

    def __len__(self) -> int:
        return len(self.arrival_s)


@dataclass(frozen=True)
class Lengths:
    """A made-up mix of requests: log-normal lengths, and prompts of which some begin alike.

    Args:
        prompt_median, output_median: medians [tokens].
        prompt_spread, output_spread: standard deviations of the logarithms.
        longest: lengths are cut there.
        prefixes, prefix_tokens, prefix_share: so many different beginnings of so many tokens; the share of the prompts
            that have one, which is then put before the prompt.
    """

    prompt_median: float
    prompt_spread: float
    output_median: float
    output_spread: float
    longest: int
    prefixes: int = 0
    prefix_tokens: int = 0
    prefix_share: float = 0.0


TRACES: dict[str, Lengths] = {
    "chat": Lengths(200, 1.0, 250, 0.8, 8192, 8, 512, 0.8),
    "code": Lengths(1500, 0.9, 150, 0.9, 16384, 64, 1024, 0.5),
    "documents": Lengths(6000, 0.6, 300, 0.6, 32768, 512, 4096, 0.3),
    "reasoning": Lengths(300, 0.7, 3000, 0.8, 32768),
}
"""Made-up mixes by name. They are shaped like the uses they are named after; they are not measured anywhere."""


def synthetic(name: str, requests: int, rate: float, seed: int) -> Workload:
    """A named mix that arrives as a Poisson stream of `rate` requests a second.

    >>> workload = synthetic("chat", 1000, rate=50.0, seed=1)
    >>> len(workload), 15 < workload.arrival_s[-1] < 25
    (1000, True)

    Raises:
        ArgumentError: an unknown name, no requests, or a rate that is not positive.
    """
    if name not in TRACES:
        raise ArgumentError(f"trace: expected one of {', '.join(TRACES)}, or a file, got {name!r}")
    require_int("simulate", "requests", requests, minimum=1)
    if requests > MOST_REQUESTS:
        raise ArgumentError(f"simulate: requests: expected at most {MOST_REQUESTS:,}, got {requests:,}")
    mix, random = TRACES[name], torch.Generator().manual_seed(seed)
    prompts = _lognormal(mix.prompt_median, mix.prompt_spread, mix.longest, requests, random)
    outputs = _lognormal(mix.output_median, mix.output_spread, mix.longest, requests, random)
    has = torch.rand(requests, generator=random) < mix.prefix_share
    number = torch.randint(max(1, mix.prefixes), (requests,), generator=random)
    return Workload(
        name,
        poisson(requests, rate, seed),
        _ints(prompts + has * mix.prefix_tokens),
        _ints(outputs),
        _ints(torch.where(has, number, NO_PREFIX)),
        _ints(has * mix.prefix_tokens),
    )


def poisson(requests: int, rate: float, seed: int) -> array[float]:
    """Arrival times of a Poisson stream.

    Raises:
        ArgumentError: a rate that is not positive and finite.
    """
    if not 0 < rate < math.inf:
        raise ArgumentError(f"simulate: rate: expected a positive number of requests a second, got {rate:g}")
    random = torch.Generator().manual_seed(seed + 1)
    gaps = -torch.log1p(-torch.rand(requests, generator=random, dtype=torch.float64)) / rate
    return array("d", gaps.cumsum(0).tolist())


def read_trace(path: Path, *, rate: float | None = None, requests: int | None = None, seed: int = 0) -> Workload:
    """Requests from a file with one JSON object a line.

    | key | meaning |
    |---|---|
    | prompt_tokens, output_tokens | lengths, at least 1 |
    | arrival_s | seconds from the start, in order; may be left out of every line where `rate` is given |
    | prefix, prefix_tokens | name (a string) and length of a beginning that other prompts share; may be left out |

    Args:
        path: the file.
        rate: replaces the arrival times by a Poisson stream.
        requests: only so many from the beginning.
        seed: of the stream.

    Raises:
        ArgumentError: a file that cannot be read, or a line that is not as above; the message has its number.
    """
    arrival, columns = array("d"), [array("q") for _ in range(4)]
    names: dict[str, int] = {}
    for number, line in _lines(path):
        if requests is not None and len(columns[0]) == requests:
            break
        where = f"{path}:{number}"
        try:
            entry = parse_json(line)
        except ValueError:
            raise ArgumentError(f"{where}: not JSON") from None
        if not isinstance(entry, dict):
            raise ArgumentError(f"{where}: expected a JSON object")
        prompt, output = (_count(entry, key, where, 1) for key in ("prompt_tokens", "output_tokens"))
        shared = _count(entry, "prefix_tokens", where, 0) if "prefix_tokens" in entry else 0
        if shared and not isinstance(entry.get("prefix"), str):
            raise ArgumentError(f"{where}: prefix: expected a name beside prefix_tokens")
        if shared >= prompt:
            raise ArgumentError(f"{where}: prefix_tokens: expected less than prompt_tokens={prompt}, got {shared}")
        prefix = names.setdefault(entry["prefix"], len(names)) if shared else NO_PREFIX
        for column, value in zip(columns, (prompt, output, prefix, shared), strict=True):
            column.append(value)
        if rate is None:
            arrival.append(_time(entry, where, arrival[-1] if arrival else 0.0))
    if not columns[0]:
        raise ArgumentError(f"{path}: no requests in it")
    if rate is not None:
        arrival = poisson(len(columns[0]), rate, seed)
    return Workload(path.name, arrival, *columns)


def _lines(path: Path) -> Iterator[tuple[int, str]]:
    try:
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, 1):
                if line.strip():
                    yield number, line
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ArgumentError(f"trace: {path}: {reason}") from None


def _count(entry: dict[str, Any], key: str, where: str, minimum: int) -> int:
    value = entry.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= MOST_TOKENS:
        raise ArgumentError(f"{where}: {key}: expected an integer in {minimum}..{MOST_TOKENS}, got {value!r}")
    return value


def _time(entry: dict[str, Any], where: str, last: float) -> float:
    value = entry.get("arrival_s")
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise ArgumentError(f"{where}: arrival_s: expected seconds from 0 on (or give a rate), got {value!r}")
    if value < last:
        raise ArgumentError(f"{where}: arrival_s: expected no earlier than the line before, {last:g}, got {value:g}")
    return float(value)


def _lognormal(median: float, spread: float, longest: int, count: int, random: torch.Generator) -> torch.Tensor:
    normal = torch.randn(count, generator=random, dtype=torch.float64)
    return (median * torch.exp(spread * normal)).round().clamp(1, longest).long()


def _ints(values: torch.Tensor) -> array[int]:
    return array("q", values.tolist())


def decode_steps(workload: Workload, accepted: list[float], seed: int) -> array[int]:
    """For each request the steps that make its tokens after the first, each step drawn from `accepted`.

    Step j of a request keeps a_j tokens, P(a_j = c) = accepted[c-1]; the answer is the smallest n with
    a_1 + ... + a_n >= output_tokens - 1.

    Cost: one random number per step; 100,000 requests of 250 tokens take about a second on one core.
    """
    wanted = torch.tensor(workload.output_tokens, dtype=torch.int64) - 1
    if accepted[0] == 1.0:
        return array("q", wanted.tolist())
    random = torch.Generator().manual_seed(seed + 2)
    edges = torch.tensor(accepted, dtype=torch.float64).cumsum(0)[:-1]
    steps = torch.zeros_like(wanted)
    left = wanted.nonzero().flatten()
    need = wanted[left]
    while left.numel():
        # As many draws as the request with the most tokens needs at least; rows in blocks, to bound the memory.
        width = int(min(256, max(8, -(-int(need.max()) // len(accepted)))))
        over = torch.zeros(left.numel(), dtype=torch.bool)
        for begin in range(0, left.numel(), 20_000):
            block = slice(begin, begin + 20_000)
            size = min(20_000, left.numel() - begin)
            draws = torch.rand(size, width, generator=random, dtype=torch.float64)
            kept = 1 + torch.bucketize(draws, edges, right=True)
            total = kept.cumsum(1)
            done = total >= need[block].unsqueeze(1)
            ends = done.any(1)
            steps[left[block]] += torch.where(ends, done.int().argmax(1) + 1, width)
            over[block] = ends
            need[block] -= total[:, -1]
        left, need = left[~over], need[~over]
    return array("q", steps.tolist())

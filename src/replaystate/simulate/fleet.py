"""The simulation: replicas with continuous batching behind a router, as simpy processes. The only importer of simpy.

A replica runs step after step. Each running request has T tokens in every step; prompts are filled in, in the order of
arrival, with what the step's token budget leaves. Requests join and leave between steps.

One event per step would be too many. Steps that follow each other with the same requests are one event, a *run*: it
ends at the first step in which a request finishes, memory runs out, or one that has just arrived can join. So the
number of events grows with the requests, not with their tokens.

Exact: when requests arrive, how many steps each takes (drawn token by token), in which step each starts and ends, step
times at both ends of a run. Approximated: within a run a request's tokens grow evenly, by its own mean per step, and
step times grow evenly between the ends of the run; latencies between tokens are kept in bins of 1.2 %; a prefix that is
found again is read at no cost, but its KV is counted for every request that uses it.
"""

from __future__ import annotations

import heapq
import math
from array import array
from collections import OrderedDict, deque
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from ..errors import ArgumentError, MissingDependencyError
from ..shapes import require_int
from .step_times import StepTimes
from .workload import NO_PREFIX, Workload

try:
    import simpy
except ImportError as error:
    raise MissingDependencyError("simulate: needs simpy: pip install 'replaystate[simulate]'") from error

ROUTERS = ("round-robin", "least-loaded")
BINS_PER_DECADE = 192  # 1.2 % wide
MOST_REPLICAS = 1_000_000
WATERMARK = 0.01
"""Share of the memory that must stay free when a request joins others, so that it is not thrown out at once."""


@dataclass(frozen=True)
class Fleet:
    """Replicas, and what each can hold.

    Args:
        replicas: how many.
        max_rows: requests that run at once in one.
        token_budget: tokens of a step, decoded and filled.
        tokens: T, of a running request in a step.
        memory_bytes: for requests, of each device of a replica.
        fixed_bytes, kv_bytes_per_token: of a request, on each device.
        prefix_bytes: of a kept prefix, beside its KV: one state. Prefixes are kept in free memory, least recently used
            thrown out first.
        router: "round-robin", or "least-loaded": the replica with the fewest requests, the first of those.
    """

    replicas: int
    max_rows: int
    token_budget: int
    tokens: int
    memory_bytes: float = math.inf
    fixed_bytes: float = 0.0
    kv_bytes_per_token: float = 0.0
    prefix_bytes: float = 0.0
    router: str = "least-loaded"

    def __post_init__(self) -> None:
        for name in ("replicas", "max_rows", "token_budget", "tokens"):
            require_int("simulate", name, getattr(self, name), minimum=1)
        if self.replicas > MOST_REPLICAS:
            raise ArgumentError(f"simulate: replicas: expected at most {MOST_REPLICAS:,}, got {self.replicas:,}")
        if self.router not in ROUTERS:
            raise ArgumentError(f"simulate: router: expected one of {', '.join(ROUTERS)}, got {self.router!r}")
        if self.token_budget <= self.max_rows * self.tokens:
            raise ArgumentError(
                f"simulate: token_budget: expected more than max_rows x tokens = {self.max_rows} x {self.tokens}, so "
                f"that prompts have room beside a full batch, got {self.token_budget}"
            )
        if not self.memory_bytes > 0:
            raise ArgumentError(f"simulate: memory_bytes: expected a positive number, got {self.memory_bytes:g}")


@dataclass
class Log:
    """What happened; entry i of an array is request i.

    Args:
        first_s, finish_s: when the first and the last token came; NaN for a request that no replica can hold.
        gaps: seconds between deliveries of a request, as counts by bin; a step delivers one to T tokens.
        steps: decode and fill steps of all replicas; events: how many times a replica acted.
        rows: requests in decode steps, summed over steps.
        busy_s: time that replicas worked, summed.
    """

    first_s: array[float]
    finish_s: array[float]
    gaps: dict[int, int] = field(default_factory=dict)
    rejected: int = 0
    preemptions: int = 0
    prefix_hits: int = 0
    prefix_misses: int = 0
    steps: int = 0
    rows: int = 0
    events: int = 0
    busy_s: float = 0.0

    def add_gaps(self, seconds: float, count: int) -> None:
        """Count deliveries that came so long after the one before."""
        key = math.floor(math.log10(max(seconds, 1e-9)) * BINS_PER_DECADE)
        self.gaps[key] = self.gaps.get(key, 0) + count


def simulate(workload: Workload, fleet: Fleet, times: StepTimes, steps: array[int]) -> Log:
    """Run all requests to their ends.

    Args:
        workload: the requests.
        fleet: who serves them.
        times: seconds of a step.
        steps: decode steps of each request after its first token, see `decode_steps`.

    Cost: about 0.1 ms of one core for each request, see benchmarks/results/simulate. The same arguments give the same
    bits.
    """
    count = len(workload)
    log = Log(array("d", [math.nan]) * count, array("d", [math.nan]) * count)
    env = simpy.Environment()
    router = _Router(fleet)
    router.replicas = [_Replica(env, i, workload, fleet, times, steps, log, router) for i in range(fleet.replicas)]
    env.process(_arrivals(env, workload, fleet, log, router))
    env.run()
    return log


def _arrivals(env: Any, workload: Workload, fleet: Fleet, log: Log, router: _Router) -> Generator[Any, None, None]:
    for request, at in enumerate(workload.arrival_s):
        if at > env.now:
            yield env.timeout(at - env.now)
        most = workload.prompt_tokens[request] + workload.output_tokens[request] + fleet.tokens
        if fleet.fixed_bytes + most * fleet.kv_bytes_per_token > fleet.memory_bytes:
            log.rejected += 1
        else:
            router.pick().submit(request)


class _Router:
    """Picks replicas. Loads are kept in a heap whose old entries are skipped."""

    def __init__(self, fleet: Fleet) -> None:
        self._even = fleet.router == "round-robin"
        self._next = 0
        self._loads = [0] * fleet.replicas
        self._heap = [(0, i) for i in range(fleet.replicas)]
        self.replicas: list[_Replica] = []

    def pick(self) -> _Replica:
        if self._even:
            self._next += 1
            return self.replicas[(self._next - 1) % len(self.replicas)]
        while self._heap[0][0] != self._loads[self._heap[0][1]]:
            heapq.heappop(self._heap)
        return self.replicas[self._heap[0][1]]

    def changed(self, replica: int, by: int) -> None:
        if not self._even:
            self._loads[replica] += by
            heapq.heappush(self._heap, (self._loads[replica], replica))


class _Live:
    """A request inside a replica."""

    __slots__ = ("finish", "left", "order", "per_step", "start", "tokens")

    def __init__(self, order: int, tokens: int, left: int) -> None:
        self.order = order  # of joining
        self.tokens = tokens  # held when filled
        self.left = left  # still to fill
        self.start = self.finish = 0  # decode steps of the replica between which it runs
        self.per_step = 0.0  # tokens that it gains a step


class _Replica:
    """One copy of the model: a process that admits, runs, and lets go."""

    def __init__(
        self,
        env: Any,
        number: int,
        workload: Workload,
        fleet: Fleet,
        times: StepTimes,
        steps: array[int],
        log: Log,
        router: _Router,
    ) -> None:
        self._env, self._number, self._work, self._fleet = env, number, workload, fleet
        self._times, self._steps, self._log, self._router = times, steps, log, router
        self._waiting: deque[int] = deque()
        self._resumed: dict[int, tuple[int, int, float]] = {}  # thrown out: tokens made, steps left, when
        self._live: dict[int, _Live] = {}  # in the order of joining
        self._filling: deque[int] = deque()
        self._running: list[tuple[int, int, int]] = []  # heap of (finish, order, request); old entries are skipped
        self._rows = 0
        self._step = 0  # decode steps so far
        self._joined = 0
        self._kv = 0.0  # tokens of running requests
        self._growth = 0.0  # tokens that they gain a step
        self._reserved = 0  # tokens of requests being filled
        self._prefixes: OrderedDict[int, float] = OrderedDict()
        self._prefix_bytes = 0.0
        self._idle: Any = None
        self._in_run = False
        self._process = env.process(self._serve())

    def submit(self, request: int) -> None:
        """Take a request from the router."""
        self._router.changed(self._number, 1)
        alone = not self._waiting
        self._waiting.append(request)
        if self._idle is not None:
            self._idle.succeed()
            self._idle = None
        elif self._in_run and alone and self._has_room(request):
            self._in_run = False
            self._process.interrupt()

    # --- memory -------------------------------------------------------------------------------------------------------

    def _used(self) -> float:
        f = self._fleet
        return len(self._live) * f.fixed_bytes + (self._kv + self._reserved) * f.kv_bytes_per_token

    def _tokens_of(self, request: int) -> int:
        made = self._resumed[request][0] if request in self._resumed else 0
        return self._work.prompt_tokens[request] + made

    def _has_room(self, request: int) -> bool:
        f = self._fleet
        if len(self._live) >= f.max_rows:
            return False
        need = f.fixed_bytes + (self._tokens_of(request) + f.tokens) * f.kv_bytes_per_token
        kept_free = WATERMARK * f.memory_bytes if self._live and f.memory_bytes < math.inf else 0.0
        return self._used() + need + kept_free <= f.memory_bytes

    def _shrink_prefixes(self, need: float) -> None:
        """Throw prefixes out until so many bytes are free beside the requests."""
        while self._prefixes and self._used() + self._prefix_bytes + need > self._fleet.memory_bytes:
            self._prefix_bytes -= self._prefixes.popitem(last=False)[1]

    def _steps_that_fit(self) -> float:
        """Steps until memory is full; throws the youngest requests out until one fits."""
        f = self._fleet
        while True:
            grows = self._growth * f.kv_bytes_per_token
            if grows <= 0:
                return math.inf
            fit = math.floor((f.memory_bytes - self._used()) / grows) if f.memory_bytes < math.inf else math.inf
            if fit >= 1 or len(self._live) == 1:
                self._shrink_prefixes(grows)
                return max(1, fit)
            self._preempt(next(reversed(self._live)))

    def _preempt(self, request: int) -> None:
        live = self._live.pop(request)
        if live.finish:
            ran = self._step - live.start
            made = live.tokens - self._work.prompt_tokens[request] + math.floor(live.per_step * ran)
            made = min(made, self._work.output_tokens[request] - 1)
            self._resumed[request] = made, live.finish - self._step, self._env.now
            self._leave(live, live.tokens + live.per_step * ran)
        else:
            self._filling.remove(request)
            self._reserved -= live.tokens
        self._waiting.appendleft(request)
        self._log.preemptions += 1

    def _leave(self, live: _Live, tokens: float) -> None:
        self._rows -= 1
        self._kv -= tokens
        self._growth -= live.per_step
        if not self._rows:
            self._kv = self._growth = 0.0  # rounding does not add up over a long simulation

    # --- requests -----------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self._waiting and self._has_room(self._waiting[0]):
            request = self._waiting.popleft()
            tokens = left = self._tokens_of(request)
            prefix = self._work.prefix[request]
            if prefix != NO_PREFIX:
                if prefix in self._prefixes:
                    self._prefixes.move_to_end(prefix)
                    self._log.prefix_hits += 1
                    left -= self._work.prefix_tokens[request]
                else:
                    self._log.prefix_misses += 1
            self._joined += 1
            self._live[request] = _Live(self._joined, tokens, left)
            self._filling.append(request)
            self._reserved += tokens
            self._shrink_prefixes(0.0)

    def _filled(self, request: int) -> None:
        """The prompt is in: the first token is out, and decoding begins."""
        live, work, now = self._live[request], self._work, self._env.now
        self._reserved -= live.tokens
        self._keep_prefix(request)
        made, steps = 1, self._steps[request]
        if request in self._resumed:
            made, steps, since = self._resumed.pop(request)
            self._log.add_gaps(now - since, 1)
        else:
            self._log.first_s[request] = now
        if not steps:
            del self._live[request]
            self._finished(request)
            return
        live.tokens = work.prompt_tokens[request] + made
        live.start, live.finish = self._step, self._step + steps
        live.per_step = (work.output_tokens[request] - made) / steps
        self._rows += 1
        self._kv += live.tokens
        self._growth += live.per_step
        heapq.heappush(self._running, (live.finish, live.order, request))

    def _keep_prefix(self, request: int) -> None:
        prefix, f = self._work.prefix[request], self._fleet
        if prefix == NO_PREFIX or prefix in self._prefixes:
            return
        size = f.prefix_bytes + self._work.prefix_tokens[request] * f.kv_bytes_per_token
        self._shrink_prefixes(size)
        if self._used() + self._prefix_bytes + size <= f.memory_bytes:
            self._prefixes[prefix] = size
            self._prefix_bytes += size

    def _finished(self, request: int) -> None:
        self._log.finish_s[request] = self._env.now
        self._router.changed(self._number, -1)

    def _next_finish(self) -> int:
        while True:
            finish, order, request = self._running[0]
            live = self._live.get(request)
            if live is not None and live.order == order and live.finish:
                return finish
            heapq.heappop(self._running)

    def _advance(self, steps: int, seconds: float) -> None:
        """Account for decode steps that are over, and let the requests that they finish go."""
        log = self._log
        log.steps += steps
        log.events += 1
        log.busy_s += seconds
        if not self._rows:
            return
        self._step += steps
        self._kv += self._growth * steps
        log.rows += self._rows * steps
        log.add_gaps(seconds / steps, self._rows * steps)
        while self._rows and self._next_finish() <= self._step:
            request = heapq.heappop(self._running)[2]
            live = self._live.pop(request)
            self._leave(live, self._work.prompt_tokens[request] + self._work.output_tokens[request])
            self._finished(request)

    # --- the process --------------------------------------------------------------------------------------------------

    def _serve(self) -> Generator[Any, None, None]:
        env, f = self._env, self._fleet
        while True:
            if not self._live and not self._waiting:
                self._idle = env.event()
                yield self._idle
            self._admit()
            fit = self._steps_that_fit()
            if self._filling:
                yield from self._fill_step(f.token_budget - self._rows * f.tokens)
            elif self._rows:
                yield from self._decode_run(int(min(fit, self._next_finish() - self._step)))

    def _fill_step(self, budget: int) -> Generator[Any, None, None]:
        """One step with prompt tokens in it."""
        taken, complete = 0, 0
        for request in self._filling:
            live = self._live[request]
            chunk = min(live.left, budget - taken)
            live.left -= chunk
            taken += chunk
            if live.left:
                break
            complete += 1
        seconds = self._times.seconds(self._rows, self._kv, taken)
        yield self._env.timeout(seconds)
        self._advance(1, seconds)
        for _ in range(complete):
            self._filled(self._filling.popleft())

    def _decode_run(self, steps: int) -> Generator[Any, None, None]:
        """Steps without prompts; an arrival that can join ends them early."""
        env = self._env
        first = self._times.seconds(self._rows, self._kv, 0)
        slope = 0.0
        if steps > 1:
            last = self._times.seconds(self._rows, self._kv + self._growth * (steps - 1), 0)
            slope = (last - first) / (steps - 1)

        def time_of(count: int) -> float:
            return count * first + slope * count * (count - 1) / 2

        began = env.now
        self._in_run = True
        try:
            yield env.timeout(time_of(steps))
        except simpy.Interrupt:
            elapsed = env.now - began
            half, linear = slope / 2, first - slope / 2
            if abs(half) * steps > 1e-12 * linear:
                exact = (math.sqrt(max(0.0, linear * linear + 4 * half * elapsed)) - linear) / (2 * half)
            else:
                exact = elapsed / first
            steps = min(steps, max(1, math.ceil(exact - 1e-9)))
            yield env.timeout(max(0.0, time_of(steps) - elapsed))
        self._in_run = False
        self._advance(steps, time_of(steps))

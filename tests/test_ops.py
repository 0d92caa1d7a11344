"""The torch ops: schemas that tell the truth, and compiled graphs that give the eager bits.

In plain words: `torch.library.opcheck` runs each op against its schema, its fake and the compiler's functionalisation.
Then whole calls of the public functions are compiled with `fullgraph=True` and run several times with cursors that
change in between; every output, pool and cursor must have the bits of an eager twin, without a new compilation.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from replaystate import ReplayCache, gated_delta_rule, replay_step
from replaystate.errors import ArgumentError, ShapeError, SlotError

from .helpers import (
    SHAPE,
    Inputs,
    assert_same_bits,
    bounds_of,
    device_semantics,
    layer_tensors,
    put_window,
    random_inputs,
    random_state,
    run_step,
)

F32, F16 = torch.float32, torch.float16
OPS = torch.ops.replaystate


def filled(num_layers: int = 2, state_dtype: torch.dtype = F16) -> ReplayCache:
    """Slots with an empty, a short and a full wrapped window; no NaN, so that opcheck can compare by value."""
    cache = ReplayCache(SHAPE, num_layers, 5, state_dtype=state_dtype)
    for slot, (count, start) in {1: (0, 0), 2: (5, 3), 3: (16, 25)}.items():
        put_window(cache, slot, count, start, seed=slot)
    return cache


def pools(cache: ReplayCache) -> tuple[list[Tensor], ...]:
    """Checkpoints, u, k and g rings, each a list over layers."""
    return tuple(list(x) for x in zip(*(layer_tensors(cache, i) for i in range(cache.num_layers)), strict=True))


def int32(*values: int) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def step_arguments() -> tuple[Any, ...]:
    cache, x = filled(1), random_inputs(tokens=4)
    records = torch.zeros(5, 1, dtype=torch.int32)
    return (
        *x, *layer_tensors(cache, 0), cache.ring_start, cache.num_committed, records, cache.status,
        torch.zeros(4, 4, 10), torch.tensor([3, 0, 2]), bounds_of([2, 1, 1]), 0, 8, 16, 0, 0.25, "auto",
    )  # fmt: skip


def commit_arguments() -> tuple[Any, ...]:
    cache = filled()
    records = torch.zeros(5, 2, dtype=torch.int32)
    records[2] = (8 << 16) | 3
    return (
        torch.tensor([2, -1]), torch.tensor([2, 0]), cache.ring_start, cache.num_committed, records, cache.status, 16,
        32, 0, "auto",
    )  # fmt: skip


def materialize_arguments() -> tuple[Any, ...]:
    cache = filled()
    return (
        *pools(cache), torch.tensor([3, 0]), torch.tensor([4, 1]), torch.tensor([9, 0]), cache.ring_start,
        cache.num_committed, torch.zeros(5, 2, dtype=torch.int32), cache.status, 16, 0, "auto",
    )  # fmt: skip


def flush_arguments() -> tuple[Any, ...]:
    cache = filled()
    return (
        *pools(cache), torch.tensor([3, 2]), cache.ring_start, cache.num_committed,
        torch.zeros(5, 2, dtype=torch.int32), cache.status, 16, 0, "auto",
    )  # fmt: skip


def read_arguments() -> tuple[Any, ...]:
    cache = filled()
    return (*layer_tensors(cache, 1), torch.tensor([3, 0]), cache.ring_start, cache.num_committed, 16, 0, "auto")


def prefill_arguments() -> tuple[Any, ...]:
    return (*random_inputs(tokens=5), random_state(rows=2), bounds_of([2, 3]), *SHAPE.sizes, 0.25, "auto")


def kernel_arguments() -> tuple[Any, ...]:
    cache, x = filled(1, F32), random_inputs(tokens=4)
    H, HV, K, V = SHAPE.sizes
    q, k, v = (t.contiguous() for t in x.mixed_qkv.split([H * K, H * K, HV * V], dim=-1))
    state, u_ring, k_ring, g_ring = layer_tensors(cache, 0)
    return (
        q.view(2, 2, H, K), k.view(2, 2, H, K), v.view(2, 2, HV, V), x.a.view(2, 2, HV), x.b.view(2, 2, HV), x.A_log,
        x.dt_bias, state, u_ring, k_ring, g_ring, int32(3, -1), int32(16, 0), int32(25, 0), torch.zeros(2, 2, HV, V),
        15, True, 0.25, "auto",
    )  # fmt: skip


def prefix_arguments() -> tuple[Any, ...]:
    state, u, k, g = layer_tensors(filled(1), 0)
    return (state, int32(3, 2), int32(4, 1), k, u, g, int32(25, 3), int32(9, 2), int32(0, -1), int32(1), "auto")


ARGUMENTS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "replay_step": step_arguments,
    "commit": commit_arguments,
    "materialize": materialize_arguments,
    "flush": flush_arguments,
    "read_state": read_arguments,
    "gated_delta_rule": prefill_arguments,
    "ucache_flush": kernel_arguments,
    "prefix_materialize": prefix_arguments,
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_opcheck(name: str) -> None:
    torch.library.opcheck(getattr(OPS, name).default, ARGUMENTS[name]())


@pytest.mark.parametrize("name", ARGUMENTS)
def test_schemas_say_exactly_what_is_mutated(name: str) -> None:
    op = getattr(OPS, name).default
    arguments = ARGUMENTS[name]()
    before = copy.deepcopy(arguments)
    op(*arguments)
    for argument, old, new in zip(op._schema.arguments, before, arguments, strict=True):
        marked = argument.alias_info is not None and argument.alias_info.is_write
        if isinstance(new, Tensor):
            old, new = [old], [new]
        if isinstance(new, list) and not marked:
            for x, y in zip(old, new, strict=True):
                assert_same_bits(y, x, argument.name)


@pytest.mark.parametrize("name", ["replay_step", "commit", "materialize", "flush"])
def test_status_is_marked_where_it_may_be_written(name: str) -> None:
    # On the host these calls raise instead, so no run above writes a bit; on a device they do.
    (status,) = [x for x in getattr(OPS, name).default._schema.arguments if x.name == "status"]
    assert status.alias_info is not None
    assert status.alias_info.is_write


def test_a_commit_on_a_device_writes_only_what_is_marked() -> None:
    op, arguments = OPS.commit.default, commit_arguments()
    arguments[1].fill_(9)
    before = copy.deepcopy(arguments)
    with device_semantics():
        op(*arguments)
    written = {
        argument.name
        for argument, old, new in zip(op._schema.arguments, before, arguments, strict=True)
        if isinstance(new, Tensor) and not torch.equal(old, new)
    }
    assert written == {"num_committed", "step_records", "status"}


def test_outputs_alias_no_input() -> None:
    for name in ("read_state", "gated_delta_rule"):
        arguments = ARGUMENTS[name]()
        inputs = {x.untyped_storage().data_ptr() for x in arguments if isinstance(x, Tensor)}
        results = getattr(OPS, name)(*arguments)
        for x in results if isinstance(results, tuple) else (results,):
            assert x.untyped_storage().data_ptr() not in inputs


def changed(arguments: tuple[Any, ...], **at: Any) -> tuple[Any, ...]:
    """The arguments with those at position i<number> replaced."""
    return tuple(at.get(f"i{i}", x) for i, x in enumerate(arguments))


# What the public functions cannot get wrong, but a direct call of an op can.
@pytest.mark.parametrize(
    ("name", "change", "error", "match"),
    [
        ("replay_step", {"i16": 1}, ArgumentError, "layer: expected 0..0, got 1"),
        ("materialize", {"i1": []}, ShapeError, "expected one tensor a layer in each"),
        ("flush", {f"i{i}": [] for i in range(4)}, ShapeError, "expected one tensor a layer in each"),
        ("read_state", {"i4": torch.tensor([5])}, SlotError, "slots: expected slots below 5"),
    ],
)
def test_ops_check_their_own_arguments(name: str, change: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=f"^{name}: .*{match}"):
        getattr(OPS, name)(*changed(ARGUMENTS[name](), **change))


def test_layers_of_different_shape_are_refused() -> None:
    arguments = flush_arguments()
    arguments[0][1] = torch.zeros(5, 4, 10, 13, dtype=F16)
    arguments[2][1] = torch.zeros(5, 2, 32, 13, dtype=F16)
    with pytest.raises(ShapeError, match=r"^flush: states, k_rings: expected the same shapes"):
        OPS.flush(*arguments)


def test_every_op_is_listed_here() -> None:
    defined = {
        name.partition("::")[2] for name in torch._C._dispatch_get_all_op_names() if name.startswith("replaystate::")
    }
    # The adapter's step runs on device backends only; tests/gpu has it.
    assert defined - {"adapter_step"} == set(ARGUMENTS)


# --- compiled ------------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def _no_state_between_compilations() -> Any:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


class Compiled:
    """A function compiled as one graph, which counts how often it was compiled."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.count = 0
        backend = torch._dynamo.lookup_backend("aot_eager")

        def counting(graph: torch.fx.GraphModule, inputs: list[Tensor], **options: Any) -> Callable[..., Any]:
            self.count += 1
            return backend(graph, inputs, **options)

        self._function = torch.compile(function, fullgraph=True, backend=counting, dynamic=False)

    def __call__(self, *arguments: Any) -> Any:
        return self._function(*arguments)


def assert_twins(first: ReplayCache, second: ReplayCache) -> None:
    for layer in range(first.num_layers):
        for x, y in zip(layer_tensors(first, layer), layer_tensors(second, layer), strict=True):
            assert_same_bits(x, y)
    for word in ("ring_start", "num_committed", "status"):
        assert_same_bits(getattr(first, word), getattr(second, word), word)


def test_a_compiled_step_with_changing_cursors() -> None:
    cache, twin = filled(), filled()
    slots, bounds = torch.tensor([3, 0, 2, 1]), bounds_of([3, 1, 4, 2])

    def step(x: Inputs, y: Inputs) -> tuple[Tensor, Tensor]:
        return (
            replay_step(*x, cache, 0, slots, bounds, executed_width=4),
            replay_step(*y, cache, 1, slots, bounds, executed_width=4),
        )

    compiled = Compiled(lambda *tensors: step(Inputs(*tensors[:5]), Inputs(*tensors[5:])))
    for turn in range(5):  # folds, wraps
        x, y = random_inputs(tokens=10, seed=turn), random_inputs(tokens=10, seed=turn + 50)
        outs = compiled(*x, *y)
        expected = [replay_step(*t, twin, i, slots, bounds, executed_width=4) for i, t in enumerate((x, y))]
        for out, want in zip(outs, expected, strict=True):
            assert_same_bits(out, want, f"turn {turn}")
        for c in (cache, twin):
            c.commit(slots, [3, 1, turn % 5, 1])
        assert_twins(cache, twin)
    assert compiled.count == 1


def test_a_compiled_step_writes_into_out() -> None:
    cache, twin = filled(1), filled(1)
    buffer = torch.zeros(2, 50)
    out = buffer[:, 5:45].view(2, 4, 10)
    bounds = bounds_of([2])

    def step(*x: Tensor) -> Tensor:
        return replay_step(*x, cache, 0, [2], bounds, out=out)

    x = random_inputs(tokens=2)
    result = Compiled(step)(*x)
    assert result.data_ptr() == out.data_ptr()
    assert_same_bits(out, replay_step(*x, twin, 0, [2], bounds))
    assert buffer[:, :5].eq(0).all()
    assert_twins(cache, twin)


def test_a_compiled_commit_with_changing_counts() -> None:
    cache, twin = filled(), filled()
    slots = torch.tensor([2, 3, -1])
    commit = Compiled(lambda accepted: cache.commit(slots, accepted))
    for turn in range(4):
        accepted = torch.tensor([turn, 4 - turn, 77])
        for c in (cache, twin):
            run_step(c, [3, 2], [4, 4], width=4, seed=turn)
        commit(accepted)
        twin.commit(slots, accepted)
        assert_twins(cache, twin)
    assert commit.count == 1


def test_a_compiled_materialize_with_changing_windows() -> None:
    cache, twin = filled(), filled()
    materialize = Compiled(lambda src, dst, count: cache.materialize(src, dst, count))
    for turn in range(3):
        for c in (cache, twin):
            run_step(c, [2], [4], width=4, accepted=3, seed=turn)
        arguments = (torch.tensor([2, 3]), torch.tensor([4, 1]), torch.tensor([2 + turn, 9]))
        materialize(*arguments)
        twin.materialize(*arguments)
        assert_twins(cache, twin)
    assert materialize.count == 1


def test_a_compiled_prefill() -> None:
    bounds = bounds_of([2, 0, 4])

    def prefill(*tensors: Tensor) -> tuple[Tensor, Tensor]:
        return gated_delta_rule(*tensors[:5], SHAPE, bounds, initial_state=tensors[5])

    compiled = Compiled(prefill)
    for turn in range(2):
        x, state = random_inputs(tokens=6, seed=turn), random_state(rows=3, seed=turn)
        for mine, theirs in zip(compiled(*x, state), prefill(*x, state), strict=True):
            assert_same_bits(mine, theirs)
    assert compiled.count == 1


def test_one_graph_of_a_whole_model_step() -> None:
    # Step, commit and the state of a block boundary in one graph: the compiler must keep their order.
    cache, twin = filled(1), filled(1)
    slots, bounds = torch.tensor([2]), bounds_of([3])

    def model_step(target: ReplayCache, *x: Tensor) -> Tensor:
        y = replay_step(*x, target, 0, slots, bounds, executed_width=4)
        target.commit(slots, torch.tensor([3]))
        target.materialize(slots, torch.tensor([4]), torch.tensor([2]))
        return y

    compiled = Compiled(lambda *x: model_step(cache, *x))
    for turn in range(3):
        x = random_inputs(tokens=3, seed=turn)
        assert_same_bits(compiled(*x), model_step(twin, *x))
        assert_twins(cache, twin)


def test_checks_still_run_under_compile() -> None:
    cache = filled(1)
    bounds = bounds_of([2])
    compiled = Compiled(lambda *x: replay_step(*x, cache, 0, [2], bounds, executed_width=1))
    with pytest.raises(ArgumentError, match="slot 2 has 2 tokens, more than executed_width=1"):
        compiled(*random_inputs(tokens=2))

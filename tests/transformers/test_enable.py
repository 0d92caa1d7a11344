"""enable and disable: what they take, what they leave behind, and what they refuse."""

import copy
import subprocess
import sys

import pytest
import torch
from torch import nn

import replaystate.transformers.compat as compat
from replaystate.errors import (
    ArgumentError,
    DTypeError,
    MissingDependencyError,
    ProtocolError,
    ReplayStateError,
    UnsupportedModelError,
)
from replaystate.transformers import ReplayStats, disable, enable, is_enabled, make_cache, stats

from .models import CACHE, KINDS, greedy, make_llama, make_model, noisy_copy, prompt, returned_cache

RANGE = "transformers >= 5.17, < 6"


def attributes(model):
    return {name: set(vars(module)) for name, module in model.named_modules()}


@pytest.mark.parametrize("kind", KINDS)
def test_disable_restores_stock_bit_for_bit(kind):
    model, ids = make_model(kind), prompt()
    before = attributes(model)
    arguments = {"output_logits": True, "return_dict_in_generate": True}
    stock = greedy(model, ids, 40, **arguments)
    assert enable(model) is model
    assert is_enabled(model)
    greedy(model, ids, 40, prompt_lookup_num_tokens=3)
    assert disable(model) is model
    assert not is_enabled(model)
    assert attributes(model) == before
    again = greedy(model, ids, 40, **arguments)
    assert torch.equal(torch.stack(again.logits), torch.stack(stock.logits))
    assert type(returned_cache(again)).__name__ == "DynamicCache"
    with pytest.raises(ValueError, match="assisted generation is not supported with stateful models"):
        greedy(model, ids, 4, prompt_lookup_num_tokens=3)


def test_only_this_instance_is_changed():
    model, other, ids = make_model(), make_model(), prompt()
    stock = greedy(other, ids, 20)
    enable(model)
    assert not is_enabled(other)
    with pytest.raises(ValueError, match="stateful"):
        greedy(other, ids, 4, prompt_lookup_num_tokens=3)
    assert greedy(other, ids, 20).tolist() == stock.tolist()
    assert type(returned_cache(greedy(other, ids, 2, return_dict_in_generate=True))).__name__ == "DynamicCache"


def test_disable_of_a_model_never_enabled():
    model = make_model()
    before = attributes(model)
    assert disable(model) is model
    assert attributes(model) == before


def test_a_second_enable_holds_for_new_caches():
    model, ids = enable(make_model()), prompt(60)
    old = make_cache(model)
    with torch.no_grad():
        model(ids[:, :20], use_cache=True, **{CACHE: old})
        enable(model, window=4, max_query_len=2)
        new = make_cache(model)
        assert (old.gdn.settings.window, new.gdn.settings.window) == (16, 4)
        expected = model(ids, use_cache=False).logits
        for cache, start in ((old, 20), (new, 0)):
            got = [model(part, use_cache=True, **{CACHE: cache}).logits for part in ids[:, start:].split(1, dim=1)]
            torch.testing.assert_close(torch.cat(got, dim=1), expected[:, start:], rtol=1e-3, atol=1e-4)
    disable(model)
    assert not any("_replaystate" in vars(module) for module in model.modules())


def test_enable_again_after_disable():
    model, ids = make_model(), prompt()
    expected = greedy(model, ids, 30)
    for _ in range(2):
        assert greedy(enable(model), ids, 30, prompt_lookup_num_tokens=3).tolist() == expected.tolist()
        disable(model)


def test_deepcopy_of_an_enabled_model():
    """The copy runs its own layers, not the original's."""
    model, ids = enable(make_model()), prompt()
    twin = copy.deepcopy(model)
    expected = greedy(model, ids, 30)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert greedy(twin, ids, 30, prompt_lookup_num_tokens=3).tolist() == expected.tolist()
    assert stats(twin).model_calls > 0
    disable(twin)
    assert is_enabled(model)


def test_weights_and_config_are_untouched(tmp_path):
    model = make_model("qwen3_5")
    state, config = {k: v.clone() for k, v in model.state_dict().items()}, model.config.to_dict()
    enable(model)
    greedy(model, prompt(), 8, prompt_lookup_num_tokens=3)
    assert model.config.to_dict() == config
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    model.save_pretrained(tmp_path)
    assert not is_enabled(type(model).from_pretrained(tmp_path))


@pytest.mark.parametrize(
    ("model_dtype", "given", "expected"),
    [
        (torch.float32, (None, None), (torch.float32, torch.float32)),
        (torch.bfloat16, (None, None), (torch.float16, torch.float16)),
        (torch.float16, (None, None), (torch.float16, torch.float16)),
        (torch.float32, (torch.bfloat16, None), (torch.bfloat16, torch.float16)),
        (torch.bfloat16, (torch.float32, None), (torch.float32, torch.float32)),
        (torch.bfloat16, (None, torch.bfloat16), (torch.float16, torch.bfloat16)),
    ],
)
def test_dtypes_follow_the_model(model_dtype, given, expected):
    model = enable(make_model().to(model_dtype), state_dtype=given[0], ring_dtype=given[1])
    cache = make_cache(model)
    with torch.no_grad():
        model(prompt(), use_cache=True, **{CACHE: cache})
    (pool,) = cache.gdn._pools.values()
    u, k, g = pool.cache.rings(0)
    assert (pool.cache.checkpoint(0).dtype, u.dtype, k.dtype, g.dtype) == (
        expected[0],
        expected[1],
        expected[1],
        torch.float32,
    )


@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("kind", ["qwen3_next", "qwen3_5", "qwen3_5_moe"])
def test_the_decoder_alone(kind, decoder):
    """The text classes have no `generate`, but run with the same cache."""
    model, ids = make_model(kind), prompt(50)
    target = model.model if decoder else model
    enable(target)
    cache = make_cache(target)
    cache.activate_past_recording()
    with torch.no_grad():
        expected = target(ids, use_cache=False)[0]
        for part in (ids[:, :20], ids[:, 30:40]):
            target(part, use_cache=True, **{CACHE: cache})
        cache.crop(-10)
        got = target(ids[:, 20:], use_cache=True, **{CACHE: cache})[0]
    torch.testing.assert_close(got, expected[:, 20:], rtol=1e-3, atol=1e-4)


class TestRefusals:
    @pytest.mark.parametrize("model", [nn.Linear(2, 2), "Qwen3NextForCausalLM", None])
    def test_wrong_object(self, model):
        with pytest.raises(UnsupportedModelError, match=RANGE):
            enable(model)

    def test_wrong_class(self):
        with pytest.raises(
            UnsupportedModelError, match=rf"expected one of Qwen3NextForCausalLM.*{RANGE}.*LlamaForCausalLM"
        ):
            enable(make_llama())

    def test_a_class_of_the_same_name_elsewhere(self):
        class Qwen3NextForCausalLM(nn.Module):
            pass

        with pytest.raises(UnsupportedModelError, match=RANGE):
            enable(Qwen3NextForCausalLM())

    def test_a_subclass_is_taken(self):
        model = make_model()
        model.__class__ = type("Mine", (type(model),), {})
        assert is_enabled(enable(model))

    def test_no_gated_deltanet_layer(self):
        with pytest.raises(UnsupportedModelError, match="has no Gated DeltaNet layer"):
            enable(make_model(layer_types=["full_attention"] * 4))

    def test_weights_on_the_meta_device(self):
        with pytest.raises(UnsupportedModelError, match="meta device"):
            enable(make_model().to("meta"))

    @pytest.mark.parametrize("version", ["4.57.6", "5.16.1", "6.0.0", "6.0.0.dev0", "5", "unknown"])
    def test_wrong_version(self, version, monkeypatch):
        monkeypatch.setattr(compat.transformers, "__version__", version)
        with pytest.raises(UnsupportedModelError, match=rf"supports {RANGE}, got {version}"):
            enable(make_model())

    @pytest.mark.parametrize("version", ["5.17.0", "5.17.1", "5.19.0", "5.24.0", "5.25.0.dev0", "5.99"])
    def test_right_version(self, version):
        compat.check_version(version)

    def test_wrong_version_at_import(self):
        code = "import transformers; transformers.__version__ = '4.57.6'; import replaystate.transformers"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert f"UnsupportedModelError: replaystate.transformers supports {RANGE}, got 4.57.6" in done.stderr

    def test_transformers_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        with pytest.raises(MissingDependencyError, match=r"pip install 'replaystate\[hf\]'"):
            compat.import_transformers()

    @pytest.mark.parametrize(
        ("arguments", "error", "message"),
        [
            ({"window": 12}, ArgumentError, "window: expected a power of two, got 12"),
            ({"window": 8}, ArgumentError, "max_query_len: expected at most window=8, got 16"),
            ({"max_query_len": 0}, ArgumentError, "max_query_len: expected at least 1, got 0"),
            ({"window": 16.0}, DTypeError, "window: expected an int"),
            ({"state_dtype": torch.float64}, DTypeError, "state_dtype: expected float32, float16, bfloat16 or None"),
            ({"ring_dtype": torch.int8}, DTypeError, "ring_dtype: expected float32, float16, bfloat16 or None"),
        ],
    )
    def test_arguments(self, arguments, error, message):
        model = make_model()
        before = attributes(model)
        with pytest.raises(error, match=message):
            enable(model, **arguments)
        assert attributes(model) == before

    def test_double_precision_model(self):
        with pytest.raises(DTypeError, match="expected a float32, bfloat16 or float16 model"):
            enable(make_model().double())

    @pytest.mark.parametrize("function", [make_cache, stats])
    def test_needs_an_enabled_model(self, function):
        with pytest.raises(ProtocolError, match=rf"{function.__name__}: model: .*not enabled"):
            function(make_model())

    def test_assistant_with_recurrent_states_that_is_not_enabled(self):
        model = enable(make_model())
        assistant = noisy_copy(make_model())
        with pytest.raises(UnsupportedModelError, match=r"enable\(assistant_model\) first"):
            greedy(model, prompt(), 8, assistant_model=assistant)

    def test_early_exit(self):
        with pytest.raises(UnsupportedModelError, match="assistant_early_exit"):
            greedy(enable(make_model()), prompt(), 8, assistant_early_exit=2)

    def test_every_error_is_ours(self):
        assert issubclass(UnsupportedModelError, ReplayStateError)
        assert issubclass(UnsupportedModelError, ValueError)
        assert issubclass(MissingDependencyError, ImportError)


def test_a_forward_replaced_before_is_put_back():
    """accelerate wraps `forward` of a module and calls its `_old_forward`: ours goes there, and leaves again."""
    model, ids = make_model(), prompt()
    expected = greedy(model, ids, 20)
    module = model.model.layers[0].linear_attn

    class Hook:
        execution_device = "cpu"

    original, calls = module.forward, []
    module._hf_hook, module._old_forward = Hook(), original

    def wrapped(*args, **kwargs):
        calls.append(1)
        return module._old_forward(*args, **kwargs)

    module.forward = wrapped
    enable(model)
    assert greedy(model, ids, 20, prompt_lookup_num_tokens=3).tolist() == expected.tolist()
    assert calls
    with torch.no_grad():
        model(ids, use_cache=False)  # the stock forward, through the wrapper
    disable(model)
    assert module._old_forward is original
    assert module.forward is wrapped
    assert greedy(model, ids, 20).tolist() == expected.tolist()


def test_stats_can_be_cleared():
    model = enable(make_model())
    greedy(model, prompt(), 8, prompt_lookup_num_tokens=3)
    assert stats(model) != ReplayStats()
    stats(model).clear()
    assert stats(model) == ReplayStats()
    assert stats(model).acceptance == stats(model).accepted_per_call == 0.0

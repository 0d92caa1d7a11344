"""The cache of an enabled model in a caller's hands: crop, reset, reorder, reuse, chunks, and what it refuses.

The oracle is always the stock model run on the tokens that should be left.
"""

import copy

import pytest
import torch
from transformers import StaticCache

from replaystate.errors import ArgumentError, ProtocolError, ShapeError, UnsupportedModelError
from replaystate.transformers import ReplayDynamicCache, disable, enable, make_cache, stats
from replaystate.transformers.states import GDNStates

from .models import CACHE, greedy, make_model, prompt, returned_cache, stock_cache


@pytest.fixture
def model():
    return make_model()


@pytest.fixture
def tokens():
    return prompt(90)


@torch.no_grad()
def logits(model, ids, cache=None, **kwargs):
    return model(ids, use_cache=cache is not None, **{CACHE: cache}, **kwargs).logits


def assert_continues(model, cache, history, rest):
    """Running `rest` on the cache gives what the stock model gives after `history`."""
    got = logits(model, rest, cache)
    expected = stock_logits(model, torch.cat([history, rest], dim=1))[:, history.shape[1] :]
    torch.testing.assert_close(got, expected, rtol=1e-3, atol=1e-4)


def stock_logits(model, ids):
    """Without a cache an enabled model runs its stock code; no reference to our own states."""
    return logits(model, ids)


class TestCrop:
    @pytest.mark.parametrize("length", [1, 5, 16, 17, 40])
    @pytest.mark.parametrize("count", [0, 1, 3, 15, 16])
    def test_takes_back_the_last_tokens_of_a_forward(self, model, tokens, length, count):
        count = min(count, length)
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :20], cache)
        logits(model, tokens[:, 20 : 20 + length], cache)
        cache.crop(-count)
        assert cache.get_seq_length() == 20 + length - count
        assert_continues(model, cache, tokens[:, : 20 + length - count], tokens[:, 70:80])

    def test_as_often_as_the_window_holds(self, model, tokens):
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :16], cache)
        for left in (13, 9, 2, 0):
            cache.crop(left - cache.get_seq_length())
        assert_continues(model, cache, tokens[:, :0], tokens[:, 40:60])

    def test_window_after_a_flush(self, model, tokens):
        """flush() makes the next 16 tokens recoverable however they come; without it the window may fold among them."""
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :13], cache)
        cache.flush()
        for token in tokens[:, 13:29].split(1, dim=1):
            logits(model, token, cache)
        cache.crop(-16)
        assert_continues(model, cache, tokens[:, :13], tokens[:, 50:60])

    def test_batch(self, model):
        ids = prompt(50, rows=3)
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, ids[:, :25], cache)
        logits(model, ids[:, 25:33], cache)
        cache.crop(-6)
        assert_continues(model, cache, ids[:, :27], ids[:, 40:])

    def test_without_recording_is_refused(self, model, tokens):
        cache = make_cache(enable(model))
        logits(model, tokens[:, :10], cache)
        with pytest.raises(ProtocolError, match="activate_past_recording"):
            cache.crop(-1)
        assert cache.get_seq_length() == 10

    def test_only_recorded_tokens(self, model, tokens):
        """Recording switched on late: the convolution has not kept what came before, so neither may the window."""
        cache = make_cache(enable(model))
        logits(model, tokens[:, :10], cache)
        cache.activate_past_recording()
        logits(model, tokens[:, 10:13], cache)
        with pytest.raises(ArgumentError, match="at most 3 tokens"):
            cache.crop(-4)
        cache.crop(-3)
        assert_continues(model, cache, tokens[:, :10], tokens[:, 20:30])

    def test_more_than_the_window_is_refused_and_changes_nothing(self, model, tokens):
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :30], cache)
        with pytest.raises(ArgumentError, match=r"expected at most 16 tokens.*got 17"):
            cache.crop(-17)
        assert cache.get_seq_length() == 30
        assert_continues(model, cache, tokens[:, :30], tokens[:, 40:50])

    def test_positive_count_is_refused(self, model):
        with pytest.raises(ArgumentError, match="expected 0 or a negative count, got 3"):
            make_cache(enable(model)).crop(3)

    def test_one_layer_is_refused(self, model):
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        with pytest.raises(ProtocolError, match="not one layer"):
            cache.layers[0].crop(-1)

    def test_is_croppable(self, model, tokens):
        cache = make_cache(enable(model))
        assert cache.is_croppable
        logits(model, tokens[:, :10], cache)
        assert cache.is_croppable
        assert all(layer.is_croppable for layer in cache.layers)
        assert not cache.is_compileable


class TestForward:
    @pytest.mark.parametrize(
        "chunks", [[1] * 40, [40], [3, 1, 1, 16, 1, 17, 1], [33, 1, 6], [16, 16, 8], [15, 2, 15, 2, 6]]
    )
    @pytest.mark.parametrize("recording", [False, True])
    def test_chunked_prefill(self, model, tokens, chunks, recording):
        cache = make_cache(enable(model))
        if recording:
            cache.activate_past_recording()
        got = torch.cat([logits(model, part, cache) for part in tokens[:, : sum(chunks)].split(chunks, dim=1)], dim=1)
        torch.testing.assert_close(got, stock_logits(model, tokens[:, : sum(chunks)]), rtol=1e-3, atol=1e-4)
        (pool,) = cache.gdn._pools.values()
        assert pool.cache.num_committed.tolist() == [cache.gdn.window_len]  # the host mirrors the cursors
        assert int(pool.cache.status.max()) == 0

    @torch.no_grad()
    def test_makes_its_own_cache(self, model, tokens):
        enable(model)
        out = model(tokens[:, :30], use_cache=True)
        assert isinstance(returned_cache(out), ReplayDynamicCache)
        assert_continues(model, returned_cache(out), tokens[:, :30], tokens[:, 30:50])

    @torch.no_grad()
    def test_without_a_cache_nothing_is_kept(self, model, tokens):
        expected = model(tokens, use_cache=False)
        enable(model)
        out = model(tokens, use_cache=False)
        assert returned_cache(out) is None
        assert torch.equal(out.logits, expected.logits)
        assert stats(model).model_calls == 0

    def test_training_without_a_cache_equals_stock(self, model, tokens):
        def gradients(model):
            model.zero_grad()
            model.train()(tokens, labels=tokens, use_cache=False).loss.backward()
            return [parameter.grad.clone() for parameter in model.parameters()]

        for ours, stock in zip(gradients(enable(model)), gradients(disable(model)), strict=True):
            assert torch.equal(ours, stock)

    @pytest.mark.parametrize("frozen", [False, True])
    def test_gradients_through_a_cache_are_refused(self, model, tokens, frozen):
        model.model.embed_tokens.requires_grad_(not frozen)
        with pytest.raises(ArgumentError, match="use_cache=False"):
            enable(model)(tokens, labels=tokens, use_cache=True)

    def test_inference_mode_then_no_grad(self, model, tokens):
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        with torch.inference_mode():
            model(tokens[:, :20], use_cache=True, **{CACHE: cache})
        cache.crop(-3)
        assert_continues(model, cache, tokens[:, :17], tokens[:, 20:30])

    def test_compiled(self, tokens):
        """The graph breaks at each Gated DeltaNet layer; cursors stay on the host and right."""
        model = enable(make_model(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"]))
        compiled = torch.compile(model, backend="eager")
        cache = make_cache(model)
        for part in tokens[:, :22].split([20, 1, 1], dim=1):
            last = logits(compiled, part, cache)
        torch.testing.assert_close(last, stock_logits(model, tokens[:, :22])[:, 21:], rtol=1e-3, atol=1e-4)

    def test_an_error_between_layers(self, model, tokens):
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :10], cache)
        hook = model.model.layers[1].mlp.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, tokens[:, 10:12], cache)
        hook.remove()
        for broken in (lambda: logits(model, tokens[:, 12:13], cache), lambda: cache.crop(0), cache.flush):
            with pytest.raises(ProtocolError, match="did not finish"):
                broken()
        cache.reset()
        assert_continues(model, cache, tokens[:, :0], tokens[:, :30])

    def test_an_error_after_the_last_of_our_layers(self, model, tokens):
        """States are committed, the attention layer after them never got its keys."""
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, tokens[:, :10], cache)
        hook = model.model.layers[3].self_attn.register_forward_pre_hook(lambda *args: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            logits(model, tokens[:, 10:12], cache)
        hook.remove()
        with pytest.raises(ProtocolError, match="attention layer 3 holds 10 tokens, the states hold 12"):
            logits(model, tokens[:, 12:13], cache)
        cache.reset()
        assert_continues(model, cache, tokens[:, :0], tokens[:, :30])

    @pytest.mark.parametrize("layers", ["aaLL", "LaLa", "aL"])
    def test_any_order_of_layers(self, layers, tokens):
        types = [{"a": "full_attention", "L": "linear_attention"}[letter] for letter in layers]
        model = make_model(num_hidden_layers=len(types), layer_types=types)
        ids = tokens[:, :20]
        expected = greedy(model, ids, 24)
        assert greedy(enable(model), ids, 24, prompt_lookup_num_tokens=4).tolist() == expected.tolist()

    def test_another_batch_size_is_refused(self, model, tokens):
        cache = make_cache(enable(model))
        logits(model, tokens[:, :10], cache)
        with pytest.raises(ShapeError, match="the cache holds 1 rows, the forward has 3"):
            logits(model, prompt(4, rows=3), cache)
        assert_continues(model, cache, tokens[:, :10], tokens[:, 10:20])

    def test_packed_sequences_are_refused(self, model, tokens):
        cache = make_cache(enable(model))
        with pytest.raises(ArgumentError, match="packed sequences"), torch.no_grad():
            model.model.layers[0].linear_attn(
                torch.randn(1, 4, 32), cache, seq_idx=torch.zeros(1, 4, dtype=torch.int32)
            )


class TestReuse:
    def test_second_generate_with_the_same_cache(self, model, tokens):
        """Text, then more text after it: the second call runs only what the cache does not hold."""
        ids = tokens[:, :20]
        expected = greedy(model, ids, 64)
        cache = make_cache(enable(model))
        half = greedy(model, ids, 30, **{CACHE: cache})
        stats(model).clear()
        assert greedy(model, half, 34, **{CACHE: cache}).tolist() == expected.tolist()
        assert stats(model).tokens == 34

    def test_second_assisted_generate_with_the_same_cache(self, model, tokens):
        """The stock first iteration would run the whole text again on top of the cache."""
        ids = tokens[:, :20]
        expected = greedy(model, ids, 64)
        cache = make_cache(enable(model))
        half = greedy(model, ids, 30, prompt_lookup_num_tokens=4, **{CACHE: cache})
        got = greedy(model, half, 20, prompt_lookup_num_tokens=4, **{CACHE: cache})
        got = greedy(model, got, 14, **{CACHE: cache})
        assert got.tolist() == expected.tolist()
        assert cache.get_seq_length() == 83

    def test_assisted_generate_needs_the_whole_text(self, model, tokens):
        cache = make_cache(enable(model))
        logits(model, tokens[:, :20], cache)
        with pytest.raises(ArgumentError, match="whole sequence"):
            greedy(model, tokens[:, 20:30], 8, prompt_lookup_num_tokens=4, **{CACHE: cache})

    def test_new_turn_of_a_dialogue(self, model, tokens):
        ids = tokens[:, :20]
        first = greedy(model, ids, 10)
        second = torch.cat([first, tokens[:, 40:60]], dim=1)
        expected = greedy(model, second, 40)
        cache = make_cache(enable(model))
        greedy(model, ids, 10, prompt_lookup_num_tokens=4, **{CACHE: cache})
        assert greedy(model, second, 40, **{CACHE: cache}).tolist() == expected.tolist()

    @pytest.mark.parametrize("rows", [1, 3])
    def test_reset(self, model, tokens, rows):
        """As new, for the same or another batch size."""
        cache = make_cache(enable(model))
        greedy(model, tokens[:, :20], 12, prompt_lookup_num_tokens=4, **{CACHE: cache})
        cache.reset()
        assert cache.get_seq_length() == 0
        ids = prompt(20, rows=rows, seed=5)
        expected = greedy(model, ids, 30)
        assert greedy(model, ids, 30, **{CACHE: cache}).tolist() == expected.tolist()

    def test_reorder_with_repeats(self, model):
        ids = prompt(60, rows=3)
        cache = make_cache(enable(model))
        cache.activate_past_recording()
        logits(model, ids[:, :40], cache)
        order = torch.tensor([2, 0, 2])
        cache.reorder_cache(order)
        cache.crop(-5)
        assert_continues(model, cache, ids[order, :35], ids[:, 40:])

    def test_deepcopy_of_a_prefix(self, model, tokens):
        cache = make_cache(enable(model))
        logits(model, tokens[:, :40], cache)
        branches = [copy.deepcopy(cache) for _ in range(2)]
        for i, branch in enumerate(branches):
            assert_continues(model, branch, tokens[:, :40], tokens[:, 50 + 10 * i : 60 + 10 * i])
        assert_continues(model, cache, tokens[:, :40], tokens[:, 40:50])

    def test_two_caches_do_not_mix(self, model, tokens):
        enable(model)
        one, two = make_cache(model), make_cache(model)
        for i in range(0, 40, 4):
            assert_continues(model, one, tokens[:, :i], tokens[:, i : i + 4])
            assert_continues(model, two, tokens[:, 40 : 40 + i], tokens[:, 40 + i : 44 + i])

    def test_recurrent_states_can_be_read(self, model, tokens):
        cache = make_cache(enable(model))
        logits(model, tokens[:, :30], cache)
        with torch.no_grad():
            stock = returned_cache(disable(model)(tokens[:, :30], use_cache=True))
        for index in (0, 1, 2):
            torch.testing.assert_close(
                cache.layers[index].recurrent_states[0], stock.layers[index].recurrent_states[0], rtol=1e-4, atol=1e-5
            )
        with pytest.raises(KeyError):
            cache.layers[0].recurrent_states[1]
        assert list(cache.layers[0].recurrent_states) == [0]

    def test_state_before_the_first_forward(self, model):
        with pytest.raises(ProtocolError, match="no forward has run"):
            make_cache(enable(model)).gdn.state(0)

    def test_nbytes(self, model, tokens):
        cache = make_cache(enable(model))
        assert cache.gdn.nbytes == 0
        logits(model, tokens[:, :4], cache)
        HV, V, K, H, R = 4, 12, 8, 2, 32
        per_layer = 4 * (HV * V * K + R * (H * K + HV * V + HV))
        assert cache.gdn.nbytes >= 3 * per_layer


class TestOtherCaches:
    def test_new_stock_cache_is_adopted(self, model, tokens):
        cache = stock_cache(model)
        greedy(enable(model), tokens[:, :20], 10, prompt_lookup_num_tokens=4, **{CACHE: cache})
        assert type(cache) is ReplayDynamicCache
        assert cache.get_seq_length() == 29

    def test_recording_of_an_adopted_cache_is_kept(self, model, tokens):
        cache = stock_cache(model)
        cache.activate_past_recording()
        logits(enable(model), tokens[:, :20], cache)
        cache.crop(-4)
        assert_continues(model, cache, tokens[:, :16], tokens[:, 30:40])

    def test_used_stock_cache_is_refused(self, model, tokens):
        cache = stock_cache(model)
        logits(model, tokens[:, :10], cache)
        with pytest.raises(UnsupportedModelError, match="holds states that a stock model computed"):
            logits(enable(model), tokens[:, 10:11], cache)

    def test_cache_without_the_models_layers_is_refused(self, model, tokens):
        with pytest.raises(UnsupportedModelError, match="not made for the model's layers"):
            logits(enable(model), tokens, type(stock_cache(model))())

    def test_static_cache_is_refused(self, model, tokens):
        cache = StaticCache(config=model.config, max_cache_len=100)
        with pytest.raises(UnsupportedModelError, match=r"StaticCache.*disable\(model\)"):
            logits(enable(model), tokens, cache)

    @pytest.mark.parametrize("implementation", ["static", "offloaded", "quantized"])
    def test_cache_implementations_are_refused(self, model, tokens, implementation):
        with pytest.raises(UnsupportedModelError, match=f"got '{implementation}'"):
            greedy(enable(model), tokens, 4, cache_implementation=implementation)

    def test_dynamic_implementation_is_ours(self, model, tokens):
        expected = greedy(model, tokens, 8)
        assert greedy(enable(model), tokens, 8, cache_implementation="dynamic").tolist() == expected.tolist()

    def test_generate_without_a_cache(self, model, tokens):
        expected = greedy(model, tokens[:, :10], 6, use_cache=False)
        assert greedy(enable(model), tokens[:, :10], 6, use_cache=False).tolist() == expected.tolist()
        assert stats(model).model_calls == 0

    def test_ours_in_a_model_of_other_sizes(self, model, tokens):
        other = enable(make_model(linear_num_value_heads=2))
        with pytest.raises(ArgumentError, match="made for GDNShape"):
            logits(other, tokens, make_cache(enable(model)))

    @pytest.mark.parametrize("filled", [False, True])
    def test_ours_in_a_stock_model_is_refused(self, model, tokens, filled):
        cache = make_cache(enable(model))
        if filled:
            logits(model, tokens[:, :10], cache)
        disable(model)
        for part in (tokens[:, 10:11], tokens[:, 10:20]):
            with pytest.raises(ProtocolError, match="belongs to a model enabled"):
                logits(model, part, cache)


def test_layers_on_several_devices(model, tokens, monkeypatch):
    """One pool a device: "cpu" and "cpu:0" are two names to torch, which is all the grouping looks at."""
    enable(model)
    names = {0: torch.device("cpu"), 1: torch.device("cpu", 0), 2: torch.device("cpu")}
    monkeypatch.setattr(type(model._replaystate), "devices", lambda self: names)
    cache = make_cache(model)
    cache.activate_past_recording()
    logits(model, tokens[:, :30], cache)
    cache.crop(-5)
    assert len(cache.gdn._pools) == 2
    assert_continues(model, cache, tokens[:, :25], tokens[:, 30:50])
    cache.reset()
    assert_continues(model, cache, tokens[:, :0], tokens[:, :20])


def test_sixteen_bit_states_saturate_and_flag(model, tokens):
    """A prefilled state beyond float16 is stored as the largest value and flagged, not as infinity."""
    enable(model, state_dtype=torch.float16)
    with torch.no_grad():
        for layer in model._replaystate.layers.values():
            layer.conv1d.weight.mul_(1e6)
    cache = make_cache(model)
    logits(model, tokens[:, :40], cache)
    (pool,) = cache.gdn._pools.values()
    assert int(pool.cache.status[0]) & 1
    assert bool(torch.isfinite(pool.cache.checkpoint(0)).all())


def test_state_traffic_is_counted(model, tokens):
    """One prefill and 17 single tokens: what was read and written, from the sizes."""
    cache = make_cache(enable(model))
    logits(model, tokens[:, :40], cache)
    for i in range(17):
        logits(model, tokens[:, 40 + i : 41 + i], cache)
    checkpoint, row = 3 * 4 * (4 * 12 * 8), 3 * 4 * (2 * 8 + 4 * 12 + 4)
    counted = cache.stats
    assert counted is stats(model)
    assert (counted.prefill_tokens, counted.step_tokens, counted.folds) == (40, 17, 1)
    assert counted.state_bytes_written == checkpoint + 17 * row + checkpoint
    assert counted.state_bytes_read == 17 * checkpoint + sum(range(17)) * row
    assert isinstance(cache.gdn, GDNStates)


def test_a_crop_by_a_tensor_counts_in_ints(model, tokens) -> None:
    """transformers 5.17 passes a 0-d tensor; counters that became tensors would not print as JSON."""
    cache = make_cache(enable(model))
    cache.activate_past_recording()
    logits(model, tokens[:, :6], cache)
    stats(model).clear()
    cache.crop(torch.tensor(-2))
    assert cache.get_seq_length() == 4
    assert stats(model).cropped_tokens == 2
    assert all(type(value) is int for value in vars(stats(model)).values())

"""What `generate` can be asked for: windows, padding, sampling, beams, ends, scores, 16-bit models, long drafts.

And the tests that break the rollback on purpose, to show that these models would notice.
"""

import pytest
import torch

from replaystate.transformers import disable, enable, stats
from replaystate.transformers.cache import ReplayLinearAttentionLayer
from replaystate.transformers.states import GDNStates

from .models import CACHE, drafter, greedy, make_llama, make_model, noisy_copy, prompt, returned_cache


@pytest.mark.parametrize(("window", "max_query_len"), [(1, 1), (2, 2), (4, 2), (8, 8), (64, 32)])
def test_windows(window, max_query_len):
    model, ids = make_model("qwen3_5"), prompt()
    expected = greedy(model, ids, 30)
    enable(model, window=window, max_query_len=max_query_len)
    assert greedy(model, ids, 30).tolist() == expected.tolist()
    assert greedy(model, ids, 30, prompt_lookup_num_tokens=5).tolist() == expected.tolist()
    assistant = enable(drafter(noisy_copy(disable(model)), 20), window=window, max_query_len=1)
    enable(model, window=window, max_query_len=max_query_len)
    assert greedy(model, ids, 30, assistant_model=assistant).tolist() == expected.tolist()


def test_left_padding():
    """Rows of unequal length in one batch give what each gives alone."""
    model = make_model()
    rows = [prompt(9, seed=1), prompt(20, seed=2), prompt(14, seed=3)]
    width = 20
    ids = torch.cat([torch.cat([torch.zeros(1, width - r.shape[1], dtype=torch.long), r], dim=1) for r in rows])
    mask = (torch.arange(width) >= width - torch.tensor([[r.shape[1]] for r in rows])).long()
    expected = greedy(model, ids, attention_mask=mask)
    enable(model)
    got = greedy(model, ids, attention_mask=mask)
    assert got.tolist() == expected.tolist()
    for i, row in enumerate(rows):
        assert got[i, width:].tolist() == greedy(model, row)[0, row.shape[1] :].tolist()


def test_batch_and_short_padded_prompt():
    """A padded prompt short enough for one step: padding goes through the ring and must leave the state alone."""
    model = make_model("qwen3_5")
    ids = prompt(6, rows=2)
    ids[0, :3] = 0
    mask = (ids != 0).long()
    expected = greedy(model, ids, attention_mask=mask)
    assert greedy(enable(model), ids, attention_mask=mask).tolist() == expected.tolist()


@pytest.mark.parametrize("drafts", [{}, {"prompt_lookup_num_tokens": 4}])
def test_sampling(drafts):
    """One seed, one text: plain sampling equals the stock model's; lookup drafts leave its distribution, and run."""
    model, ids = make_model(), prompt()
    torch.manual_seed(3)
    expected = model.generate(ids, max_new_tokens=64, do_sample=True, temperature=0.8, top_k=0)
    enable(model)
    torch.manual_seed(3)
    got = model.generate(ids, max_new_tokens=64, do_sample=True, temperature=0.8, top_k=0, **drafts)
    if drafts:
        assert got.shape == expected.shape
        assert 0 < stats(model).accepted < stats(model).drafted
    else:
        assert got.tolist() == expected.tolist()


def test_speculative_sampling_with_a_perfect_drafter():
    """Rejection sampling against its own distribution keeps every draft; candidate logits are cut with the list."""
    model, ids = enable(make_model()), prompt()
    drafter(model, 20)
    got = model.generate(ids, max_new_tokens=48, do_sample=True, top_k=0, assistant_model=model)
    assert got.shape == (1, 68)
    assert stats(model).accepted >= 0.9 * stats(model).drafted > 0


def test_beam_search():
    """`reorder_cache` with repeats at every step."""
    model, ids = make_model("qwen3_5"), prompt(12, rows=2)
    expected = model.generate(ids, max_new_tokens=64, num_beams=3, do_sample=False)
    got = enable(model).generate(ids, max_new_tokens=64, num_beams=3, do_sample=False)
    assert got.tolist() == expected.tolist()


def test_return_sequences():
    model, ids = make_model(), prompt(12)
    torch.manual_seed(0)
    expected = model.generate(ids, max_new_tokens=20, do_sample=True, num_return_sequences=3)
    torch.manual_seed(0)
    assert (
        enable(model).generate(ids, max_new_tokens=20, do_sample=True, num_return_sequences=3).tolist()
        == expected.tolist()
    )


def test_eos_inside_drafts():
    """Generation stops where stock does, although drafts past the end were verified."""
    model, ids = make_model(), prompt()
    eos = int(greedy(model, ids)[0, 60])
    expected = greedy(model, ids, eos_token_id=eos)
    enable(model)
    assert greedy(model, ids, eos_token_id=eos, prompt_lookup_num_tokens=6).tolist() == expected.tolist()
    drafter(model, 9)
    assert greedy(model, ids, eos_token_id=eos, assistant_model=model).tolist() == expected.tolist()


def test_scores_and_hidden_states():
    model, ids = make_model(), prompt()
    arguments = {"output_hidden_states": True, "output_logits": True, "return_dict_in_generate": True}
    stock = greedy(model, ids, 24, **arguments)
    enable(model)
    for drafts in ({}, {"prompt_lookup_num_tokens": 4}):
        ours = greedy(model, ids, 24, **arguments, **drafts)
        torch.testing.assert_close(torch.stack(ours.logits), torch.stack(stock.logits), rtol=1e-3, atol=1e-4)
        torch.testing.assert_close(ours.hidden_states[0][-1], stock.hidden_states[0][-1], rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bit(dtype):
    """Rounding may turn a tie, so it is not the tokens that must be equal: the logits of one text must be close."""
    model, ids = make_model("qwen3_5", scale=4.0).to(dtype), prompt()
    text = greedy(model, ids, 48)
    with torch.no_grad():
        expected = model(text, use_cache=False).logits.float()
        enable(model)
        cache, got = None, []
        for token in text.split(1, dim=1):
            out = model(token, use_cache=True, **{CACHE: cache})
            cache = returned_cache(out)
            got.append(out.logits.float())
    error = (torch.cat(got, dim=1) - expected).abs()
    assert error.mean() < 0.05 * expected.abs().mean()
    assert greedy(model, ids, 48, prompt_lookup_num_tokens=5).shape == text.shape


class TestABrokenRollbackFails:
    """These models do notice: with one part of the rollback taken out, the text is another one."""

    def text(self, monkeypatch, name, broken):
        model, ids = make_model(), prompt()
        expected = greedy(model, ids)
        enable(model)
        monkeypatch.setattr(*name, broken)
        got = greedy(model, ids, prompt_lookup_num_tokens=5)
        assert stats(model).cropped_tokens > 0
        return got.tolist(), expected.tolist()

    def test_states_not_cropped(self, monkeypatch):
        def keep(self, num_tokens):
            self.tokens -= num_tokens
            self.stats.cropped_tokens += num_tokens

        got, expected = self.text(monkeypatch, (GDNStates, "crop"), keep)
        assert got != expected

    def test_states_cropped_by_one_too_few(self, monkeypatch):
        crop = GDNStates.crop

        def keep_one(self, num_tokens):
            crop(self, max(num_tokens - 1, 0))
            self.tokens -= min(num_tokens, 1)

        got, expected = self.text(monkeypatch, (GDNStates, "crop"), keep_one)
        assert got != expected

    def test_convolution_not_cropped(self, monkeypatch):
        got, expected = self.text(monkeypatch, (ReplayLinearAttentionLayer, "crop_conv"), lambda self, n: None)
        assert got != expected

    def test_states_not_used_at_all(self, monkeypatch):
        """The Gated DeltaNet layers decide the text: without their states it changes early."""
        model, ids = make_model(), prompt()
        expected = greedy(model, ids)
        enable(model)
        run = GDNStates.run
        monkeypatch.setattr(GDNStates, "run", lambda self, *args: run(self, *args) * 0)
        got = greedy(model, ids)
        assert (got != expected).float()[0, 20:].mean() > 0.5


def test_long_candidate_lists_are_cut_with_one_log_line(caplog):
    model, ids = make_model(), torch.cat([prompt(18)] * 3, dim=1)
    expected = greedy(model, ids)
    enable(model, max_query_len=4)
    with caplog.at_level("WARNING", logger="replaystate.transformers"):
        assert greedy(model, ids, prompt_lookup_num_tokens=12).tolist() == expected.tolist()
        assert greedy(model, ids, prompt_lookup_num_tokens=12).tolist() == expected.tolist()
    assert [record.getMessage() for record in caplog.records] == [
        "candidate lists of 12 tokens are cut to 3 (window=16, max_query_len=4)"
    ]
    assert stats(model).drafted <= 3 * stats(model).model_calls


def test_gdn_assistant_of_a_stock_model(caplog):
    """Its target knows nothing of windows and asks for 20 drafts: the assistant gives what it can take back."""
    target, ids = make_llama(), prompt()
    expected = greedy(target, ids, 30)
    assistant = enable(drafter(make_model(), 20))
    with caplog.at_level("WARNING", logger="replaystate.transformers"):
        assert greedy(target, ids, 30, assistant_model=assistant).tolist() == expected.tolist()
    assert [record.args for record in caplog.records] == [(20, 15, 16, 16)]
    assert stats(assistant).cropped_tokens > 100


def test_inputs_embeds():
    model, ids = make_model(), prompt()
    expected = greedy(model, ids, 24)[:, 20:]
    embeds = model.get_input_embeddings()(ids).detach()
    assert greedy(enable(model), None, 24, inputs_embeds=embeds).tolist() == expected.tolist()


def test_default_number_of_assistant_tokens_is_cut(caplog):
    model, ids = make_model(), prompt()
    expected = greedy(model, ids, 40)
    llama = make_llama()
    llama.generation_config.assistant_confidence_threshold = 0.0
    with caplog.at_level("WARNING", logger="replaystate.transformers"):
        assert greedy(enable(model), ids, 40, assistant_model=llama).tolist() == expected.tolist()
    assert [record.args for record in caplog.records] == [(20, 15, 16, 16)]

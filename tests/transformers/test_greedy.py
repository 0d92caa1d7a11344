"""Text of an enabled model against the stock model's, in float32: equal token for token, however drafts come and go.

Every assisted run must have kept some drafts and rejected others; 72 tokens are more than four windows of 16.
"""

import pytest

from replaystate.transformers import disable, enable, stats

from .models import KINDS, drafter, greedy, make_llama, make_model, noisy_copy, prompt


def assert_equal_with_drafts(model, expected, tokens):
    counted = stats(model)
    assert 0 < counted.accepted < counted.drafted
    assert counted.model_calls < 72
    assert tokens.tolist() == expected.tolist()


@pytest.fixture(params=KINDS)
def case(request):
    """(enabled model, prompt, the stock model's greedy continuation)."""
    model = make_model(request.param)
    ids = prompt()
    expected = greedy(model, ids)
    return enable(model), ids, expected


def test_plain(case):
    model, ids, expected = case
    assert greedy(model, ids).tolist() == expected.tolist()
    counted = stats(model)
    assert counted.model_calls == 72
    assert counted.folds == (71 - 1) // 16  # the prompt is prefilled, then 71 single tokens


def test_prompt_lookup(case):
    model, ids, expected = case
    assert_equal_with_drafts(model, expected, greedy(model, ids, prompt_lookup_num_tokens=5))


def test_attention_assistant(case):
    model, ids, expected = case
    assert_equal_with_drafts(model, expected, greedy(model, ids, assistant_model=drafter(make_llama(), 4)))


def test_gdn_assistant(case):
    model, ids, expected = case
    assistant = enable(drafter(noisy_copy(disable(model), noise=0.03), 3))
    tokens = greedy(enable(model), ids, assistant_model=assistant)
    assert_equal_with_drafts(model, expected, tokens)
    assert stats(assistant).cropped_tokens > 0


def test_gdn_assistant_fills_its_window():
    """It decodes 15 single tokens and is cropped by up to 15: its window must not be folded on the way."""
    model, ids = make_model(), prompt()
    expected = greedy(model, ids)
    assistant = enable(drafter(noisy_copy(model, noise=0.03), 15))
    tokens = greedy(enable(model), ids, assistant_model=assistant)
    assert_equal_with_drafts(model, expected, tokens)
    assert stats(assistant).cropped_tokens > 100


def test_a_model_drafts_for_itself(case):
    """A perfect assistant: its cache and the target's are different objects of one model, and nothing is rejected."""
    model, ids, expected = case
    drafter(model, 7)
    tokens = greedy(model, ids, assistant_model=model)
    assert tokens.tolist() == expected.tolist()
    assert stats(model).accepted == stats(model).drafted > 50


@pytest.mark.parametrize("length", [1, 2, 3, 15, 16, 17, 31, 33, 70])
def test_prompt_lengths_around_the_window(length):
    model, ids = make_model(), prompt(length)
    expected = greedy(model, ids, 18)
    enable(model)
    assert greedy(model, ids, 18).tolist() == expected.tolist()
    assert greedy(model, ids, 18, prompt_lookup_num_tokens=5).tolist() == expected.tolist()
    drafter(model, 6)
    assert greedy(model, ids, 18, assistant_model=model).tolist() == expected.tolist()

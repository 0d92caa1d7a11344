"""The small trained model of this repository: drafts from the prompt are accepted because they are right."""

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from replaystate.transformers import enable, stats

from .models import greedy

MODEL = Path(__file__).parents[2] / "examples" / "tiny_gdn" / "model"

pytestmark = pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="needs examples/tiny_gdn/model")

TEXT = """class Point:
    def __init__(self, x, y):
        self.x = x
        self.y = y

    def __repr__(self):
        return """


def test_python_text_equals_stock_greedy():
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    ids = tokenizer(TEXT, return_tensors="pt").input_ids
    expected = greedy(model, ids, 96)
    enable(model)
    assert greedy(model, ids, 96).tolist() == expected.tolist()
    stats(model).clear()
    assert greedy(model, ids, 96, prompt_lookup_num_tokens=8).tolist() == expected.tolist()
    assert stats(model).accepted > 20
    assert stats(model).model_calls < 80

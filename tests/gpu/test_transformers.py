"""The transformers integration on the GPU: the trained tiny model in float32, with and without drafts."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("transformers")

from transformers import AutoModelForCausalLM, AutoTokenizer

from replaystate.transformers import enable, make_cache, stats
from tests.transformers.test_trained_model import MODEL, TEXT

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not (MODEL / "config.json").exists(), reason="needs examples/tiny_gdn/model"),
]


def test_drafts_give_the_tokens_of_stock_greedy() -> None:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    model = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval().to("cuda")
    ids = tokenizer(TEXT, return_tensors="pt").input_ids.to("cuda")

    def greedy(**arguments: int) -> list[int]:
        with torch.inference_mode():
            tokens = model.generate(
                ids, attention_mask=torch.ones_like(ids), max_new_tokens=96, do_sample=False, **arguments
            )
        return tokens[0].tolist()

    expected = greedy()
    enable(model)
    assert make_cache(model).gdn.devices[0].type == "cuda"
    assert greedy() == expected
    stats(model).clear()
    assert greedy(prompt_lookup_num_tokens=8) == expected
    assert stats(model).accepted > 20

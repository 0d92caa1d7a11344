"""The workload `generate`: a whole model, greedy, one prompt; stock transformers against replay, also with drafts.

Unlike the others it needs a model's folder. Its gate: the tokens are those of stock greedy decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .report import Check, Report
from .timer import measure

STOCK, REPLAY, DRAFTS = "stock", "replay", "replay with prompt-lookup drafts"


def run_generate(
    model: Any,
    integration: Any,
    input_ids: Tensor,
    report: Report,
    *,
    about: dict[str, Any],
    new_tokens: int,
    window: int,
    max_query_len: int,
    repeats: int,
    warmup: int,
) -> None:
    """Check and time the three, in turn, into the report; the time is that of the whole call, prompt and all.

    Args:
        model: a causal language model that `replaystate.transformers.enable` takes.
        integration: the module `replaystate.transformers`.
        input_ids: [1, tokens], the prompt.
        report: gets results and checks.
        about: parameters to write beside each result.
        new_tokens: how many to generate.
        window, max_query_len: for `enable`.
        repeats, warmup: timed rounds, and rounds before them.
    """
    drafts = {"prompt_lookup_num_tokens": max_query_len - 1}
    variants: dict[str, dict[str, Any] | None] = {STOCK: None, REPLAY: {}, DRAFTS: drafts}
    tokens: dict[str, Tensor] = {}

    def prepare(enabled: bool) -> Callable[[int], None]:
        def switch(_: int) -> None:
            integration.disable(model)
            if enabled:
                integration.enable(model, window=window, max_query_len=max_query_len)

        return switch

    def call(name: str, arguments: dict[str, Any]) -> Callable[[int], None]:
        def generate(_: int) -> None:
            out = model.generate(
                input_ids, max_new_tokens=new_tokens, min_new_tokens=new_tokens, do_sample=False, num_beams=1,
                **arguments,
            )  # fmt: skip
            tokens[name] = out[0, input_ids.shape[1] :].cpu()  # waits for the device

        return generate

    candidates = {name: (prepare(options is not None), call(name, options or {})) for name, options in variants.items()}
    with torch.inference_mode():
        for ready, run in candidates.values():
            ready(0)
            run(0)
        for name in (REPLAY, DRAFTS):
            apart = int((tokens[name] != tokens[STOCK]).sum()) if len(tokens[name]) == len(tokens[STOCK]) else -1
            report.checks.append(
                Check(f"generate, {about['model']}, {name}: tokens unlike stock's", "<= 0", apart, apart == 0)
            )
            if apart:
                del candidates[name]
        times = measure(candidates, repeats=repeats, warmup=warmup)
    integration.disable(model)
    for name, time in times.items():
        report.add(
            "generate", what=name, **about, rows=1, new_tokens=new_tokens, time=time,
            tokens_per_s=round(new_tokens / time.median_us * 1e6, 1),
        )  # fmt: skip

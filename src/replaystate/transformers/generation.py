"""The three methods through which `generate` learns that an enabled model can roll back.

They are set on the model instance and call the class's own method: `_prepare_cache_for_generation` (our cache
instead of the stock one), `_get_candidate_generator` (drafts no longer than one step can verify) and
`prepare_inputs_for_generation` (assisted generation that continues from a cache).
"""

from __future__ import annotations

import logging
from typing import Any

from torch import Tensor

from ..errors import ArgumentError, UnsupportedModelError
from .cache import adopt
from .compat import cache_argument
from .enabled import Enabled, enabled_of

logger = logging.getLogger("replaystate.transformers")

CACHE_IMPLEMENTATIONS = (None, "dynamic")


def prepare_cache(self: Any, generation_config: Any, model_kwargs: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
    """Stand in for `_prepare_cache_for_generation`: the class makes its cache, and it becomes ours.

    Raises:
        UnsupportedModelError: a `cache_implementation` or a cache object that cannot hold replayed states.
    """
    enabled = enabled_of(self, "generate")
    enabled.assisted_past = 0
    if generation_config.cache_implementation not in CACHE_IMPLEMENTATIONS:
        raise UnsupportedModelError(
            f"generate: cache_implementation: expected None or 'dynamic' with an enabled model, got "
            f"{generation_config.cache_implementation!r}; disable(model) brings the others back"
        )
    result = type(self)._prepare_cache_for_generation(self, generation_config, model_kwargs, *args, **kwargs)
    name = cache_argument(model_kwargs)
    if name is not None:
        cache = adopt(model_kwargs[name], enabled)
        # An assistant decodes single tokens and is cropped later; a target verifies in one step and is cropped at once.
        cache.gdn.draft = bool(generation_config.is_assistant)
        if cache.gdn.draft:
            _limit_drafting(generation_config, model_kwargs, enabled)
    return result


def candidate_generator(self: Any, generation_config: Any, input_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Stand in for `_get_candidate_generator`: its candidate lists are cut to what one step can verify.

    Raises:
        UnsupportedModelError: early exit, or an assistant with recurrent states that is not enabled.
        ArgumentError: a cache that holds tokens, with input_ids that do not start with them.
    """
    enabled = enabled_of(self, "generate")
    if generation_config.assistant_early_exit is not None:
        raise UnsupportedModelError(
            "generate: assistant_early_exit: an enabled model cannot draft with its own first layers, whose states "
            "would be half of a cache; use prompt_lookup_num_tokens or assistant_model"
        )
    limit = enabled.settings.max_query_len - 1
    assistant = kwargs.get("assistant_model")
    if assistant is not None:
        if getattr(assistant, "_is_stateful", False):
            raise UnsupportedModelError(
                f"generate: assistant_model: {type(assistant).__name__} has recurrent states that its drafts would "
                "spoil: call enable(assistant_model) first"
            )
        record = vars(assistant).get("_replaystate")
        if isinstance(record, Enabled):
            limit = min(limit, record.settings.window - 1)  # its window also holds the token before the first draft
    past = _tokens_in_cache(generation_config, input_ids, kwargs.get("model_kwargs", {}))
    generator = type(self)._get_candidate_generator(self, generation_config, input_ids, *args, **kwargs)
    return _limit_candidates(generator, limit, past, enabled)


def prepare_inputs(self: Any, input_ids: Tensor, next_sequence_length: int | None = None, **kwargs: Any) -> Any:
    """Stand in for `prepare_inputs_for_generation`: assisted generation from a cache runs only the tokens not in it.

    The stock first iteration runs all of them again, and the cache then holds the prompt twice.
    """
    enabled = enabled_of(self, "generate")
    if kwargs.get("is_first_iteration") and enabled.assisted_past:
        past, enabled.assisted_past = enabled.assisted_past, 0
        next_sequence_length = input_ids.shape[1] - past
    return type(self).prepare_inputs_for_generation(
        self, input_ids, next_sequence_length=next_sequence_length, **kwargs
    )


def _tokens_in_cache(generation_config: Any, input_ids: Tensor, model_kwargs: dict[str, Any]) -> int:
    name = cache_argument(model_kwargs)
    past = 0 if name is None else int(model_kwargs[name].get_seq_length())
    if past:
        mask = model_kwargs.get("attention_mask")
        length = mask.shape[1] if mask is not None else getattr(generation_config, "_mask_length", input_ids.shape[1])
        if length != input_ids.shape[1] or input_ids.shape[1] <= past:
            raise ArgumentError(
                f"generate: input_ids: assisted generation with a cache of {past} tokens expects the whole sequence, "
                f"those tokens and at least one more, got {input_ids.shape[1]} tokens (attention mask of {length})"
            )
    return past


def _limit_candidates(generator: Any, limit: int, past: int, enabled: Enabled) -> Any:
    """Cut what the generator drafts to limit tokens and count what becomes of it, on this instance."""
    inner_candidates = generator.get_candidates
    inner_update = generator.update_candidate_strategy
    drafted = 0
    first = True

    def get_candidates(input_ids: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        nonlocal drafted, first
        wanted = getattr(generator, "num_assistant_tokens", 0)
        if wanted > limit:
            generator.num_assistant_tokens = limit  # no draft that would be cut afterwards
            _report_cut(enabled, int(wanted), limit)
        ids, logits = inner_candidates(input_ids, *args, **kwargs)
        drafted = ids.shape[1] - input_ids.shape[1]
        if drafted > limit:
            _report_cut(enabled, drafted, limit)
            ids = ids[:, : input_ids.shape[1] + limit]
            logits = None if logits is None else logits[:, :limit]
            drafted = limit
        if first:
            enabled.assisted_past, first = past, False
        return ids, logits

    def update_candidate_strategy(input_ids: Tensor, scores: Tensor, num_matches: Any, *args: Any) -> Any:
        enabled.stats.drafted += drafted
        enabled.stats.accepted += int(num_matches)
        return inner_update(input_ids, scores, num_matches, *args)

    generator.get_candidates = get_candidates
    generator.update_candidate_strategy = update_candidate_strategy
    return generator


def _limit_drafting(generation_config: Any, model_kwargs: dict[str, Any], enabled: Enabled) -> None:
    """Keep an assistant from drafting more than its window can take back, whichever target asked for it."""
    positions = model_kwargs.get("position_ids")
    if positions is not None and generation_config.max_length is not None:
        wanted, limit = generation_config.max_length - positions.shape[-1], enabled.settings.window - 1
        if wanted > limit:
            _report_cut(enabled, wanted, limit)
            generation_config.max_length = positions.shape[-1] + limit


def _report_cut(enabled: Enabled, wanted: int, limit: int) -> None:
    if not enabled.draft_cut_reported:
        enabled.draft_cut_reported = True
        settings = enabled.settings
        logger.warning(
            "candidate lists of %d tokens are cut to %d (window=%d, max_query_len=%d)",
            wanted,
            limit,
            settings.window,
            settings.max_query_len,
        )

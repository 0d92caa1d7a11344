"""`replaystate generate`: one prompt through an enabled model, and through the stock one to compare.

Bytes of recurrent state, as the table states them, are those that each algorithm needs, per Gated DeltaNet layer with S
the size of its state, HV V K elements:

| | reads | writes |
|---|---|---|
| stock transformers, each token | S, and S' to copy it into the cache | S', and the copy in the cache |
| stock transformers, the prompt | S' to copy it | S', and the copy |
| replay, each step | the checkpoint S_0 and the window's ring rows | its tokens' ring rows |
| replay, each fold | nothing more: it is part of a step | the checkpoint |

Stock states are float32 in every model. A kernel may move more than that, e.g. temporaries in stock's plain torch code.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .. import GDNShape, __version__
from ..errors import ArgumentError
from ..shapes import check_window
from .models import (
    DTYPES,
    check_device,
    check_folder,
    integration,
    load_model,
    load_tokenizer,
    quiet_transformers,
)
from .stream import TextStream

STOCK_STATE_BYTES = 4
"""Size of an element of stock transformers' state, which is float32 whatever the model's dtype."""

LOOKUP_NGRAM = 8
"""Tokens that prompt-lookup tries to find again, before it tries fewer. Upstream's 2 find chance repeats, above all of
bytes: on examples/tiny_gdn 70 of 399 drafts were accepted with 2, 85 of 301 with 8."""

PROMPT_LOOKUP = "prompt-lookup"
NO_DRAFT = "none"


@dataclass(frozen=True)
class Request:
    """The options of `replaystate generate`, see its help."""

    model: Path
    prompt: str
    draft: str = NO_DRAFT
    max_new_tokens: int = 128
    window: int = 16
    max_query_len: int = 8
    dtype: str = "float32"
    device: str = "cpu"
    compare: bool = False


@dataclass(frozen=True)
class Run:
    """One generation, measured.

    Args:
        token_ids: the new tokens.
        model_calls: forwards of the model, the prompt's among them.
        prompt_s: seconds until the first token.
        decode_tokens: tokens after those of the first forward.
        decode_s: seconds for them.
    """

    token_ids: list[int]
    model_calls: int
    prompt_s: float
    decode_tokens: int
    decode_s: float

    @property
    def new_tokens(self) -> int:
        """Tokens generated."""
        return len(self.token_ids)

    @property
    def decode_tokens_per_s(self) -> float | None:
        """Tokens a second after the first forward; None when there were none."""
        return self.decode_tokens / self.decode_s if self.decode_tokens and self.decode_s > 0 else None


@dataclass(frozen=True)
class Outcome:
    """What `generate` found: the text, our run, stock's when it was compared, and the counters.

    Args:
        model: facts about the model: path, class, dtype, device, sizes of its Gated DeltaNet layers.
        settings: draft, window, max_query_len, state and ring dtype.
        counters: `ReplayStats` of our run, and the draft model's calls.
        stock_state_bytes: (read, written) of the stock algorithm for as many tokens.
    """

    model: dict[str, Any]
    settings: dict[str, Any]
    prompt_tokens: int
    text: str
    replay: Run
    counters: dict[str, Any]
    stock: Run | None
    stock_state_bytes: tuple[int, int]

    @property
    def identical(self) -> bool | None:
        """Whether stock greedy gave the same tokens; None when it was not run."""
        return None if self.stock is None else self.replay.token_ids == self.stock.token_ids

    @property
    def first_difference(self) -> int | None:
        """The index of the first new token that differs from stock's."""
        if self.stock is None or self.identical:
            return None
        ours, theirs = self.replay.token_ids, self.stock.token_ids
        shared = min(len(ours), len(theirs))
        return next((i for i in range(shared) if ours[i] != theirs[i]), shared)

    def as_json(self) -> dict[str, Any]:
        """The document of `--json`."""
        read, written = self.stock_state_bytes
        stock: dict[str, Any] = {
            "measured": self.stock is not None,
            "state_bytes_read": read,
            "state_bytes_written": written,
        }
        if self.stock is not None:
            stock.update(_run_json(self.stock))
        return {
            "command": "generate",
            "versions": {
                "replaystate": __version__,
                "torch": torch.__version__,
                "transformers": integration().compat.transformers.__version__,
            },
            "model": self.model,
            "settings": self.settings,
            "prompt_tokens": self.prompt_tokens,
            "text": self.text,
            "replay": {**_run_json(self.replay), **self.counters},
            "stock": stock,
            "identical_to_stock": self.identical,
            "first_difference": self.first_difference,
        }


def _run_json(run: Run) -> dict[str, Any]:
    return {**asdict(run), "new_tokens": run.new_tokens, "decode_tokens_per_s": run.decode_tokens_per_s}


def stock_state_bytes(shape: GDNShape, num_layers: int, model_calls: int) -> tuple[int, int]:
    """(read, written) by stock transformers for a prompt and model_calls - 1 further tokens; see the module's table.

    >>> stock_state_bytes(GDNShape(1, 2, 64, 64), num_layers=3, model_calls=1)
    (98304, 196608)
    """
    state = num_layers * shape.num_v_heads * shape.head_v_dim * shape.head_k_dim * STOCK_STATE_BYTES
    return state * (2 * model_calls - 1), state * 2 * model_calls


def generate(
    request: Request,
    note: Callable[[str], None],
    write_prompt: Callable[[str], None] | None = None,
    write: Callable[[str], None] | None = None,
) -> Outcome:
    """Generate greedily, and compare with stock where asked.

    Args:
        request: what to do.
        note: called with a line of progress now and then.
        write_prompt: called with the prompt once generation begins.
        write: called with each new piece of text.

    Raises:
        ArgumentError, UnsupportedModelError: options or a folder that cannot be used.
        MissingDependencyError, BackendError: a package or device that is not here.
    """
    check_window("generate", request.window, request.max_query_len)
    check_folder("--model", request.model)
    drafting = request.draft not in (NO_DRAFT, PROMPT_LOOKUP)
    if request.draft != NO_DRAFT and request.max_query_len < 2:
        raise ArgumentError("--max-query-len: expected at least 2 with drafts, one of its tokens is not drafted")
    if drafting:
        check_folder("--draft", Path(request.draft))
    device = check_device(request.device)
    hf = integration()
    with quiet_transformers(), torch.inference_mode():
        tokenizer = load_tokenizer("--model", request.model)
        inputs = tokenizer(request.prompt, return_tensors="pt").to(device)
        ids: Tensor = inputs["input_ids"]
        if ids.shape[1] == 0:
            raise ArgumentError("--prompt: expected text of at least one token, got an empty prompt")
        note(f"loading {request.model}")
        dtype = DTYPES[request.dtype]
        model = load_model("--model", request.model, dtype, device, only_gdn=True)
        hf.enable(model, window=request.window, max_query_len=request.max_query_len)
        states = hf.make_cache(model).gdn
        draft_arguments: dict[str, Any] = {}
        draft_calls = _Calls()
        if request.draft == PROMPT_LOOKUP:
            draft_arguments["prompt_lookup_num_tokens"] = request.max_query_len - 1
            draft_arguments["max_matching_ngram_size"] = LOOKUP_NGRAM
        elif drafting:
            assistant = _load_assistant(request, tokenizer, model, device)
            assistant.register_forward_pre_hook(draft_calls)
            draft_arguments["assistant_model"] = assistant
        note(_describe(model, states, request))

        calls = _Calls()
        model.register_forward_pre_hook(calls)

        def run(arguments: dict[str, Any], stream: TextStream) -> Run:
            calls.count = 0
            begin = time.perf_counter()
            tokens = model.generate(
                **inputs,
                max_new_tokens=request.max_new_tokens,
                do_sample=False,
                num_beams=1,
                streamer=stream,
                **arguments,
            )
            end = time.perf_counter()
            new = tokens[0, ids.shape[1] :].tolist()
            first_at = end if stream.first_at is None else stream.first_at
            return Run(new, calls.count, first_at - begin, max(0, len(new) - stream.first_tokens), end - first_at)

        def warm_up(arguments: dict[str, Any]) -> None:
            model.generate(ids[:, :8], max_new_tokens=3, do_sample=False, num_beams=1, **arguments)

        if request.compare:
            warm_up(draft_arguments)
        hf.stats(model).clear()
        draft_calls.count = 0
        if write_prompt is not None:
            write_prompt(_shown_prompt(request.prompt))
        stream = TextStream(tokenizer, write)
        replay = run(draft_arguments, stream)
        if write is not None:
            write("\n")
        stats = hf.stats(model)
        counters = {
            **{name: value for name, value in asdict(stats).items() if name != "model_calls"},
            "accepted_per_call": stats.accepted_per_call,
            "draft_model_calls": draft_calls.count if drafting else None,
        }
        stock = None
        if request.compare:
            note("running stock greedy decoding to compare")
            hf.disable(model)
            warm_up({})
            stock = run({}, TextStream(tokenizer))
    stock_calls = replay.new_tokens if stock is None else stock.model_calls
    return Outcome(
        model=_model_facts(model, states, request),
        settings={
            "draft": request.draft,
            "max_new_tokens": request.max_new_tokens,
            "window": request.window,
            "max_query_len": request.max_query_len,
            "state_dtype": _name(states.settings.state_dtype),
            "ring_dtype": _name(states.settings.ring_dtype),
        },
        prompt_tokens=ids.shape[1],
        text=stream.text,
        replay=replay,
        counters=counters,
        stock=stock,
        stock_state_bytes=stock_state_bytes(states.shape, len(states.devices), stock_calls),
    )


class _Calls:
    """Counts the forwards of a module: a forward pre-hook."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, *_: object) -> None:
        self.count += 1


def _load_assistant(request: Request, tokenizer: Any, model: Any, device: torch.device) -> Any:
    """The draft model, enabled if it has Gated DeltaNet layers, set to draft no more than one step can verify."""
    hf, path = integration(), Path(request.draft)
    assistant = load_model("--draft", path, DTYPES[request.dtype], device, only_gdn=False)
    ours, theirs = model.config.get_text_config().vocab_size, assistant.config.get_text_config().vocab_size
    if ours != theirs or load_tokenizer("--draft", path).get_vocab() != tokenizer.get_vocab():
        raise ArgumentError(f"--draft: {path}: expected a model with the tokenizer of --model, got another vocabulary")
    if hf.compat.is_transformers_class(assistant, hf.compat.CAUSAL_CLASSES):
        hf.enable(assistant, window=request.window, max_query_len=request.max_query_len)
    assistant.generation_config.num_assistant_tokens = request.max_query_len - 1
    assistant.generation_config.num_assistant_tokens_schedule = "constant"
    return assistant


def _shown_prompt(prompt: str, limit: int = 1000) -> str:
    """The prompt, or the end of a long one."""
    return prompt if len(prompt) <= limit else f"[...]{prompt[-limit:]}"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _model_facts(model: Any, states: Any, request: Request) -> dict[str, Any]:
    H, HV, K, V = states.shape.sizes
    return {
        "path": str(request.model),
        "class": type(model).__name__,
        "dtype": request.dtype,
        "device": request.device,
        "num_gdn_layers": len(states.devices),
        "num_k_heads": H,
        "num_v_heads": HV,
        "head_k_dim": K,
        "head_v_dim": V,
    }


def _describe(model: Any, states: Any, request: Request) -> str:
    facts = _model_facts(model, states, request)
    return (
        f"{facts['class']}, {request.dtype} on {request.device}; {facts['num_gdn_layers']} GDN layers with "
        f"{facts['num_k_heads']} key heads of {facts['head_k_dim']} and {facts['num_v_heads']} value heads of "
        f"{facts['head_v_dim']}, states in {_name(states.settings.state_dtype)}"
    )

"""Text that appears as it is generated."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from torch import Tensor

CONTEXT_TOKENS = 5
"""Tokens before the new ones that are decoded with them: whether a word begins with a space depends on them."""

INCOMPLETE = "\ufffd"
"""What a tokenizer decodes the first bytes of a character to."""


class TextStream:
    """A streamer for `generate(streamer=)`: decodes tokens as they come, and notes when the first of them came.

    Args:
        tokenizer: decodes.
        write: called with each new piece of text; None: the text is only kept.
    """

    def __init__(self, tokenizer: Any, write: Callable[[str], None] | None = None) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._tokens: list[int] = []
        self._prompt_tokens = 0
        self._context = 0  # decoding begins here
        self._shown = 0  # tokens before this one are in the text
        self.text = ""
        self.first_at: float | None = None
        self.first_tokens = 0

    @property
    def new_tokens(self) -> int:
        """Tokens after the prompt."""
        return len(self._tokens) - self._prompt_tokens

    def put(self, value: Tensor) -> None:
        """Take the prompt, on the first call, or some new tokens."""
        ids = value.reshape(-1).tolist()
        self._tokens += ids
        if not self._prompt_tokens:
            self._prompt_tokens = self._shown = len(ids)
            self._context = max(0, len(ids) - CONTEXT_TOKENS)
            return
        if self.first_at is None:
            self.first_at, self.first_tokens = time.perf_counter(), len(ids)
        self._show(last=False)

    def end(self) -> None:
        """No more tokens will come."""
        self._show(last=True)

    def _show(self, last: bool) -> None:
        known = self._decode(self._tokens[self._context : self._shown])
        text = self._decode(self._tokens[self._context :])
        if len(text) <= len(known) or (text.endswith(INCOMPLETE) and not last):
            return
        piece = text[len(known) :]
        self._context, self._shown = self._shown, len(self._tokens)
        self.text += piece
        if self._write is not None:
            self._write(piece)

    def _decode(self, tokens: list[int]) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        return text

"""Requests of bytes (the tiny model's tokens) for the engine tests; the same every time."""

from __future__ import annotations

import random
from pathlib import Path

TEXT = Path(__file__).resolve().parents[2].joinpath("src", "replaystate", "cache.py").read_bytes()
CHUNK = 64
"""Tokens a step may run in the mixed workload, so that longer prompts come in chunks."""
DRAFTS = 3


def mixed() -> list[dict]:
    """48 requests that arrive over time: prompts of lengths that have gone wrong somewhere, some of them aborted."""
    chance = random.Random(5)
    awkward = [1, 2, DRAFTS, DRAFTS + 1, CHUNK, CHUNK + 1, CHUNK + DRAFTS + 1, 2 * CHUNK + 1, 127, 128, 129, 256]
    requests = []
    for i in range(48):
        length = awkward[i] if i < len(awkward) else chance.randrange(1, 150)
        if i % 6 == 5:
            length = 1  # beside decoding requests vLLM puts placeholders of drafts behind a prompt's only token
        start = chance.randrange(len(TEXT) - length)
        request = {"prompt": list(TEXT[start : start + length]), "max_tokens": chance.randrange(1, 60)}
        request["arrives"] = i
        request["aborted"] = i + 4 + chance.randrange(12) if i % 8 == 7 else None
        requests.append(request)
    return requests


def shared_prefixes() -> list[list[dict]]:
    """Batches that reuse prefixes: of a prompt, of one another, and of what an earlier request wrote."""
    system = list(TEXT[:600])
    first = [{"prompt": system + list(TEXT[1000:1010]), "max_tokens": 40}]
    others = [
        {"prompt": system + list(TEXT[at : at + 7 * i + 1]), "max_tokens": 30, "arrives": i}
        for i, at in enumerate((2000, 3000, 4000, 5000))
    ]
    long = [{"prompt": list(TEXT[7000:7100]), "max_tokens": 450}]
    again = [{"after": [2, 0], "extra": list(TEXT[8000 : 8000 + n]), "max_tokens": 30} for n in (1, 2, 40)]
    twice = [{"prompt": list(TEXT[9000:9300]), "max_tokens": 20}] * 2
    return [first, others, long, again, twice]


def plain(count: int = 16, max_tokens: int = 80) -> list[dict]:
    """Prompts of code for comparing logprobs."""
    chance = random.Random(7)
    starts = [chance.randrange(len(TEXT) - 200) for _ in range(count)]
    return [{"prompt": list(TEXT[at : at + chance.randrange(20, 200)]), "max_tokens": max_tokens} for at in starts]

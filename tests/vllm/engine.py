"""Runs one vLLM engine in a process of its own: `python -m tests.vllm.engine JOB.json RESULT.json`.

A job is {"engine": arguments of `LLM`, "batches": [batch, ...]}; a batch is a list of requests that live together:
{"prompt": token ids, "max_tokens": n, "arrives": step, "aborted": step or null}, or "after": [batch, request] and
"extra": token ids in place of the prompt, to go on from what a request of an earlier batch wrote. The result holds, for
each batch, what every request got, and what the engine counted.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any


def run_batch(engine: Any, batch: list[dict], prefix: str) -> list[dict]:
    """Step the engine by hand, so that requests arrive and are aborted at given steps."""
    from vllm import SamplingParams
    from vllm.inputs import TokensPrompt

    finished: dict[str, Any] = {}
    partial: dict[str, Any] = {}
    step = 0
    waiting = {f"{prefix}-{i}": request for i, request in enumerate(batch)}
    aborts = {key: request["aborted"] for key, request in waiting.items() if request.get("aborted") is not None}
    while waiting or engine.has_unfinished_requests():
        for key in [key for key, request in waiting.items() if request.get("arrives", 0) <= step]:
            request = waiting.pop(key)
            parameters = SamplingParams(
                temperature=0, max_tokens=request["max_tokens"], ignore_eos=True, logprobs=0,
            )  # fmt: skip
            engine.add_request(key, TokensPrompt(prompt_token_ids=request["prompt"]), parameters)
        stopped = [key for key, at in aborts.items() if at == step and key not in finished]
        if stopped:
            engine.abort_request(stopped)
        for output in engine.step():
            partial[output.request_id] = output
            if output.finished:
                finished[output.request_id] = output
        step += 1
    results = []
    for i in range(len(batch)):
        output = finished.get(f"{prefix}-{i}") or partial.get(f"{prefix}-{i}")
        if output is None:
            results.append({"prompt": batch[i]["prompt"], "tokens": [], "logprobs": [], "cached": 0})
            continue
        sample = output.outputs[0]
        chosen = [entry[token].logprob for token, entry in zip(sample.token_ids, sample.logprobs, strict=True)]
        results.append(
            {"prompt": batch[i]["prompt"], "tokens": list(sample.token_ids), "logprobs": chosen,
             "cached": output.num_cached_tokens}
        )  # fmt: skip
    return results


def main() -> None:
    from vllm import LLM

    job = json.loads(Path(sys.argv[1]).read_text())
    llm = LLM(**job["engine"])
    engine = llm.llm_engine
    cache = engine.vllm_config.cache_config
    batches, seconds = [], []
    for i, batch in enumerate(job["batches"]):
        start = time.perf_counter()
        for request in batch:
            if "after" in request:
                j, k = request["after"]
                request["prompt"] = job["batches"][j][k]["prompt"] + batches[j][k]["tokens"] + request["extra"]
        batches.append(run_batch(engine, batch, str(i)))
        seconds.append(time.perf_counter() - start)
        Path(sys.argv[2]).with_suffix(".partial").write_text(json.dumps(batches))
        Path(sys.argv[2]).with_suffix(".partial").replace(Path(sys.argv[2]).with_suffix(".progress"))
    counters = {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}
    result = {
        "batches": batches,
        "seconds": seconds,
        "block_size": cache.block_size,
        "num_blocks": cache.num_gpu_blocks,
        "cache_tokens": cache.kv_cache_size_tokens,
        "counters": counters,
    }
    Path(sys.argv[2]).write_text(json.dumps(result))


if __name__ == "__main__":
    main()

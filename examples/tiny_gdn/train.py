"""Train a tiny byte-level hybrid language model (3 GDN : 1 attention) on Python's own standard library.

The model is a stock ``Qwen3_5ForCausalLM`` from transformers. The text is the ``.py`` sources of the
standard library of the interpreter that runs this script, so nothing has to be downloaded. With the same
Python, the same torch build and the same kind of CPU, two runs write the same bytes of weights.

Usage::

    python examples/tiny_gdn/train.py --out examples/tiny_gdn/model
"""

from __future__ import annotations

import argparse
import hashlib
import math
import os
import platform
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import GenerationConfig, PreTrainedTokenizerFast, Qwen3_5ForCausalLM, Qwen3_5TextConfig
from transformers import __version__ as transformers_version
from transformers.utils import logging as transformers_logging

EOS_ID, PAD_ID, VOCAB_SIZE = 256, 257, 264
SPECIAL_TOKENS = ("<|endoftext|>", "<|pad|>", *(f"<|reserved_{i}|>" for i in range(VOCAB_SIZE - 258)))
NUM_LAYERS = 4
CONTEXT_LIMIT = 32768
EVAL_WINDOW = 1024
EVAL_EVERY = 500
SAMPLE_BYTES = 320
TEMPERATURE = 0.6
SAMPLE_PROMPTS = (
    "class Queue:",
    "import os\n\n\ndef read_lines(path):\n",
    "class Node:\n    def __init__(self",
    'class Reader:\n    """Read records from a file."""\n\n    def __init__(self, name, mode, encoding):\n'
    "        self.name = name\n        self.mode = mode\n",
)

EXCLUDED_DIRS = frozenset(
    "__pycache__ __phello__ dist-packages distutils encodings ensurepip idlelib lib-dynload lib2to3 "
    "pydoc_data site-packages test tests tkinter turtledemo venv".split()
)
EXCLUDED_FILES = frozenset(
    "__hello__.py antigravity.py html/entities.py site.py sitecustomize.py sysconfig.py this.py turtle.py "
    "usercustomize.py".split()
)
HELD_OUT = (
    "argparse.py",
    "asyncio/queues.py",
    "calendar.py",
    "collections/__init__.py",
    "configparser.py",
    "csv.py",
    "email/message.py",
    "fractions.py",
    "http/cookies.py",
    "importlib/metadata/__init__.py",
    "json/decoder.py",
    "logging/config.py",
    "multiprocessing/pool.py",
    "shutil.py",
    "statistics.py",
    "textwrap.py",
    "tomllib/_parser.py",
    "unittest/suite.py",
    "urllib/robotparser.py",
    "xml/dom/pulldom.py",
    "zipfile.py",
)


CARD = """---
license: psf-2.0
library_name: transformers
pipeline_tag: text-generation
tags:
- gated-delta-net
- byte-level
- tiny
---

# tiny_gdn

A byte-level language model of {r.parameters:,} parameters that writes something like Python. It exists to
test and demonstrate decoding with hybrid models (3 GDN layers : 1 attention layer), and is good for nothing
else.

- Architecture: `Qwen3_5ForCausalLM`, the stock transformers class; dense, tied embeddings, 3 GDN layers and
  1 attention layer. GDN: 2 key heads, 4 value heads, K = V = 64, convolution of width 4.
- Parameters: {r.parameters:,}, stored as fp16 in safetensors. Load them with `dtype=torch.float32` on a CPU.
- Vocabulary: 256 bytes (the id is the value of the byte) and 8 special tokens.
- Held-out loss: **{r.held_out_bpb:.4f} bits per byte**, of the saved fp16 weights, in windows of
  {window} bytes that start without context.
- Final training loss: {r.train_loss:.4f} nats per byte = {train_bpb:.4f} bits per byte (mean of the last
  100 steps).
- Training: {r.steps} steps on windows from anywhere in the text, then {prompt_steps} steps on windows that
  begin at a top-level statement; {r.bytes_seen:,} bytes in all. {r.threads} CPU threads, seed {r.seed}.
- Time of training: {cpu_minutes:.1f} minutes of CPU, all threads together; {minutes:.1f} minutes by the clock,
  which is more than the former divided by the number of threads where other programs share the CPU.
- Made with Python {python}, torch {torch}, transformers {transformers}.
- sha256 of `model.safetensors`: `{r.weights_sha256}`

## Use

```python
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

folder = "examples/tiny_gdn/model"
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
inputs = tokenizer("import os\\n\\n\\ndef read_lines(path):\\n", return_tensors="pt")
print(tokenizer.decode(model.generate(**inputs, max_new_tokens=200)[0]))
```

## Data

The `.py` sources of the standard library of Python {python}: {files} files, {train_bytes:,} bytes to train
on and {held_out_bytes:,} bytes held out. Tests, generated tables, packages that some distributions ship apart
and files that differ between platforms are left out. sha256 over the names and contents of all files used:
`{corpus_sha256}`.

Held out, never trained on: {held_out_files}.

## Licence

The data is part of Python, which is licensed under the Python Software Foundation License Version 2 (a few
modules carry notices of their own, listed in Python's documentation under "History and License"). The weights
are made available under the same licence. The model may write out pieces of what it was trained on.

## Reproduce

<!-- no-run: needs half an hour -->
```console
$ python examples/tiny_gdn/train.py --steps {r.steps} --threads {r.threads} --seed {r.seed}
```

The same versions on the same kind of CPU write the same bytes of weights.

## Samples

Greedy decoding writes Python for some lines and then runs in circles, as small models do, so drafts looked up in
earlier text are accepted more often than with a large model. Sampling keeps it varied.

{samples}"""

SAMPLE = """Prompt:

```text
{prompt}
```

Greedy:

```text
{greedy}
```

Sampled at temperature {temperature}:

```text
{sampled}
```
"""


@dataclass(frozen=True)
class Stage:
    """A part of a phase: its share of the steps, and the shape of its batches."""

    share: float
    batch_size: int
    seq_len: int


@dataclass(frozen=True)
class Phase:
    """One descent of the learning rate: its peak as a factor, its stages, and where windows of text begin."""

    lr_factor: float
    stages: tuple[Stage, ...]
    top_level: bool


# The second phase is short. Its windows begin where a top-level statement does, as prompts do.
MAIN_PHASE = Phase(lr_factor=1.0, stages=(Stage(0.8, 8, 512), Stage(0.2, 2, 2048)), top_level=False)
PROMPT_PHASE = Phase(lr_factor=0.2, stages=(Stage(1.0, 8, 512),), top_level=True)


@dataclass(frozen=True)
class Corpus:
    """The training and held-out bytes as token ids, with a digest of the sources they come from."""

    train: torch.Tensor
    held_out: torch.Tensor
    sha256: str
    num_files: int


@dataclass(frozen=True)
class Result:
    """What a run reports in the model card."""

    steps: int
    seed: int
    threads: int
    seconds: float
    cpu_seconds: float
    bytes_seen: int
    parameters: int
    train_loss: float
    held_out_bpb: float
    weights_sha256: str
    samples: tuple[tuple[str, str, str], ...]


def log(message: str) -> None:
    """Write one line of progress to stderr."""
    print(message, file=sys.stderr, flush=True)


# ---------------------------------------------------------------------------------------------------- corpus


def stdlib_sources(root: Path) -> list[Path]:
    """List the standard library's sources to use, as sorted paths relative to ``root``."""
    found = []
    for folder, subdirs, names in os.walk(root):
        subdirs[:] = [d for d in subdirs if d not in EXCLUDED_DIRS and not d.startswith("config-")]
        relative = Path(folder).relative_to(root)
        found += [relative / n for n in names if n.endswith(".py") and not n.startswith("_sysconfigdata")]
    return sorted((p for p in found if p.as_posix() not in EXCLUDED_FILES), key=lambda p: p.as_posix())


def load_corpus() -> Corpus:
    """Read the running interpreter's standard library; every file ends with the end-of-text token."""
    root = Path(sysconfig.get_path("stdlib"))
    digest = hashlib.sha256()
    parts: dict[bool, list[int]] = {False: [], True: []}
    sources = stdlib_sources(root)
    for path in sources:
        data = (root / path).read_bytes().replace(b"\r\n", b"\n")
        digest.update(path.as_posix().encode() + b"\0" + len(data).to_bytes(8, "big") + data)
        tokens = parts[path.as_posix() in HELD_OUT]
        tokens.extend(data)
        tokens.append(EOS_ID)
    train, held_out = (torch.tensor(parts[key], dtype=torch.int16) for key in (False, True))
    return Corpus(train, held_out, digest.hexdigest(), len(sources))


def top_level_starts(tokens: torch.Tensor) -> torch.Tensor:
    """Return the positions that begin a file, or a line that is not indented and follows an empty line."""
    before, last, first = tokens[:-2], tokens[1:-1], tokens[2:]
    after_blank = (before == ord("\n")) & (last == ord("\n")) & (first > ord(" "))
    starts = (after_blank | (last == EOS_ID)).nonzero().flatten() + 2
    return torch.cat([torch.zeros(1, dtype=torch.long), starts])


def window_starts(tokens: torch.Tensor, seq_len: int, top_level: bool, generator: torch.Generator) -> list[int]:
    """Return the starts of the windows of one pass over the text, in random order."""
    if top_level:
        starts = top_level_starts(tokens)
        starts = starts[starts < len(tokens) - seq_len - 1]
    else:
        offset = int(torch.randint(seq_len, (1,), generator=generator))
        starts = torch.arange(offset, len(tokens) - seq_len - 1, seq_len)
    return starts[torch.randperm(len(starts), generator=generator)].tolist()


def batches(tokens: torch.Tensor, phase: Phase, steps: int, seed: int) -> Iterator[torch.Tensor]:
    """Yield ``steps`` batches of windows of ``tokens``."""
    generator = torch.Generator().manual_seed(seed)
    ends = [round(steps * sum(s.share for s in phase.stages[: i + 1])) for i in range(len(phase.stages))]
    for stage, count in zip(phase.stages, (b - a for a, b in pairwise([0, *ends])), strict=True):
        order: list[int] = []
        for _ in range(count):
            if len(order) < stage.batch_size:
                order = window_starts(tokens, stage.seq_len, phase.top_level, generator)
            picked = [order.pop() for _ in range(stage.batch_size)]
            yield torch.stack([tokens[i : i + stage.seq_len + 1] for i in picked]).long()


# ------------------------------------------------------------------------------------------------- tokenizer


def byte_alphabet() -> list[str]:
    """Return the character that stands for each byte in byte-level BPE, indexed by the byte's value."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    table = {b: chr(b) for b in printable}
    table.update((b, chr(0x100 + i)) for i, b in enumerate(b for b in range(256) if b not in table))
    return [table[b] for b in range(256)]


def build_tokenizer() -> PreTrainedTokenizerFast:
    """Build a byte tokenizer: ids 0 to 255 are the bytes of the text's UTF-8, the rest are special tokens."""
    vocab = {char: byte for byte, char in enumerate(byte_alphabet())}
    core = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in SPECIAL_TOKENS])
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        eos_token=SPECIAL_TOKENS[0],
        pad_token=SPECIAL_TOKENS[1],
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT_LIMIT,
    )


# ----------------------------------------------------------------------------------------------------- model


def build_model(seed: int) -> Qwen3_5ForCausalLM:
    """Build the untrained model, with decay rates that remember from about ten to a thousand bytes."""
    torch.manual_seed(seed)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=NUM_LAYERS,
        layer_types=["full_attention" if i % 4 == 3 else "linear_attention" for i in range(NUM_LAYERS)],
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        linear_conv_kernel_dim=4,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.25},
        max_position_embeddings=CONTEXT_LIMIT,
        tie_word_embeddings=True,
        eos_token_id=EOS_ID,
        pad_token_id=PAD_ID,
    )
    model = Qwen3_5ForCausalLM(config)
    step_sizes = torch.logspace(-3, -1, config.linear_num_value_heads)
    for layer in model.model.layers:
        if hasattr(layer, "linear_attn"):
            layer.linear_attn.A_log.data.zero_()
            layer.linear_attn.dt_bias.data.copy_(step_sizes.expm1().log())
    return model


def token_loss(model: Qwen3_5ForCausalLM, batch: torch.Tensor) -> torch.Tensor:
    """Return the mean cross-entropy, in nats per byte, of each window's next bytes."""
    logits = model(input_ids=batch[:, :-1], use_cache=False).logits
    return F.cross_entropy(logits.reshape(-1, VOCAB_SIZE), batch[:, 1:].reshape(-1))


@torch.no_grad()
def bits_per_byte(model: Qwen3_5ForCausalLM, tokens: torch.Tensor, every: int = 1) -> float:
    """Return the bits per byte on windows of ``tokens`` (all, or one in ``every``), each without context."""
    windows = tokens.long().unfold(0, EVAL_WINDOW + 1, EVAL_WINDOW)[::every]
    model.eval()
    losses = [token_loss(model, part) * len(part) for part in windows.split(8)]
    model.train()
    return float(torch.stack(losses).sum()) / len(windows) / math.log(2)


# -------------------------------------------------------------------------------------------------- training


def optimizers(model: Qwen3_5ForCausalLM) -> list[torch.optim.Optimizer]:
    """Return Muon for the layers' large matrices and AdamW for everything else."""
    matrices: list[torch.nn.Parameter] = []
    rest: list[torch.nn.Parameter] = []
    for name, parameter in model.named_parameters():
        large = parameter.ndim == 2 and min(parameter.shape) >= 64 and "embed" not in name
        (matrices if large else rest).append(parameter)
    return [
        torch.optim.Muon(matrices, lr=0.02, momentum=0.95, weight_decay=0.02),
        torch.optim.AdamW(rest, lr=0.004, betas=(0.9, 0.98), weight_decay=0.0),
    ]


def prompt_steps(steps: int) -> int:
    """Return the number of steps of the second phase."""
    return max(1, steps // 9)


def lr_scale(step: int, steps: int) -> float:
    """Return the factor on the learning rates: a short linear warmup, then a cosine to (almost) zero."""
    warmup = min(100, steps // 10 + 1)
    if step < warmup:
        return (step + 1) / warmup
    return 0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, steps - warmup)))


def train(model: Qwen3_5ForCausalLM, corpus: Corpus, phase: Phase, steps: int, seed: int) -> tuple[float, int]:
    """Train in place; return the mean training loss of the last steps (nats per byte) and the bytes seen."""
    opts = optimizers(model)
    peaks = [phase.lr_factor * opt.param_groups[0]["lr"] for opt in opts]
    recent: list[float] = []
    seen, start = 0, time.monotonic()
    for step, batch in enumerate(batches(corpus.train, phase, steps, seed), start=1):
        for opt, peak in zip(opts, peaks, strict=True):
            opt.param_groups[0]["lr"] = peak * lr_scale(step - 1, steps)
            opt.zero_grad(set_to_none=True)
        loss = token_loss(model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for opt in opts:
            opt.step()
        seen += batch[:, 1:].numel()
        recent = [*recent[-99:], loss.item()]
        if step % 50 == 0 or step == steps:
            rate, mean = seen / (time.monotonic() - start), sum(recent[-50:]) / len(recent[-50:])
            log(f"step {step}/{steps}: loss {mean:.4f} nats/byte, {rate:.0f} bytes/s")
        if step % EVAL_EVERY == 0:
            probe = bits_per_byte(model, corpus.held_out, every=8)
            log(f"step {step}/{steps}: {probe:.4f} bits/byte on an eighth of the held-out text")
    return sum(recent) / len(recent), seen


def train_both(model: Qwen3_5ForCausalLM, corpus: Corpus, steps: int, seed: int) -> tuple[float, int]:
    """Train in two phases, the second from fp16 weights with fresh optimizers; return what ``train`` does."""
    _, seen = train(model, corpus, MAIN_PHASE, steps, seed)
    with torch.no_grad():
        for parameter in model.parameters():  # not model.half(): that rounds the rotary frequencies too
            parameter.copy_(parameter.half())
    train_loss, more = train(model, corpus, PROMPT_PHASE, prompt_steps(steps), seed + 1)
    return train_loss, seen + more


# ---------------------------------------------------------------------------------------------------- output


def save(model: Qwen3_5ForCausalLM, out: Path) -> str:
    """Write fp16 weights, configs and tokenizer to ``out``; return the sha256 of the weights file."""
    model.generation_config = GenerationConfig(do_sample=False, eos_token_id=EOS_ID, pad_token_id=PAD_ID)
    model.half().save_pretrained(out)
    build_tokenizer().save_pretrained(out)
    return hashlib.sha256((out / "model.safetensors").read_bytes()).hexdigest()


@torch.no_grad()
def sample(model: Qwen3_5ForCausalLM, prompt: str, temperature: float | None = None) -> str:
    """Return a continuation of ``prompt``: drawn at ``temperature``, or greedy without one."""
    torch.manual_seed(0)
    ids = torch.tensor([list(prompt.encode())])
    options = {"do_sample": True, "temperature": temperature, "top_k": 0} if temperature else {"do_sample": False}
    output = model.generate(ids, max_new_tokens=SAMPLE_BYTES, **options)
    return bytes(i for i in output[0, ids.shape[1] :].tolist() if i < 256).decode(errors="replace")


def model_card(corpus: Corpus, result: Result) -> str:
    """Return the text of the model card."""
    samples = (
        SAMPLE.format(prompt=p.rstrip(), greedy=p + a, sampled=p + b, temperature=TEMPERATURE)
        for p, a, b in result.samples
    )
    return CARD.format(
        python=platform.python_version(),
        torch=torch.__version__,
        transformers=transformers_version,
        files=corpus.num_files,
        corpus_sha256=corpus.sha256,
        train_bytes=len(corpus.train),
        held_out_bytes=len(corpus.held_out),
        held_out_files=", ".join(f"`{name}`" for name in HELD_OUT),
        train_bpb=result.train_loss / math.log(2),
        minutes=result.seconds / 60,
        cpu_minutes=result.cpu_seconds / 60,
        window=EVAL_WINDOW,
        prompt_steps=prompt_steps(result.steps),
        r=result,
        samples="\n".join(samples),
    )


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "model", help="folder to write")
    parser.add_argument("--steps", type=int, default=1800, help="steps of the first phase (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="CPU threads (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed (default: %(default)s)")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Train, save and evaluate the model, and write its card."""
    args = parse_args(argv)
    transformers_logging.set_verbosity_error()
    torch.set_num_threads(args.threads)
    torch.use_deterministic_algorithms(True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    torch.set_float32_matmul_precision("medium")  # bf16 matrix products, on CPUs that have them
    corpus = load_corpus()
    log(f"{corpus.num_files} files, {len(corpus.train)} bytes to train on, {len(corpus.held_out)} held out")
    model = build_model(args.seed)
    log(f"{model.num_parameters()} parameters")
    start, cpu_start = time.monotonic(), time.process_time()
    train_loss, bytes_seen = train_both(model, corpus, args.steps, args.seed)
    seconds, cpu_seconds = time.monotonic() - start, time.process_time() - cpu_start
    weights_sha256 = save(model, args.out)

    torch.set_float32_matmul_precision("highest")
    model = Qwen3_5ForCausalLM.from_pretrained(args.out, dtype=torch.float32)
    result = Result(
        steps=args.steps,
        seed=args.seed,
        threads=args.threads,
        seconds=seconds,
        cpu_seconds=cpu_seconds,
        bytes_seen=bytes_seen,
        parameters=model.num_parameters(),
        train_loss=train_loss,
        held_out_bpb=bits_per_byte(model, corpus.held_out),
        weights_sha256=weights_sha256,
        samples=tuple((p, sample(model.eval(), p), sample(model.eval(), p, TEMPERATURE)) for p in SAMPLE_PROMPTS),
    )
    (args.out / "README.md").write_text(model_card(corpus, result), encoding="utf-8")
    log(f"held-out: {result.held_out_bpb:.4f} bits/byte, from the saved fp16 weights")
    log(f"training took {seconds:.0f} s, {cpu_seconds:.0f} s of CPU time")
    log(f"sha256 of model.safetensors: {weights_sha256}")


if __name__ == "__main__":
    main()

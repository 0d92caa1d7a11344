"""`replaystate generate`, on a random model with scaled weights and on the trained one of examples/tiny_gdn.

How this tests, in plain words: the command runs in this process, with every way to a network blocked. What it prints
is compared with what the library says of the same prompt; a rollback broken on purpose must turn "identical" into a
failure.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from replaystate import GDNShape, ReplayCache
from replaystate.cli import generation, output
from replaystate.cli.stream import TextStream

from .conftest import Finished, save_model, save_tokenizer

TINY_GDN = Path(__file__).resolve().parents[2] / "examples" / "tiny_gdn" / "model"
PROMPT = "the cat sat. the cat sat. the c"

Command = Callable[..., Finished]


def test_text_and_table_on_stdout_progress_on_stderr(command: Command, model_folder: Path) -> None:
    done = command("generate", "--model", model_folder, "--prompt", PROMPT, "--max-new-tokens", 20)
    assert done.code == 0
    assert done.out.startswith(PROMPT)
    for row in ("new tokens", "model calls", "folds", "GDN state read", "GDN state written", "decode", "not compared"):
        assert row in done.out
    assert "loading" in done.err
    assert "loading" not in done.out
    assert "\x1b" not in done.out + done.err
    assert max(len(line) for line in done.out[len(PROMPT) :].splitlines()[-12:]) <= 80


def test_json_is_the_only_thing_on_stdout(command: Command, model_folder: Path) -> None:
    arguments = ("--draft", "prompt-lookup", "--max-query-len", 4, "--max-new-tokens", 40, "--compare", "--json")
    done = command("generate", "--model", model_folder, "--prompt", PROMPT, *arguments)
    found = done.json()
    assert done.code == 0
    assert found["command"] == "generate"
    assert set(found["versions"]) == {"replaystate", "torch", "transformers"}
    assert found["model"]["class"] == "Qwen3_5ForCausalLM"
    assert found["model"]["num_gdn_layers"] == 2
    assert found["settings"]["state_dtype"] == "float32"
    assert found["prompt_tokens"] == len(PROMPT)
    replay, stock = found["replay"], found["stock"]
    assert len(found["text"]) == replay["new_tokens"] == stock["new_tokens"] == 40
    assert replay["token_ids"] == stock["token_ids"]
    assert found["identical_to_stock"] is True
    assert found["first_difference"] is None
    assert stock["model_calls"] == 40
    assert 0 < replay["model_calls"] < 40
    assert replay["accepted_per_call"] == replay["accepted"] / replay["model_calls"]
    assert replay["draft_model_calls"] is None
    assert (stock["state_bytes_read"], stock["state_bytes_written"]) == generation.stock_state_bytes(
        GDNShape(1, 2, 16, 16), num_layers=2, model_calls=40
    )


def test_streamed_text_is_that_of_the_library(command: Command, model_folder: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_folder)
    model = AutoModelForCausalLM.from_pretrained(model_folder, dtype=torch.float32)
    inputs = tokenizer(PROMPT, return_tensors="pt")
    tokens = model.generate(**inputs, max_new_tokens=30, do_sample=False)
    expected = tokenizer.decode(tokens[0])
    done = command("generate", "--model", model_folder, "--prompt", PROMPT, "--max-new-tokens", 30)
    assert done.out.startswith(f"{expected}\n\n")


def test_a_draft_model_with_gdn_layers(command: Command, model_folder: Path) -> None:
    """Drafting with the model itself: all drafts are right, so calls are few and tokens the same."""
    options = ("--max-query-len", 4, "--window", 8, "--max-new-tokens", 24, "--compare", "--json")
    done = command("generate", "--model", model_folder, "--prompt", PROMPT, "--draft", model_folder, *options)
    found = done.json()
    assert (done.code, found["identical_to_stock"]) == (0, True)
    assert found["replay"]["accepted"] == found["replay"]["drafted"] > 0
    assert found["replay"]["draft_model_calls"] >= found["replay"]["drafted"]
    assert found["replay"]["model_calls"] < 24


def test_a_broken_rollback_is_found(command: Command, model_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReplayCache, "crop", lambda *_: None)
    arguments = ("--draft", "prompt-lookup", "--max-new-tokens", 60, "--compare")
    done = command("generate", "--model", model_folder, "--prompt", PROMPT, *arguments)
    assert done.code == 1
    assert "NO" in done.out
    assert "differ from stock greedy decoding, first at" in done.err


def test_16_bit_weights(command: Command, model_folder: Path) -> None:
    arguments = ("--dtype", "bfloat16", "--max-new-tokens", 5, "--json")
    found = command("generate", "--model", model_folder, "--prompt", PROMPT, *arguments).json()
    assert found["settings"]["state_dtype"] == "float16"
    assert found["settings"]["ring_dtype"] == "float16"


def test_prompt_from_file_and_standard_input(
    command: Command, model_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, encoding="utf-8")
    options = ("generate", "--model", model_folder, "--max-new-tokens", 3, "--json")
    texts = [
        command(*options, "--prompt", PROMPT).json()["text"],
        command(*options, "--prompt-file", file).json()["text"],
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO(PROMPT))
    texts.append(command(*options, "--prompt-file", "-").json()["text"])
    assert len(set(texts)) == 1


@pytest.mark.parametrize("draft", ["none", "prompt-lookup"])
def test_the_trained_model(command: Command, draft: str) -> None:
    if not (TINY_GDN / "model.safetensors").is_file():
        pytest.skip(f"{TINY_GDN} is not there")
    prompt = (
        'class Queue:\n    """A queue."""\n\n    def __init__(self, items):\n        self.items = items\n\n    def '
    )
    arguments = ("--draft", draft, "--max-new-tokens", 64, "--compare", "--json")
    done = command("generate", "--model", TINY_GDN, "--prompt", prompt, *arguments)
    found = done.json()
    assert (done.code, found["identical_to_stock"]) == (0, True)
    if draft != "none":
        assert found["replay"]["accepted"] > 0
        assert found["replay"]["model_calls"] < 64


# --- what is refused ---------------------------------------------------------------------------------------------


def refused(done: Finished, code: int, *words: str) -> None:
    """Nothing on stdout, one line on stderr (after lines of progress) that names the cause."""
    assert done.code == code, done.err
    assert done.out == ""
    last = done.err.strip().splitlines()[-1]
    assert last.startswith("replaystate: ")
    assert "Traceback" not in done.err
    for word in words:
        assert word in last


def test_a_missing_folder(command: Command, tmp_path: Path) -> None:
    refused(command("generate", "--model", tmp_path / "none", "--prompt", "x"), 2, "--model", "does not exist")


def test_a_file_for_a_folder(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    refused(command("generate", "--model", tmp_path / "file", "--prompt", "x", "--json"), 2, "is not a folder")


def test_a_folder_without_a_model(command: Command, tmp_path: Path) -> None:
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "config.json")


def test_an_unsupported_class_before_its_weights_are_read(command: Command, tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(num_hidden_layers=1).save_pretrained(tmp_path)
    save_tokenizer(tmp_path)
    done = command("generate", "--model", tmp_path, "--prompt", "x")
    refused(done, 2, "LlamaForCausalLM", "Qwen3NextForCausalLM", "transformers >= 5.17")


def test_a_model_that_is_no_language_model(command: Command, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    save_tokenizer(tmp_path)
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "'vit'")


@pytest.mark.parametrize("config", ['{"model_type": "not-a-model"}', "{", "{}"])
def test_a_damaged_config(command: Command, tmp_path: Path, config: str) -> None:
    save_tokenizer(tmp_path)
    (tmp_path / "config.json").write_text(config)
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "--model", str(tmp_path))


def test_weights_that_are_missing(command: Command, model_folder: Path, tmp_path: Path) -> None:
    """transformers fills missing weights with random numbers and goes on: text of nobody's model."""
    from safetensors.torch import load_file, save_file

    for file in model_folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = load_file(tmp_path / "model.safetensors")
    name = next(name for name in weights if "in_proj_qkv" in name)
    del weights[name]
    save_file(weights, tmp_path / "model.safetensors", metadata={"format": "pt"})
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "weights are missing", "in_proj_qkv")
    (tmp_path / "model.safetensors").write_bytes(b"damaged")
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "cannot be loaded")
    (tmp_path / "model.safetensors").unlink()
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "cannot be loaded")


def test_a_missing_tokenizer(command: Command, model_folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((model_folder / "config.json").read_bytes())
    refused(command("generate", "--model", tmp_path, "--prompt", "x"), 2, "tokenizer")


def test_a_draft_model_with_another_vocabulary(command: Command, model_folder: Path, tmp_path: Path) -> None:
    save_model(tmp_path)
    save_tokenizer(tmp_path, "".join(reversed("abcdefghijklmnopqrstuvwxyz .\n")))
    done = command("generate", "--model", model_folder, "--prompt", "x", "--draft", tmp_path)
    refused(done, 2, "--draft", "vocabulary")


@pytest.mark.parametrize(
    ("options", "code", "word"),
    [
        (["--prompt", ""], 2, "empty prompt"),
        ([], 2, "--prompt-file"),
        (["--prompt", "x", "--prompt-file", "-"], 2, "one of"),
        (["--prompt-file", "/no/such/file"], 2, "/no/such/file"),
        (["--prompt", "x", "--window", "12"], 2, "power of two"),
        (["--prompt", "x", "--max-query-len", "32"], 2, "at most window=16"),
        (["--prompt", "x", "--draft", "prompt-lookup", "--max-query-len", "1"], 2, "at least 2"),
        (["--prompt", "x", "--draft", "/no/such/model"], 2, "--draft"),
        (["--prompt", "x", "--device", "nonsense"], 2, "--device"),
    ],
)
def test_options_that_cannot_be(command: Command, model_folder: Path, options: list[str], code: int, word: str) -> None:
    refused(command("generate", "--model", model_folder, *options), code, word)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
def test_a_device_that_is_not_there(command: Command, model_folder: Path) -> None:
    refused(command("generate", "--model", model_folder, "--prompt", "x", "--device", "cuda"), 3, "cuda")


# --- text that appears as it is generated --------------------------------------------------------------------------


class Bytes:
    """A tokenizer whose tokens are bytes."""

    def decode(self, tokens: list[int], **_: Any) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")


def test_a_character_appears_when_its_last_byte_has_come() -> None:
    pieces: list[str] = []
    stream = TextStream(Bytes(), pieces.append)
    stream.put(torch.tensor([list("é".encode())]))
    for byte in "añ€!".encode():
        stream.put(torch.tensor([byte]))
    stream.put(torch.tensor([list(b"two ")]))
    stream.put(torch.tensor([0xE2]))
    stream.end()
    assert pieces == ["a", "ñ", "€", "!", "two ", "\ufffd"]
    assert stream.text == "añ€!two \ufffd"
    assert (stream.first_tokens, stream.new_tokens) == (1, len("añ€!two ".encode()) + 1)


def test_text_cannot_steer_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    output.write_text("a\x1b[2Jb\r\x07\x9b1m\tc\n")
    assert capsys.readouterr().out == "a\ufffd[2Jb\ufffd\ufffd\ufffd1m\tc\n"


def test_a_long_prompt_is_shown_from_its_end() -> None:
    shown = generation._shown_prompt("x" * 5000 + "end")
    assert shown.startswith("[...]x")
    assert shown.endswith("end")
    assert len(shown) < 1100


def test_first_difference_of_a_longer_text(model_folder: Path) -> None:
    def run(tokens: list[int]) -> generation.Run:
        return generation.Run(tokens, 1, 0.0, 0, 0.0)

    def outcome(ours: list[int], theirs: list[int]) -> generation.Outcome:
        return generation.Outcome({}, {}, 1, "", run(ours), {}, run(theirs), (1, 1))

    assert outcome([1, 2, 3], [1, 9, 3]).first_difference == 1
    assert outcome([1, 2], [1, 2, 3]).first_difference == 2
    assert outcome([1, 2], [1, 2]).first_difference is None
    assert json.dumps(outcome([1], [1]).as_json())

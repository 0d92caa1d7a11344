"""Models and tokenizers from local folders. transformers is reached through `replaystate.transformers` only."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from ..errors import ArgumentError, BackendError, MissingDependencyError, UnsupportedModelError

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")


def integration() -> Any:
    """The module `replaystate.transformers`.

    Raises:
        MissingDependencyError: transformers is not installed, or in a version that is not supported.
    """
    os.environ.setdefault("HF_HUB_OFFLINE", "1")  # read when transformers is imported; we load local folders only
    try:
        from .. import transformers as module
    except UnsupportedModelError as error:
        raise MissingDependencyError(str(error)) from error
    return module


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Errors only, and no progress bars, from transformers."""
    logging = _transformers().utils.logging
    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()


def check_folder(option: str, path: Path) -> Path:
    """Refuse a path that is no model folder, before anything slow happens.

    Raises:
        ArgumentError: no such folder, or no config.json in it.
    """
    if not path.is_dir():
        what = "is not a folder" if path.exists() else "does not exist"
        raise ArgumentError(f"{option}: {path} {what}; expected a local model folder (nothing is downloaded)")
    if not (path / "config.json").is_file():
        raise ArgumentError(f"{option}: {path} holds no config.json; expected a model folder as transformers saves it")
    return path


def check_device(device: str) -> torch.device:
    """The device of that name.

    Raises:
        ArgumentError: torch knows no such device.
        BackendError: this machine has none.
    """
    try:
        where = torch.device(device)
    except RuntimeError as error:
        raise ArgumentError(f"--device: expected a device of torch, e.g. cpu or cuda, got {device!r}") from error
    try:
        torch.empty(0, device=where)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        raise BackendError(f"--device: {device} is not usable here: {one_line(error)}") from error
    return where


def load_tokenizer(option: str, path: Path) -> Any:
    """The tokenizer of a model folder.

    Raises:
        ArgumentError: there is none, or it cannot be read.
    """
    if not any((path / name).is_file() for name in TOKENIZER_FILES):  # transformers would make up an empty one
        raise ArgumentError(f"{option}: {path} holds no tokenizer; expected a file such as {TOKENIZER_FILES[0]}")
    try:
        return _transformers().AutoTokenizer.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # whatever a damaged file makes transformers raise
        raise ArgumentError(f"{option}: {path}: the tokenizer cannot be loaded: {one_line(error)}") from error


def load_model(option: str, path: Path, dtype: torch.dtype, device: torch.device, *, only_gdn: bool) -> Any:
    """The causal language model of a folder, in evaluation mode.

    Args:
        option: for messages.
        path: the folder.
        dtype: of the weights in memory.
        device: where they go.
        only_gdn: refuse a class that `replaystate.transformers.enable` does not take, before its weights are read.

    Raises:
        UnsupportedModelError: (only_gdn) such a class.
        ArgumentError: the folder cannot be loaded, or lacks weights.
    """
    hf = _transformers()
    local = {"local_files_only": True, "trust_remote_code": False}
    try:
        config = hf.AutoConfig.from_pretrained(path, **local)
    except Exception as error:
        raise ArgumentError(f"{option}: {path}: the config cannot be loaded: {one_line(error)}") from error
    if only_gdn:
        _check_class(option, path, config)
    try:
        model, info = hf.AutoModelForCausalLM.from_pretrained(
            path, config=config, dtype=dtype, output_loading_info=True, **local
        )
    except Exception as error:
        raise ArgumentError(f"{option}: {path}: the model cannot be loaded: {one_line(error)}") from error
    missing = sorted(info["missing_keys"])
    if missing:  # transformers fills them with random numbers
        raise ArgumentError(f"{option}: {path}: {len(missing)} weights are missing, among them {missing[0]}")
    return model.to(device).eval()


def one_line(error: BaseException, limit: int = 300) -> str:
    r"""An error's message on one line, or its name where it has none; cut at `limit` characters.

    >>> one_line(ValueError("two\nlines"))
    'two lines'
    """
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= limit else f"{text[:limit]}..."


def _transformers() -> Any:
    return integration().compat.transformers


def _check_class(option: str, path: Path, config: Any) -> None:
    module = integration()
    supported = module.compat.CAUSAL_CLASSES
    mapping = _transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING
    try:
        found = mapping[type(config)].__name__
    except KeyError:
        found = f"a {config.model_type!r} model, which is no causal language model"
    if found not in supported:
        raise UnsupportedModelError(
            f"{option}: {path}: expected one of {', '.join(supported)} of {module.SUPPORTED_VERSIONS}, got {found}"
        )

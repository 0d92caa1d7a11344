"""What this package needs to know of transformers: which versions and classes it works on, and their differing names.

transformers renamed things within 5.x (a cache is `past_key_values`, `cache_params` or `cache`, by version and level).
Those names are dealt with here and nowhere else.
"""

from __future__ import annotations

from typing import Any

from ..errors import MissingDependencyError, UnsupportedModelError

SUPPORTED_VERSIONS = "transformers >= 5.17, < 6"
"""The supported range in words; tested on 5.17, 5.19 and 5.24."""

MIN_VERSION = (5, 17)
NEXT_MAJOR = (6,)

CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Names under which `generate` hands a cache around: the first up to transformers 5.22 at least, the second in 5.24."""

CAUSAL_CLASSES = ("Qwen3NextForCausalLM", "Qwen3_5ForCausalLM", "Qwen3_5MoeForCausalLM")
TEXT_CLASSES = ("Qwen3NextModel", "Qwen3_5TextModel", "Qwen3_5MoeTextModel")
GDN_CLASSES = ("Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet")


def import_transformers() -> Any:
    """Import transformers and check its version.

    Raises:
        MissingDependencyError: transformers is not installed.
        UnsupportedModelError: it is, in a version outside the supported range.
    """
    try:
        import transformers as module
    except ImportError as error:
        raise MissingDependencyError(
            f"replaystate.transformers needs {SUPPORTED_VERSIONS}; install it with `pip install 'replaystate[hf]'`"
        ) from error
    check_version(str(module.__version__))
    return module


def check_version(version: str) -> None:
    """Refuse a transformers version outside the supported range.

    Raises:
        UnsupportedModelError: the version is outside the range, or cannot be read.

    >>> check_version("5.19.0")
    >>> check_version("4.57.6")
    Traceback (most recent call last):
    replaystate.errors.UnsupportedModelError: replaystate.transformers supports transformers >= 5.17, < 6, got 4.57.6
    """
    numbers: list[int] = []
    for part in version.split("."):
        if not part.isdigit():  # "dev0", "0rc1", "0+local": the numbers before it decide
            break
        numbers.append(int(part))
    if not MIN_VERSION <= tuple(numbers) < NEXT_MAJOR:
        raise UnsupportedModelError(f"replaystate.transformers supports {SUPPORTED_VERSIONS}, got {version}")


def is_transformers_class(obj: object, names: tuple[str, ...]) -> bool:
    """Whether obj is an instance of one of transformers' own classes of these names, or of a subclass.

    Asks by name, so that no modelling file is imported for the question.
    """
    return any(cls.__name__ in names and cls.__module__.startswith("transformers.models.") for cls in type(obj).__mro__)


def text_model_of(model: Any) -> Any:
    """The decoder stack of a supported model.

    Raises:
        UnsupportedModelError: the class is not supported; the message lists those that are.
    """
    if is_transformers_class(model, TEXT_CLASSES):
        return model
    if is_transformers_class(model, CAUSAL_CLASSES):
        return model.model
    raise UnsupportedModelError(
        f"enable: model: expected one of {', '.join(CAUSAL_CLASSES + TEXT_CLASSES)} of {SUPPORTED_VERSIONS}, got "
        f"{type(model).__module__}.{type(model).__name__}"
    )


def gdn_layers_of(model: Any) -> dict[int, Any]:
    """The Gated DeltaNet modules of a supported model by layer index, in the order in which a forward runs them.

    Raises:
        UnsupportedModelError: the class is not supported, or this model has no such layer.
    """
    layers: dict[int, Any] = {}
    for index, block in enumerate(text_model_of(model).layers):
        module = getattr(block, "linear_attn", None)
        if module is not None and is_transformers_class(module, GDN_CLASSES):
            layers[index] = module
    if not layers:
        raise UnsupportedModelError(
            f"enable: model: {type(model).__name__} has no Gated DeltaNet layer "
            f"(layer types {sorted(set(model.config.layer_types))}), so there is nothing to replay"
        )
    return layers


def cache_argument(kwargs: dict[str, Any]) -> str | None:
    """The name under which kwargs hold a cache, or None where they hold none."""
    return next((name for name in CACHE_ARGUMENTS if kwargs.get(name) is not None), None)


transformers = import_transformers()

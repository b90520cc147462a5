"""From a model as kvctl reads it to transformers' configuration and class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, Hint
from kvctl.formats import TORCH_NAMES
from kvctl.measure.faults import cannot_build, unknown_type
from kvctl.measure.remote import brought
from kvctl.quantization import of_cache_alone

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.loaded import Wanted
    from kvctl.spec import ModelSpec

_AUTO_CLASSES = ("AutoModelForCausalLM", "AutoModelForMultimodalLM", "AutoModelForImageTextToText",
                 "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq")  # fmt: skip


def config_of(spec: ModelSpec, wanted: Wanted, *, without: tuple[str, ...] = (), text_only: bool = False) -> Any:
    """transformers' own configuration object from what kvctl read, or that of the repository's code, if it is trusted.

    Raises:
        ConfigError: transformers does not know the type, or it cannot be made of what the configuration says.

    """
    from transformers import CONFIG_MAPPING

    facts = {key: value for key, value in plain(spec.config).items() if key not in without}
    name = facts.get("model_type")
    made_by = brought(spec, wanted, ("AutoConfig",))
    if made_by is None:
        if not isinstance(name, str) or name not in CONFIG_MAPPING:
            raise unknown_type(spec, str(name), trusted=wanted.trust_remote_code)
        made_by = CONFIG_MAPPING[name]
    quantized = facts.get("quantization_config")
    if quantized is not None and not isinstance(quantized, Mapping):
        raise ConfigError(f"{spec.id}: quantization_config is {str(quantized)[:40]!r}, not an object",
                          hint=Hint("--weights random leaves it out", "profile", otherwise="correct it there"))  # fmt: skip
    if quantized is not None and of_cache_alone(quantized):
        del facts["quantization_config"]  # transformers would want a package for it, and its caches do not read scales
    try:
        config = made_by.from_dict({key: value for key, value in facts.items() if value is not None})
    except Exception as error:
        raise cannot_build(spec, error) from None
    config = _text_part(config) if text_only else config
    _check_sizes(spec, config)
    return config


def _check_sizes(spec: ModelSpec, config: Any) -> None:
    """Refuses widths and counts that no model has: torch builds some of them, and fails later or runs nothing."""
    part = config.get_text_config(decoder=True)
    for name in ("num_hidden_layers", "hidden_size", "vocab_size", "head_dim"):
        stored = getattr(part, "attribute_map", {}).get(name, name)
        value = vars(part).get(stored)  # of some (gemma4), asking for what differs by layer is an error
        if isinstance(value, int) and value < 1:
            raise ConfigError(
                f"{spec.id}: {stored} is {value}, and has to be at least 1", hint="correct its config.json"
            )


def _text_part(config: Any) -> Any:
    """The part that makes text, where transformers has a class for it alone."""
    if getattr(config, "is_encoder_decoder", False):
        return config
    part = config.get_text_config(decoder=True)
    return config if _generating(part) is None else part


def _architecture(spec: ModelSpec, config: Any) -> str | None:
    """The class that the configuration names, if it is the one of this object (and not of what it is a part of)."""
    named = spec.config.get("architectures")
    own = config.model_type == spec.config.get("model_type")
    return named[0] if own and isinstance(named, (list, tuple)) and named and isinstance(named[0], str) else None


def class_of(spec: ModelSpec, wanted: Wanted, config: Any) -> Any:
    """The class that generates: the repository's own, if that is trusted; the one that is named; else the one that
    transformers has for the type."""
    import transformers

    own = brought(spec, wanted, _AUTO_CLASSES)
    if own is not None:
        return own
    named = _architecture(spec, config)
    found = getattr(transformers, named, None) if named else None
    made_for = getattr(found, "config_class", None)
    if made_for is not None and not isinstance(config, made_for):
        found = None  # of another type: what the type says counts, as for transformers' own auto classes
    if found is not None and hasattr(found, "forward") and found.can_generate():
        return found
    if found is not None and named is not None and not named.endswith("Model"):
        raise ConfigError(f"{named} does not generate text", hint="profile runs models that predict the next token")
    known = _generating(config)
    if known is not None:
        return known
    raise ConfigError(
        f"transformers {transformers.__version__} has no class that generates text for {config.model_type}",
        hint="profile runs models that predict the next token",
    )


def _generating(config: Any) -> Any:
    """transformers' own class that makes text for this configuration; None where it has none."""
    import transformers

    # Of an encoder-decoder the class of its decoder alone is a causal one too.
    names = _AUTO_CLASSES[::-1] if getattr(config, "is_encoder_decoder", False) else _AUTO_CLASSES
    for name in names:
        mapping = getattr(getattr(transformers, name, None), "_model_mapping", None)
        if mapping is not None and type(config) in mapping:
            found = mapping[type(config)]
            return found[0] if isinstance(found, tuple) else found
    return None


def torch_dtype(dtype: DType) -> Any:
    """torch's own object for one of the model dtypes."""
    import torch

    return getattr(torch, TORCH_NAMES[dtype.name])


def plain(value: Any) -> Any:
    """A configuration as plain containers, with the infinities that saved ones write as {"__float__": "inf"}."""
    if isinstance(value, Mapping):
        if set(value) == {"__float__"}:
            return float(value["__float__"])
        return {key: plain(inner) for key, inner in value.items()}
    return [plain(inner) for inner in value] if isinstance(value, (list, tuple)) else value

"""From a configuration to a `ModelSpec`: layers, dtype, lengths, what-ifs."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from kvctl.errors import ConfigError, UsageError
from kvctl.families import NESTED_NAMES, find_reader, read_layers, text_fields
from kvctl.families.fields import Fields
from kvctl.formats import DType, model_dtype
from kvctl.sources import Found
from kvctl.spec import CrossAttention, FullAttention, Layer, ModelSpec, Naive, Provenance

_SHAPE_HINT = "write --set num_key_value_heads=64, or --set text_config.sliding_window=null"
# Names of the longest input a decoder takes, most specific first.
_LENGTHS = ("max_target_positions", "max_decoder_position_embeddings", "max_text_positions", "n_positions",
            "max_position_embeddings", "max_sequence_length", "model_max_length", "seq_length", "max_seq_len")  # fmt: skip
_ENCODER_LENGTHS = ("max_source_positions",)
_AUDIO = {"whisper", "speech_to_text", "speecht5", "moonshine", "moonshine_streaming", "cohere_asr", "canary",
          "speech-encoder-decoder", "seamless_m4t", "seamless_m4t_v2", "pop2piano"}  # fmt: skip
_IMAGE = {"mllama_text_model", "pix2struct_text_model", "blip_text_model", "vision-encoder-decoder", "trocr"}


def parse_overrides(items: Sequence[str]) -> dict[str, Any]:
    """Read "key=value" pairs; values are JSON where they can be, else text."""
    out: dict[str, Any] = {}
    for item in items:
        key, equals, text = item.partition("=")
        key = key.strip()
        if not equals or not key or any(not part for part in key.split(".")):
            raise UsageError(f"--set: {item[:60]!r} is not key=value", hint=_SHAPE_HINT)
        try:
            out[key] = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            out[key] = text.strip()
    return out


def _no_number(name: str) -> Any:
    raise UsageError(f"--set: {name} is not a number that a configuration can hold", hint=_SHAPE_HINT)


def apply_overrides(config: Mapping[str, Any], overrides: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """A copy of `config` with what-ifs put in, and the full path each one went to.

    A plain key belongs to the language model: where the file nests that and has no such
    key at the top, the key goes into the nested part.
    """
    out: dict[str, Any] = dict(config)
    paths: dict[str, Any] = {}
    for key, value in overrides.items():
        parts = key.split(".")
        if len(parts) == 1 and key not in out:
            parts = [*_language_model_path(out), key]
        target = out
        for part in parts[:-1]:
            inner = target.get(part)
            if inner is not None and not isinstance(inner, Mapping):
                raise UsageError(f"--set {key}: {part} is not an object in this configuration")
            target[part] = dict(inner or {})
            target = target[part]
        target[parts[-1]] = value
        paths[".".join(parts)] = value
    return out, paths


def _language_model_path(config: Mapping[str, Any]) -> list[str]:
    model_type = config.get("model_type")
    if isinstance(model_type, str) and find_reader(model_type) is not None:
        return []
    for name in NESTED_NAMES:
        inner = config.get(name)
        if isinstance(inner, Mapping):
            return [name, *_language_model_path(inner)]
    return []


_SIZES = ("hidden_size", "vocab_size", "intermediate_size", "moe_intermediate_size", "head_dim")
"""Numbers that only some rules read; below 0 nothing can be."""


def _correct(message: str, overrides: Mapping[str, Any] | None) -> str:
    """Where to put right what a message is about."""
    if any(key.rpartition(".")[2] in message for key in overrides or ()):
        return "--set gave that value: give another, or leave it out"
    return "correct it in its config.json"


def _check_sizes(text: Fields) -> None:
    """Refuses numbers that would make the rest of the answer unknown, without a word about them.

    Raises:
        ConfigError: there is one.

    """
    for name in _SIZES:
        value = text.raw.get(name, text.raw.get(text.stored_name(name)))
        if isinstance(value, str):
            raise ConfigError(f"{text.path}{name} is {value[:40]!r}, not a whole number")
        if isinstance(value, int) and value < 0:
            raise ConfigError(f"{text.path}{name} is {value:,}, out of range")


def build_spec(found: Found, overrides: Mapping[str, Any] | None = None, *, checked: bool = True) -> ModelSpec:
    """Everything that can be said about a model before a workload is known.

    `checked`: a what-if that no rule reads is an error.
    """
    config, paths = apply_overrides(found.config, overrides) if overrides else (found.config, {})
    root = Fields(config)
    try:
        layers = read_layers(root)
        _check_sizes(text_fields(root))
    except ConfigError as err:
        raise ConfigError(f"{found.id}: {err.message}", hint=err.hint or _correct(err.message, overrides)) from err
    except (TypeError, AttributeError, ZeroDivisionError, OverflowError, IndexError) as err:
        # A value of a shape that no reader expects: the file is at fault, and the reader names nothing better.
        raise ConfigError(
            f"the configuration of {found.id} holds a value that cannot be read: {err}",
            hint=_correct(str(err), overrides),
        ) from err
    text = text_fields(root)
    notes = list(found.notes)
    if find_reader(text.type) is None:
        notes.append(
            f"model type {text.type[:60] or '(none)'!r} is not known: read as standard attention, all keys checked"
        )
    filled = _filled_in(root, text)
    if filled:
        notes.append(f"not in the file, from the defaults of {text.type}: {', '.join(filled)}")
    cross = any(isinstance(state, CrossAttention) for layer in layers for state in layer.states)
    spec = ModelSpec(
        id=found.id,
        model_type=root.type or text.type,
        layers=layers,
        dtype=_dtype(found.id, root, text),
        takes_media=_takes_media(root, text),
        kv_format=_kv_format(root, text),
        attention_heads=_count(text, "num_attention_heads"),
        hidden_size=_count(text, "hidden_size") or _positive(text.default("hidden_size")),
        vocab_size=_count(text, "vocab_size") or _positive(text.default("vocab_size")),
        from_class=tuple(name for name in ("hidden_size", "vocab_size") if _count(text, name) is None),
        prediction_modules=_first_count((text, root), _MODULES),
        scan_chunk=_first_count((text,), _CHUNKS),
        max_context=_max_context(root, text),
        provenance=found.provenance,
        # Weights of a what-if are not those of the published model.
        weights=None if paths else found.weights,
        overrides=paths,
        config=config,
        whole=found.whole,
        notes=tuple(notes),
        naive=_naive(text),
        default_encoder=_default_encoder(text) if cross else None,
        cross_input=_cross_input(root, text) if cross else "",
    )
    if checked:
        _check_effect(root, text, paths)
    return spec


def shape_spec(layers: int, kv_heads: int, head_dim: int) -> ModelSpec:
    """A bare shape: so many equal layers of full attention."""
    for name, value in (("--layers", layers), ("--kv-heads", kv_heads), ("--head-dim", head_dim)):
        if not 1 <= value <= 2**31:
            raise UsageError(f"{name}: {value} is out of range")
    if layers > 100_000:
        raise UsageError(f"--layers: {layers:,} is out of range", hint="at most 100,000")
    layer = Layer((FullAttention(kv_heads, head_dim, head_dim),))
    return ModelSpec(
        id=f"{layers} layers × {kv_heads} KV heads × {head_dim}",
        model_type="shape",
        layers=(layer,) * layers,
        dtype=None,
        max_context=None,
        provenance=Provenance("shape", "command line"),
        naive=Naive(layers, kv_heads, head_dim),
    )


def _check_effect(root: Fields, text: Fields, paths: Mapping[str, Any]) -> None:
    """A what-if that no rule reads would look like an answer; refuse it."""
    for path in paths:
        prefix, _, name = path.rpartition(".")
        prefix = prefix + "." if prefix else ""
        spellings = {path, prefix + text.stored_name(name), prefix + root.stored_name(name)}
        if name in _FOR_ENGINES or spellings & root.read.keys() or any(key.startswith(path + ".") for key in root.read):
            continue
        import difflib

        known = sorted(key for key, origin in root.read.items() if origin != "absent")
        near = difflib.get_close_matches(path, known, 3) or known[:6]
        raise UsageError(
            f"--set {path}: has no effect on the cache of this model", hint="what counts here: " + ", ".join(near)
        )


# Defaults that say nothing about the size of anything.
_UNREMARKABLE = {"is_encoder_decoder", "is_decoder", "architectures", "use_mems_eval", *_LENGTHS, *_ENCODER_LENGTHS}


def _filled_in(root: Fields, text: Fields) -> list[str]:
    """Facts that the answer rests on and the file leaves to the class: "num_key_value_heads 8"."""
    out = []
    for key, origin in root.read.items():
        prefix, _, name = key.rpartition(".")
        if origin != "default" or name in _UNREMARKABLE or (prefix + "." if prefix else "") != text.path:
            continue
        value = text.get(name)
        if isinstance(value, (int, str)) and value:
            out.append(f"{name} {str(value).lower() if isinstance(value, bool) else value}")
    return out


def _dtype(model: str, *parts: Fields) -> DType | str | None:
    """The model's dtype; a text is one that is not known."""
    seen: str | None = None
    for f in reversed(parts):
        for name in ("dtype", "torch_dtype"):
            value = f.get(name)
            if value is None or value == "auto":
                continue
            dtype = model_dtype(value) if isinstance(value, str) else None
            if dtype is not None:
                return dtype
            seen = seen or f"{model}: {f.path}{name} is {str(value)[:40]!r}"
    return seen


_MODULES = ("num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "num_mtp_modules")
_CHUNKS = ("mamba_chunk_size", "chunk_size")
_FOR_ENGINES = (
    "num_attention_heads",
    "hidden_size",
    "vocab_size",
    "mtp_layer_types",
    "index_kpool",
    *_MODULES,
    *_CHUNKS,
)
"""What only some engine's plan rests on."""


def _count(text: Fields, name: str) -> int | None:
    """A count that the file names, where it is one number for all layers."""
    return _positive(text.raw.get(name, text.raw.get(text.stored_name(name))))


def _positive(value: Any) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31 else None


def _first_count(parts: Sequence[Fields], names: Sequence[str]) -> int | None:
    return next((count for f in parts for name in names if (count := _count(f, name)) is not None), None)


def _kv_format(root: Fields, text: Fields) -> str | None:
    """The cache format that a checkpoint's quantization_config names: modelopt's and compressed-tensors' spellings."""
    for f in (root, text):
        facts = f.raw.get("quantization_config")
        if not isinstance(facts, Mapping):
            continue
        inner = facts.get("quantization")
        facts = {**inner, **facts} if isinstance(inner, Mapping) else facts
        scheme = facts.get("kv_cache_scheme") or facts.get("kv_cache_quant_algo")
        if isinstance(scheme, str):
            return {"FP8": "fp8", "NVFP4": "nvfp4"}.get(scheme.upper())
        if isinstance(scheme, Mapping) and scheme.get("type", "float") == "float" and not scheme.get("dynamic"):
            bits = scheme.get("num_bits")
            return {8: "fp8", 4: "nvfp4"}.get(bits) if isinstance(bits, int) else None
    return None


def _takes_media(root: Fields, text: Fields) -> bool:
    """Whether the configuration speaks of images, video or audio at all."""
    return root.type != text.type or any(
        word in key for key in root.raw for word in ("vision", "image", "audio", "video")
    )


def _max_context(root: Fields, text: Fields) -> int | None:
    for f in (text, root):
        for name in _LENGTHS:
            value = f.get(name)
            # Tokenizer-style "no limit" values are no lengths.
            if isinstance(value, int) and not isinstance(value, bool) and 0 < value < 2**31:
                return value
    return None


def _default_encoder(text: Fields) -> int | None:
    for name in _ENCODER_LENGTHS:
        value = text.optional_number(name)
        if value is not None:
            if text.type == "speech_to_text":
                # Convolutions of stride 2 stand before the encoder.
                return value >> text.number_or("num_conv_layers", 2, minimum=0)
            return value
    return None


def _cross_input(root: Fields, text: Fields) -> str:
    if root.type in _AUDIO or text.type in _AUDIO:
        return "audio"
    if root.type in _IMAGE or text.type in _IMAGE:
        return "image"
    if root.type == text.type and not root.flag("is_encoder_decoder") and root.flag("add_cross_attention"):
        return "external"
    return "encoder"


def _naive(text: Fields) -> Naive | None:
    """What a calculator takes from the usual field names, if they are all there."""
    get = text.raw.get
    layers, heads = get("num_hidden_layers"), get("num_attention_heads")
    kv, dim, hidden = get("num_key_value_heads"), get("head_dim"), get("hidden_size")
    if kv is None:
        kv = heads
    whole = [
        value for value in (layers, heads, kv) if isinstance(value, int) and not isinstance(value, bool) and value > 0
    ]
    if len(whole) != 3 or not isinstance(layers, int) or not isinstance(kv, int):
        return None
    if not isinstance(dim, int) or dim <= 0:
        if not isinstance(hidden, int) or not isinstance(heads, int):
            return None
        dim = hidden // heads
    return Naive(layers, kv, dim)

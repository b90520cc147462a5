"""A checkpoint's `quantization_config`: which format its weights have, and which layers stay as they are.

What it means is taken from the writers' and vLLM 0.32's readers of it; what is not known is refused by name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from kvctl.errors import ConfigError
from kvctl.record import Record
from kvctl.weight_formats import (
    Packer,
    WeightFormat,
    awq,
    by_channel,
    four_bits,
    fp8_blocks,
    gptq,
    packed_integers,
    weight_format,
)

MOST_PATTERNS = 10_000
_LONGEST_EXPRESSION, _MOST_REPETITIONS = 500, 4


class Scheme(Record):
    """How a checkpoint is quantised."""

    method: str
    bits: int
    group: int | tuple[int, int] | None
    """Weights that share a scale, in a row or in a block; None: a layer's or an output's."""
    format: WeightFormat
    excluded: tuple[str, ...]
    """Modules that stay as they are: parts of names, patterns with * or "re:…"."""

    @property
    def shared(self) -> str:
        """What has a scale of its own: "groups of 128", "blocks of 128 × 128"."""
        if isinstance(self.group, tuple):
            return "blocks of " + " × ".join(map(str, self.group))
        return f"groups of {self.group}" if self.group else ""

    @property
    def words(self) -> str:
        """ "awq, 4 bits in groups of 128"."""
        return f"{self.method}, {self.bits} bits" + (f" in {self.shared}" if self.shared else "")

    def keeps(self) -> Callable[[str, int], bool]:
        """Tells whether a module (N for numbers) of a layer stays as it is."""
        return _Excluded(self.excluded)


class _Excluded:
    """Patterns of a configuration, tried on names of modules."""

    def __init__(self, patterns: Sequence[str]) -> None:
        self.words = [tuple(p.split(".")) for p in patterns if "*" not in p and not p.startswith("re:")]
        self.globs = [p for p in patterns if "*" in p and not p.startswith("re:")]
        self.expressions = [p[3:] for p in patterns if p.startswith("re:")]
        self.known: dict[tuple[str, int], bool] = {}
        # Words without numbers mean the same in every layer.
        self.by_layer = bool(self.globs or self.expressions) or any(
            part.isdigit() for word in self.words for part in word
        )

    def __call__(self, module: str, layer: int) -> bool:
        key = (module, layer if self.by_layer else 0)
        if key not in self.known:
            self.known[key] = self.matches(re.sub(r"\.N(?=\.|$)", f".{layer}", module, count=1))
        return self.known[key]

    def matches(self, name: str) -> bool:
        parts = tuple(name.split("."))
        # Some checkpoints name the language model inside of a wrapper, some do not.
        names = {name, "model." + name, "language_model." + name, name.replace("model.", "model.language_model.", 1)}
        return (
            any(
                word == parts[at : at + len(word)]
                for word in self.words for at in range(len(parts) - len(word) + 1)
            )
            or any(fnmatchcase(n, glob) or fnmatchcase(n, glob.rstrip("*") + ".*") for glob in self.globs for n in names)
            or any(_search(expression, name) for expression in self.expressions)
        )  # fmt: skip


def _search(expression: str, name: str) -> bool:
    # A file must not be able to keep the expression engine busy: few repetitions, and none of groups.
    if len(expression) > _LONGEST_EXPRESSION or len(re.findall(r"[*+{]", expression)) > _MOST_REPETITIONS:
        raise ConfigError(f"quantization_config has a pattern that is too long: {expression[:60]!r}")
    if re.search(r"\)[*+?{]", expression):
        raise ConfigError(f"quantization_config has a pattern that repeats a group: {expression[:60]!r}")
    try:
        return re.match(expression, name) is not None
    except (re.error, RecursionError, OverflowError):
        raise ConfigError(f"quantization_config has a pattern that cannot be read: {expression[:60]!r}") from None


def facts_of(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a configuration says of quantisation, at the top or in its language model's part."""
    facts, text = config.get("quantization_config"), config.get("text_config")
    if facts is None and isinstance(text, Mapping):
        facts = text.get("quantization_config")
    if facts is not None and not isinstance(facts, Mapping):
        raise ConfigError("quantization_config is not an object")
    inner = None if facts is None else facts.get("quantization")
    return {**inner, **facts} if isinstance(inner, Mapping) and facts is not None else facts


def of_cache_alone(facts: Mapping[str, Any]) -> bool:
    """Whether a quantization_config is about the cache, and the weights are as they would be without."""
    return (
        facts.get("quant_method") == "compressed-tensors"
        and bool(facts.get("kv_cache_scheme"))
        and facts.get("config_groups") == {}
    )


def scheme(config: Mapping[str, Any]) -> Scheme | None:
    """The scheme that a configuration names; None where its weights are not quantised.

    Raises:
        ConfigError: it names one that is not known.

    """
    facts = facts_of(config)
    if facts is None:
        return None
    method = facts.get("quant_method")
    if method is None and "quant_algo" in facts:
        method = "modelopt"
    if of_cache_alone(facts):
        return None
    read = _READERS.get(method) if isinstance(method, str) else None
    if read is None:
        raise ConfigError(f"quantization_config names {str(method)[:40]!r}, which kvctl does not know",
                          hint="known: " + ", ".join(_READERS))  # fmt: skip
    return read(facts)


def _excluded(facts: Mapping[str, Any], *names: str) -> tuple[str, ...]:
    out: list[str] = []
    for name in names:
        value = facts.get(name)
        if value is None:
            continue
        if not isinstance(value, list) or len(value) > MOST_PATTERNS or not all(isinstance(v, str) for v in value):
            raise ConfigError(f"quantization_config: {name} is not a list of names")
        out += value
    return tuple(out)


def _number(facts: Mapping[str, Any], name: str, default: int | None = None) -> int:
    value = facts.get(name, default)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ConfigError(f"quantization_config: {name} is {str(value)[:40]!r}, not a whole number")
    return value


def _unknown(what: str) -> ConfigError:
    return ConfigError(f"quantization_config: {what[:100]}, which kvctl does not know")


def _format(name: str, pack: Packer, plain: str = "", experts: bool = True) -> WeightFormat:
    return WeightFormat(name, name, pack, plain, experts)


def _fp8(facts: Mapping[str, Any]) -> Scheme:
    block = facts.get("weight_block_size")
    out = _excluded(facts, "modules_to_not_convert", "ignored_layers")
    if block is not None:
        if not (isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)):
            raise _unknown(f"weight_block_size is {block!r}")
        return Scheme("fp8", 8, (block[0], block[1]), _format("fp8-block", fp8_blocks(*block)), out)
    if facts.get("activation_scheme") == "static":
        from kvctl.weight_formats import _fp8_static

        return Scheme("fp8", 8, None, _format("fp8", _fp8_static), out)
    return Scheme("fp8", 8, None, weight_format("fp8"), out)


def _awq(facts: Mapping[str, Any]) -> Scheme:
    bits, group = _number(facts, "bits", 4), _number(facts, "group_size", 128)
    if bits not in (4, 8) or group == 0 or facts.get("version", "gemm") not in ("gemm", "GEMM"):
        raise _unknown(f"awq of {bits} bits, version {facts.get('version')}")
    pack = awq(bits, group, zeros=facts.get("zero_point", True) is not False)
    return Scheme("awq", bits, max(group, 0) or None, _format("awq", pack, "F16"),
                  _excluded(facts, "modules_to_not_convert"))  # fmt: skip


def _gptq(facts: Mapping[str, Any]) -> Scheme:
    bits, group = _number(facts, "bits"), _number(facts, "group_size", 128)
    if bits not in (2, 4, 8) or group == 0 or facts.get("dynamic"):
        raise _unknown(
            f"gptq of {bits} bits, group_size {group}" + (", with rules by module" if facts.get("dynamic") else "")
        )
    return Scheme("gptq", bits, max(group, 0) or None, _format("gptq", gptq(bits, group), "F16"),
                  _excluded(facts, "modules_to_not_convert"))  # fmt: skip


def _bitsandbytes(facts: Mapping[str, Any]) -> Scheme:
    out = _excluded(facts, "llm_int8_skip_modules", "modules_to_not_convert")
    if facts.get("load_in_8bit"):
        return Scheme("bitsandbytes", 8, None, weight_format("int8"), out)
    if not facts.get("load_in_4bit"):
        raise _unknown("bitsandbytes of neither 4 nor 8 bits")
    double = bool(facts.get("bnb_4bit_use_double_quant"))
    pack = four_bits(double=double)
    return Scheme("bitsandbytes", 4, 64, weight_format("nf4").replace(pack=pack), out)


def _compressed(facts: Mapping[str, Any]) -> Scheme:
    groups = facts.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _unknown("compressed-tensors with several groups of layers")
    (group,) = groups.values()
    weights = group.get("weights") if isinstance(group, Mapping) else None
    if not isinstance(weights, Mapping) or group.get("targets") != ["Linear"]:
        raise _unknown("compressed-tensors for other layers than Linear")
    bits, kind, strategy = weights.get("num_bits"), weights.get("type"), weights.get("strategy")
    size, form = weights.get("group_size"), group.get("format") or facts.get("format")
    inputs = group.get("input_activations")
    static = isinstance(inputs, Mapping) and not inputs.get("dynamic")
    out = _excluded(facts, "ignore")
    if weights.get("symmetric") is False or (static and form != "nvfp4-pack-quantized"):
        raise _unknown(f"compressed-tensors {form} that is asymmetric, or with static scales of the inputs")
    if form in ("float-quantized", "int-quantized") and bits == 8 and strategy == "channel":
        pack = by_channel("F8_E4M3" if kind == "float" else "I8", "BF16")
        return Scheme("compressed-tensors", 8, None, _format(str(form), pack), out)
    if form == "pack-quantized" and kind == "int" and bits in (4, 8) and isinstance(size, int) and size > 0:
        return Scheme("compressed-tensors", bits, size, _format(form, packed_integers(bits, size)), out)
    raise _unknown(f"compressed-tensors {form} of {bits} bits, {kind} by {strategy}")


def _modelopt(facts: Mapping[str, Any]) -> Scheme:
    out = _excluded(facts, "ignore", "exclude_modules")
    algorithm = facts.get("quant_algo")
    if not {"ignore", "exclude_modules"} & facts.keys():
        raise ConfigError("quantization_config does not say which layers modelopt left as they are")
    if algorithm == "NVFP4":
        return Scheme("modelopt", 4, 16, weight_format("nvfp4"), out)
    if algorithm == "FP8":
        from kvctl.weight_formats import _fp8_static

        return Scheme("modelopt", 8, None, _format("fp8", _fp8_static), out)
    raise _unknown(f"modelopt's {algorithm}")


def _mxfp4(facts: Mapping[str, Any]) -> Scheme:
    return Scheme("mxfp4", 4, 32, weight_format("mxfp4"), _excluded(facts, "modules_to_not_convert"))


_READERS: dict[str, Callable[[Mapping[str, Any]], Scheme]] = {
    "fp8": _fp8,
    "awq": _awq,
    "gptq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed,
    "modelopt": _modelopt,
    "modelopt_fp4": _modelopt,
    "mxfp4": _mxfp4,
}


_PUBLISHED_AS = {"deepseek_v3": "fp8-block", "deepseek_v32": "fp8-block", "gpt_oss": "mxfp4"}
"""What the makers of a model type publish its checkpoints in, where that is no plain dtype."""
_MANY_WAYS = frozenset((
    "bitnet", "deepseek_ref", "deepseek_v4", "glm5_next_text", "grok-1", "kimi_k2", "kimi_k25", "longcat_flash", "mimo_v2",
    "minimax_m2", "minimax_m3_vl_text", "step3p7",
))  # fmt: skip
"""Types that are published in 8 or 4 bits, in more than one way or one that is not written here."""
_NAMED = re.compile(r"fp[48]|int[48]|awq|gptq|bnb|[48]-?bit|w\d+a\d+|gguf|exl\d|quant", re.IGNORECASE)


def usual_storage(model_type: str, name: str, dtype: str) -> str | None:
    """The format of weights that a model of this type and name is published in, where no source says it; None: no guess."""
    if model_type in _MANY_WAYS or _NAMED.search(name):
        return None
    return dtype if re.search(r"bf16|fp16", name, re.IGNORECASE) else _PUBLISHED_AS.get(model_type, dtype)


# What stands behind a model's name in that of a quantized checkpoint, and what it means.
SUFFIXES = (
    (re.compile(r"[-_.]FP8[-_.]block$", re.IGNORECASE), "fp8-block"),
    (re.compile(r"[-_.]FP8[-_.]dynamic$", re.IGNORECASE), "fp8-channel"),
    (re.compile(r"[-_.]FP8([-_.]Static[-_.]PerTensor)?$", re.IGNORECASE), "fp8"),
    (re.compile(r"[-_.]NV?FP4$", re.IGNORECASE), "nvfp4"),
    (re.compile(r"[-_.]AWQ$", re.IGNORECASE), "awq"),
    (re.compile(r"[-_.]GPTQ([-_.]Int4)?$", re.IGNORECASE), "gptq"),
    (re.compile(r"[-_.]quantized\.w4a16$", re.IGNORECASE), "w4a16"),
    (re.compile(r"[-_.]quantized\.w8a8$", re.IGNORECASE), "w8a8"),
)


def named_format(name: str) -> str | None:
    """The format that the name of a quantized checkpoint ends with."""
    return next((weights for pattern, weights in SUFFIXES if pattern.search(name)), None)


def named_scheme(name: str) -> Scheme | None:
    """How a checkpoint of this name is quantised, where it keeps a file of its own beside config.json for that."""
    weights = named_format(name)
    if weights is None:
        return None
    bits = 8 if "8" in weights.replace("w4a16", "") else 4
    return Scheme(weights, bits, None, weight_format(weights), ())

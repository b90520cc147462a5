"""The keys of a GGUF file in the words of config.json, by architecture.

Sources: llama.cpp b11434 src/llama-arch.cpp (keys), src/llama-model.cpp (defaults and which layers
have windows) and convert_hf_to_gguf.py (which model type becomes which architecture).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvctl.errors import ConfigError
from kvctl.sources import jsonfile

Config = dict[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_MOST_LAYERS = 10_000
# Architectures whose last layers predict further tokens and have no place in the main cache.
_PREDICTS_AHEAD = ("deepseek2", "deepseek32", "glm4moe", "qwen3next", "qwen35", "qwen35moe")


class _Keys:
    """The keys of one architecture, without its name in front."""

    def __init__(self, metadata: Mapping[str, Any], architecture: str, where: str) -> None:
        self.metadata, self.architecture, self.where = metadata, architecture, where

    def get(self, key: str) -> Any:
        return self.metadata.get(f"{self.architecture}.{key}")

    def number(self, key: str, default: int | None = None, *, minimum: int = 1) -> int:
        """A whole number that must be there, unless it has a default."""
        value = self.get(key)
        if value is None and default is not None:
            return default
        return self._checked(key, value, minimum)

    def _checked(self, key: str, value: Any, minimum: int) -> int:
        name = f"{self.where}: {self.architecture}.{key}"
        if value is None:
            raise ConfigError(f"{name} is missing")
        if isinstance(value, bool) or not isinstance(value, int) or not minimum <= value <= 2**40:
            raise ConfigError(f"{name} is {str(value)[:40]}, not a whole number of at least {minimum}")
        return value

    def per_layer(self, key: str, layers: int, default: int, *, minimum: int) -> list[int]:
        """A number for each layer: the file has one for all, or a list."""
        value = self.get(key)
        if value is None:
            return [default] * layers
        if not isinstance(value, list):
            return [self._checked(key, value, minimum)] * layers
        if len(value) < layers:
            raise ConfigError(f"{self.where}: {self.architecture}.{key} has {len(value)} entries for {layers} layers")
        return [self._checked(key, entry, minimum) for entry in value[:layers]]

    def windowed(self, layers: int, every: int) -> list[bool]:
        """Which layers have a window: the file's list or step, else all but each `every`-th."""
        pattern = self.get("attention.sliding_window_pattern")
        if isinstance(pattern, list):
            if len(pattern) < layers:
                raise ConfigError(f"{self.where}: the window pattern has {len(pattern)} entries for {layers} layers")
            if not all(entry in (0, 1) for entry in pattern[:layers]):
                raise ConfigError(f"{self.where}: the window pattern is a list of other things than true and false")
            return [bool(entry) for entry in pattern[:layers]]
        step = self._checked("attention.sliding_window_pattern", pattern, 1) if pattern is not None else every
        return [index % step < step - 1 for index in range(layers)]


def _base(keys: _Keys) -> Config:
    """What every architecture says of its layers."""
    layers, ahead = keys.number("block_count"), keys.number("nextn_predict_layers", 0, minimum=0)
    if ahead and keys.architecture not in _PREDICTS_AHEAD:
        raise ConfigError(
            f"{keys.where}: {keys.architecture} with nextn_predict_layers, which kvctl does not know of it"
        )
    layers -= ahead
    if layers > _MOST_LAYERS:
        raise ConfigError(f"{keys.where}: {layers:,} layers; no model has over {_MOST_LAYERS:,}")
    if layers < 1:
        raise ConfigError(f"{keys.where}: no layers are left beside nextn_predict_layers {ahead}")
    return {
        "num_hidden_layers": layers,
        "hidden_size": keys.number("embedding_length"),
        "max_position_embeddings": keys.number("context_length"),
        "torch_dtype": "float16",
    }


def _head_width(keys: _Keys, default: int) -> int:
    """Elements of a head, of its keys as of its values."""
    width = keys.number("attention.key_length", default)
    if keys.number("attention.value_length", width) != width:
        raise ConfigError(
            f"{keys.where}: keys of {width} and values of {keys.get('attention.value_length')} elements; "
            f"kvctl does not know that of the architecture {keys.architecture}"
        )
    return width


def _attention(keys: _Keys) -> Config:
    """Heads and their width; keys and values of one width."""
    config = _base(keys)
    layers = config["num_hidden_layers"]
    heads = keys.per_layer("attention.head_count", layers, 0, minimum=1)
    if heads[0] == 0:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.head_count is missing")
    kv = keys.per_layer("attention.head_count_kv", layers, heads[0], minimum=0)
    width = _head_width(keys, config["hidden_size"] // max(heads))
    if len(set(heads)) > 1 and keys.get("attention.key_length") is None:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.key_length is missing, and head counts differ")
    if not all(kv):
        raise ConfigError(
            f"{keys.where}: {keys.architecture} with layers without attention, which kvctl does not know of it"
        )
    config |= {"num_attention_heads": heads[0], "num_key_value_heads": kv[0], "head_dim": width}
    if len(set(kv)) > 1 or len(set(heads)) > 1:
        config["per_layer_config"] = {
            str(i): {"num_attention_heads": h, "num_key_value_heads": n}
            for i, (h, n) in enumerate(zip(heads, kv, strict=True))
        }
    return config


def _plain(keys: _Keys) -> Config:
    """The same attention everywhere; some of these architectures name a window that all layers have."""
    config = _attention(keys)
    layers = config["num_hidden_layers"]
    if not keys.number("attention.sliding_window", 0, minimum=0):
        return config | {"layer_types": [FULL] * layers}
    model_type = _WINDOWED_THROUGHOUT.get(keys.architecture)
    if model_type is None:
        raise ConfigError(
            f"{keys.where}: {keys.architecture} with a window, and kvctl does not know which layers have it"
        )
    return config | {
        "model_type": model_type,
        "sliding_window": keys.number("attention.sliding_window"),
        "layer_types": [SLIDING] * layers,
    }


_WINDOWED_THROUGHOUT = {"llama": "mistral", "mistral3": "mistral", "phi3": "phi3", "starcoder2": "starcoder2"}


def _mixed(
    every: int, *, kind: str = SLIDING, optional: bool = False, default: int | None = None
) -> Callable[[_Keys], Config]:
    """Windows in all but each `every`-th layer."""

    def read(keys: _Keys) -> Config:
        if optional and not keys.get("attention.sliding_window"):
            return _plain(keys)
        config = _attention(keys)
        layers = config["num_hidden_layers"]
        if kind == CHUNKED:
            config["attention_chunk_size"] = keys.number("attention.chunk_size", 8192)
        else:
            config["sliding_window"] = keys.number("attention.sliding_window", default)
        config["layer_types"] = [kind if windowed else FULL for windowed in keys.windowed(layers, every)]
        return config

    return read


def _gemma3n(keys: _Keys) -> Config:
    return _mixed(5)(keys) | {"num_kv_shared_layers": keys.number("attention.shared_kv_layers", minimum=0)}


def _latent(keys: _Keys) -> Config:
    """Latent attention; files from before it was stored so hold expanded heads."""
    config = _base(keys)
    if keys.get("attention.key_length_mla") is None:
        raise ConfigError(
            f"{keys.where}: an old file of {keys.architecture}, whose cache holds expanded heads and no latents",
            hint="convert the model again with a current llama.cpp: its cache is many times smaller",
        )
    rope, width = keys.number("rope.dimension_count"), keys.number("attention.key_length_mla")
    if rope >= width:
        raise ConfigError(f"{keys.where}: rotary keys of {rope} in keys of {width} elements")
    heads = keys.number("attention.head_count")
    config |= {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": keys.number("attention.kv_lora_rank"),
        "q_lora_rank": keys.number("attention.q_lora_rank", 0, minimum=0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": width - rope,
        "v_head_dim": keys.number("attention.value_length_mla"),
    }
    return config


def _sparse_latent(keys: _Keys) -> Config:
    return _latent(keys) | {
        "index_head_dim": keys.number("attention.indexer.key_length"),
        "index_n_heads": keys.number("attention.indexer.head_count"),
        "index_topk": keys.number("attention.indexer.top_k"),
    }


def _gated_delta(keys: _Keys) -> Config:
    """Gated delta layers, and attention in each full_attention_interval-th."""
    config = _attention(keys)
    interval = keys.number("full_attention_interval", 4)
    layers = config["num_hidden_layers"]
    values, inner = keys.number("ssm.time_step_rank"), keys.number("ssm.inner_size")
    if inner % values:
        raise ConfigError(f"{keys.where}: ssm.inner_size {inner} does not split over {values} heads")
    return config | {
        "layer_types": [FULL if (i + 1) % interval == 0 else "linear_attention" for i in range(layers)],
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
    }


def _mamba(keys: _Keys) -> Config:
    return _base(keys) | {
        "intermediate_size": keys.number("ssm.inner_size"),
        "state_size": keys.number("ssm.state_size"),
        "conv_kernel": keys.number("ssm.conv_kernel"),
    }


def _mamba2(keys: _Keys) -> Config:
    config = _mamba(keys)
    inner, heads = config.pop("intermediate_size"), keys.number("ssm.time_step_rank")
    if inner % config["hidden_size"] or inner % heads or heads % keys.number("ssm.group_count"):
        raise ConfigError(f"{keys.where}: ssm.inner_size {inner} does not split over its {heads} heads and groups")
    return config | {
        "expand": inner // config["hidden_size"],
        "num_heads": heads,
        "head_dim": inner // heads,
        "n_groups": keys.number("ssm.group_count"),
    }


def _lfm2(keys: _Keys) -> Config:
    """Short convolutions where a layer has no KV heads."""
    config = _base(keys)
    layers = config["num_hidden_layers"]
    kv = keys.per_layer("attention.head_count_kv", layers, 0, minimum=0)
    if len(set(kv)) != 2 or 0 not in kv:
        raise ConfigError(f"{keys.where}: attention.head_count_kv must name one count, and 0 for convolutions")
    if keys.number("attention.sliding_window", 0, minimum=0):
        raise ConfigError(f"{keys.where}: {keys.architecture} with a window, which kvctl does not know of it")
    heads = keys.number("attention.head_count")
    width = _head_width(keys, config["hidden_size"] // heads)
    return config | {
        "num_attention_heads": heads,
        "head_dim": width,
        "num_key_value_heads": max(kv),
        "conv_L_cache": keys.number("shortconv.l_cache"),
        "layer_types": [FULL if count else "conv" for count in kv],
    }


# Architecture → the model type of config.json, and how its keys are read.
ARCHITECTURES: dict[str, tuple[str, Callable[[_Keys], Config]]] = {
    **{
        name: (model_type, _plain)
        for name, model_type in (
            ("llama", "llama"), ("mistral3", "llama"), ("qwen2", "qwen2"), ("qwen2moe", "qwen2_moe"), ("qwen3", "qwen3"),
            ("qwen3moe", "qwen3_moe"), ("qwen2vl", "qwen2"), ("qwen3vl", "qwen3"), ("qwen3vlmoe", "qwen3_moe"),
            ("gemma", "gemma"), ("phi3", "phi3"), ("stablelm", "stablelm"), ("internlm2", "llama"), ("granite", "granite"),
            ("granitemoe", "granitemoe"), ("glm4", "glm4"), ("glm4moe", "glm4_moe"), ("olmo", "olmo"), ("olmoe", "olmoe"),
            ("nemotron", "nemotron"), ("exaone", "llama"), ("command-r", "cohere"), ("starcoder2", "starcoder2"),
            ("smollm3", "smollm3"), ("ernie4_5", "ernie4_5"), ("hunyuan-dense", "hunyuan_v1_dense"), ("arcee", "arcee"),
            ("seed_oss", "seed_oss"), ("dots1", "dots1"), ("apertus", "apertus"), ("minimax-m2", "minimax_m2"),
            ("bailingmoe", "bailing_moe"), ("grok", "grok-1"), ("openelm", "llama"), ("minicpm", "minicpm"),
            ("baichuan", "llama"), ("orion", "orion"), ("xverse", "llama"),
        )
    },
    "gemma2": ("gemma2", _mixed(2, default=4096)),
    "gemma3": ("gemma3_text", _mixed(6, optional=True)),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "gpt-oss": ("gpt_oss", _mixed(2)),
    "cohere2": ("cohere2", _mixed(4)),
    "olmo2": ("olmo3", _mixed(4, optional=True)),
    "exaone4": ("exaone4", _mixed(4, optional=True)),
    "llama4": ("llama4_text", _mixed(4, kind=CHUNKED)),
    "deepseek2": ("deepseek_v3", _latent),
    "deepseek32": ("deepseek_v32", _sparse_latent),
    "qwen3next": ("qwen3_next", _gated_delta),
    "qwen35": ("qwen3_5_text", _gated_delta),
    "qwen35moe": ("qwen3_5_moe_text", _gated_delta),
    "mamba": ("mamba", _mamba),
    "mamba2": ("mamba2", _mamba2),
    "lfm2": ("lfm2", _lfm2),
    "lfm2moe": ("lfm2_moe", _lfm2),
}  # fmt: skip


def to_config(metadata: Mapping[str, Any], where: str) -> Config:
    """The configuration that the file's keys describe.

    Raises:
        ConfigError: no architecture, one that is not known, or keys that are missing or contradict.

    """
    architecture = metadata.get("general.architecture")
    if not isinstance(architecture, str) or not architecture:
        raise ConfigError(f"{where} names no architecture", hint="it may be a part without metadata, or no model")
    if metadata.get("general.type", "model") not in ("model", None):
        raise ConfigError(f"{where} is no model but {jsonfile.plain(str(metadata['general.type']))[:40]!r}")
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError(
            f"{where}: kvctl does not know the GGUF architecture {jsonfile.plain(architecture)[:60]!r} yet",
            hint="size the original model by its name or config.json",
        )
    model_type, read = known
    return {"model_type": model_type, **read(_Keys(metadata, architecture, where))}

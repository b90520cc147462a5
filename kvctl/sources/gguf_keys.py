"""The keys of a GGUF file: checked numbers, and what every architecture says of its layers.

Source: llama.cpp b11434 src/llama-model.cpp (load_hparams: which keys there are, and what stands in for one).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from kvctl.errors import ConfigError

Config = dict[str, Any]
FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
_MOST_LAYERS = 10_000


class Keys:
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

    def flags(self, key: str, layers: int) -> list[bool] | None:
        """A list of true and false, one for each layer; None where the file has no list."""
        value = self.get(key)
        if not isinstance(value, list):
            return None
        if len(value) < layers:
            raise ConfigError(f"{self.where}: {self.architecture}.{key} has {len(value)} entries for {layers} layers")
        if not all(entry in (0, 1) for entry in value[:layers]):
            raise ConfigError(f"{self.where}: {self.architecture}.{key} is a list of other things than true and false")
        return [bool(entry) for entry in value[:layers]]

    def windowed(self, layers: int, every: int, *, full_first: bool = False) -> list[bool]:
        """Which layers have a window: the file's list or step, else all but each `every`-th.

        A step of 0 gives every layer one; `full_first` puts the full layers first and not last.
        """
        pattern = self.flags("attention.sliding_window_pattern", layers)
        if pattern is not None:
            return pattern
        step = self.number("attention.sliding_window_pattern", every, minimum=0)
        if not step:
            return [True] * layers
        return [index % step != (0 if full_first else step - 1) for index in range(layers)]


def base(keys: Keys) -> Config:
    """What every architecture says of its layers."""
    # The last layers may predict further tokens: they have no place in the main cache.
    ahead = keys.number("nextn_predict_layers", 0, minimum=0)
    layers = keys.number("block_count") - ahead
    if layers > _MOST_LAYERS:
        raise ConfigError(f"{keys.where}: {layers:,} layers; no model has over {_MOST_LAYERS:,}")
    if layers < 1:
        raise ConfigError(f"{keys.where}: no layers are left beside nextn_predict_layers {ahead}")
    return {
        "num_hidden_layers": layers,
        **({"num_nextn_predict_layers": ahead} if ahead else {}),
        "hidden_size": keys.number("embedding_length"),
        "max_position_embeddings": keys.number("context_length"),
        "torch_dtype": "float16",
    }


def head_width(keys: Keys, default: int) -> int:
    """Elements of a head, of its keys as of its values."""
    width = keys.number("attention.key_length", default)
    if keys.number("attention.value_length", width) != width:
        raise ConfigError(
            f"{keys.where}: keys of {width} and values of {keys.get('attention.value_length')} elements; "
            f"kvctl does not know that of the architecture {keys.architecture}"
        )
    return width


def attention(keys: Keys) -> Config:
    """Heads and their width; keys and values of one width."""
    config = base(keys)
    layers = config["num_hidden_layers"]
    heads = keys.per_layer("attention.head_count", layers, 0, minimum=1)
    if heads[0] == 0:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.head_count is missing")
    kv = keys.per_layer("attention.head_count_kv", layers, heads[0], minimum=0)
    width = head_width(keys, config["hidden_size"] // max(heads))
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

"""Which kind each layer is, where a config leaves it to the rule of its class.

Names of kinds are those of transformers' `layer_types`. Rules are the `__post_init__`
of the configuration classes of transformers 5.24, or of a model's own code where named.
"""

from __future__ import annotations

from collections.abc import Callable

from kvctl.errors import ConfigError
from kvctl.families.fields import Fields

FULL, SLIDING, CHUNKED = "full_attention", "sliding_attention", "chunked_attention"
LINEAR, CONV, HYBRID, HYBRID_SLIDING = "linear_attention", "conv", "hybrid", "hybrid_sliding"
INDEXED, SPARSE = "indexed_attention", "minimax_m3_sparse"
COMPRESSED_SPARSE, HEAVILY_COMPRESSED = "compressed_sparse_attention", "heavily_compressed_attention"
REFERENCE_SLIDING = "reference_sliding_attention"
MOE, MLP = "moe", "mlp"

Pattern = Callable[[Fields, int], list[str]]

LEGACY_KINDS = {
    "mamba": LINEAR,
    "mamba2": LINEAR,
    "attention": FULL,
    "recurrent": LINEAR,
    "deepseek_sparse_attention": INDEXED,
    "qwen_sparse_attention": INDEXED,
    "local_attention": SLIDING,
    "global_attention": FULL,
    "global": FULL,
    "local": SLIDING,
}  # fmt: skip


def layer_kinds(f: Fields, pattern: Pattern | None = None, *, count: int | None = None) -> list[str]:
    """The kind of every layer: from `layer_types`, else `pattern`, else from the window fields."""
    n = f.layers() if count is None else count
    kinds = f.strings("layer_types")
    if kinds is not None:
        if len(kinds) != n:
            raise ConfigError(f"{f.path}layer_types has {len(kinds)} entries for {n} layers")
        return [LEGACY_KINDS.get(kind, kind) for kind in kinds]
    if pattern is not None:
        return pattern(f, n)
    return uniform(f, n)


def uniform(f: Fields, n: int) -> list[str]:
    """What transformers' cache assumes without a pattern: all layers alike, as the window fields say."""
    if f.get("sliding_window") is not None:
        return [SLIDING] * n
    if f.get("attention_chunk_size") is not None:
        return [CHUNKED] * n
    return [FULL] * n


def every(
    period: int, *, field: str | None = None, last: str = FULL, other: str = SLIDING, force_last: bool = False
) -> Pattern:
    """`last` at every `period`-th layer (or as `field` says), `other` between; 0 switches the rest off."""

    def pattern(f: Fields, n: int) -> list[str]:
        step = period
        if field is not None:
            value = f.get(field, period)
            if isinstance(value, str) and value and set(value) <= {"L", "G"}:
                # EXAONE spells the pattern out: L(ocal) and G(lobal).
                return [other if value[i % len(value)] == "L" else last for i in range(n)]
            step = 0 if value is None else f.as_number(field, value, 0)
        if step == 0:
            return [last] * n
        kinds = [other if (i + 1) % step else last for i in range(n)]
        if force_last and kinds:
            kinds[-1] = last
        return kinds

    return pattern


def first_of(period: int, *, field: str | None = None, first: str = FULL, other: str = SLIDING) -> Pattern:
    """`first` at layers 0, period, 2·period, …"""

    def pattern(f: Fields, n: int) -> list[str]:
        step = f.number_or(field, period, minimum=0) if field else period
        return [first] * n if step == 0 else [other if i % step else first for i in range(n)]

    return pattern


def from_the_end(period: int) -> Pattern:
    """Full attention in the last layer and every `period` before it."""
    return lambda f, n: [FULL if (n - 1 - i) % period == 0 else SLIDING for i in range(n)]


def all_of(kind: str) -> Pattern:
    """Every layer of one kind."""
    return lambda f, n: [kind] * n


def cycle(*kinds: str) -> Pattern:
    """A fixed sequence of kinds, repeated."""
    return lambda f, n: [kinds[i % len(kinds)] for i in range(n)]


def indices(field: str, *, listed: str, other: str, default: Pattern | None = None) -> Pattern:
    """`listed` for the layers that a list of indices names."""

    def pattern(f: Fields, n: int) -> list[str]:
        listed_layers = f.entries(field)
        if listed_layers is None:
            return default(f, n) if default else [other] * n
        chosen = set(listed_layers)
        return [listed if i in chosen else other for i in range(n)]

    return pattern


def flags(field: str, *, on: str, off: str) -> Pattern:
    """One 0 or 1 a layer."""

    def pattern(f: Fields, n: int) -> list[str]:
        values = f.entries(field)
        if values is None:
            raise ConfigError(f"{f.path}{field} is missing, and it decides the kind of every layer")
        if len(values) < n:
            raise ConfigError(f"{f.path}{field} has {len(values)} entries for {n} layers")
        return [on if value else off for value in values[:n]]

    return pattern


def window_from_layer(f: Fields, n: int) -> list[str]:
    """Qwen2: windowed from max_window_layers on, if the window is in use."""
    if not f.flag("use_sliding_window") or f.get("sliding_window") is None:
        return [FULL] * n
    start = f.number("max_window_layers", minimum=0)
    return [SLIDING if i >= start else FULL for i in range(n)]


def qwen2_moe(f: Fields, n: int) -> list[str]:
    """Every other layer below max_window_layers, if the window is in use."""
    if not f.flag("use_sliding_window"):
        return [FULL] * n
    end = f.number("max_window_layers", minimum=0)
    return [SLIDING if (i + 1) % 2 and i < end else FULL for i in range(n)]


def dots1(f: Fields, n: int) -> list[str]:
    if f.get("sliding_window") is None:
        return [FULL] * n
    start = f.number("max_window_layers", minimum=0)
    return [SLIDING if i >= start else FULL for i in range(n)]


def smollm3(f: Fields, n: int) -> list[str]:
    """Layers without rotary embedding are the windowed ones, if the window is in use."""
    if not f.flag("use_sliding_window") or f.get("sliding_window") is None:
        return [FULL] * n
    return [FULL if rope else SLIDING for rope in no_rope_layers(f, n, "no_rope_layer_interval")]


def llama4(f: Fields, n: int) -> list[str]:
    if f.get("attention_chunk_size") is None:
        return [FULL] * n
    return [CHUNKED if rope else FULL for rope in no_rope_layers(f, n, "no_rope_layer_interval")]


def no_rope_layers(f: Fields, n: int, interval: str) -> list[bool]:
    """True for each layer that uses rotary embedding (1 in `no_rope_layers`)."""
    listed = f.entries("no_rope_layers")
    if listed:
        if len(listed) != n:
            raise ConfigError(f"{f.path}no_rope_layers has {len(listed)} entries for {n} layers")
        return [bool(value) for value in listed]
    step = f.number_or(interval, 4)
    return [bool((i + 1) % step) for i in range(n)]


def cohere2_moe(f: Fields, n: int) -> list[str]:
    """A prefix of dense layers with a pattern of its own."""
    prefix = min(f.number_or("first_k_dense_replace", 0, minimum=0), n)
    head = every(1, field="prefix_dense_sliding_window_pattern")(f, prefix)
    return head + every(4, field="sliding_window_pattern")(f, n - prefix)


def beam(f: Fields, n: int) -> list[str]:
    return every(6, force_last=True)(f, n)


def flint(f: Fields, n: int) -> list[str]:
    return [FULL if i < 2 or i % 4 == 1 or i == n - 1 else SLIDING for i in range(n)]


def mimo_v2(f: Fields, n: int) -> list[str]:
    if f.get("hybrid_layer_pattern") is not None:
        return flags("hybrid_layer_pattern", on=SLIDING, off=FULL)(f, n)
    return [FULL if i == 0 or not (i + 1) % 6 else SLIDING for i in range(n)]


def lfm3(f: Fields, n: int) -> list[str]:
    return [FULL if i % 4 == 2 else SLIDING if i % 4 == 0 and i > 0 else CONV for i in range(n)]


def jamba(f: Fields, n: int) -> list[str]:
    period = f.number("attn_layer_period")
    offset = f.number("attn_layer_offset", minimum=0)
    return [FULL if i % period == offset else LINEAR for i in range(n)]


def olmo_hybrid(f: Fields, n: int) -> list[str]:
    kinds = every(4, other=LINEAR)(f, n)
    if kinds and FULL not in kinds:
        kinds[-1] = FULL
    return kinds


def zamba(f: Fields, n: int) -> list[str]:
    period = f.number("attn_layer_period")
    offset = f.number("attn_layer_offset", minimum=0)
    head = [LINEAR, LINEAR, HYBRID]
    return (head + [HYBRID if i % period == offset else LINEAR for i in range(n - 3)])[:n]


_NEMOTRON = {"M": LINEAR, "*": FULL, "E": MOE, "-": MLP}


def nemotron_h(f: Fields, n: int) -> list[str]:
    """One letter a layer: M(amba), * attention, E(xperts), - MLP."""
    text = f.get("hybrid_override_pattern")
    if text is None:
        return [LINEAR, MOE, FULL, MLP]
    if not isinstance(text, str) or not set(text) <= set(_NEMOTRON):
        raise ConfigError(f"{f.path}hybrid_override_pattern may hold only {' '.join(_NEMOTRON)}")
    return [_NEMOTRON[letter] for letter in text]


def recurrent_gemma(f: Fields, n: int) -> list[str]:
    blocks = f.strings("block_types") or ["recurrent", "recurrent", "attention"]
    kinds = [LINEAR if block == "recurrent" else SLIDING for block in blocks]
    return [kinds[i % len(kinds)] for i in range(n)]


def kimi_linear(f: Fields, n: int) -> list[str]:
    """1-based lists of layers in `linear_attn_config`, else every 4th layer but the first."""
    section = f.get("linear_attn_config") or {}
    full = section.get("full_attn_layers") if isinstance(section, dict) else None
    linear = section.get("kda_layers") if isinstance(section, dict) else None
    if full is None or linear is None:
        return [FULL if i and i % 4 == 0 else LINEAR for i in range(n)]
    kinds: list[str] = [""] * n
    for layers, kind in ((full, FULL), (linear, LINEAR)):
        for layer in layers:
            if isinstance(layer, int) and 1 <= layer <= n:
                kinds[layer - 1] = kind
    if "" in kinds:
        raise ConfigError(f"{f.path}linear_attn_config does not say what layer {kinds.index('')} is")
    return kinds


def inkling(f: Fields, n: int) -> list[str]:
    return indices("local_layer_ids", listed=HYBRID_SLIDING, other=HYBRID,
                   default=every(6, last=HYBRID, other=HYBRID_SLIDING))(f, n)  # fmt: skip


def unlimited_ocr(f: Fields, n: int) -> list[str]:
    return [FULL if f.get("sliding_window") is None else REFERENCE_SLIDING] * n


def minimax_m3(f: Fields, n: int) -> list[str]:
    section = f.get("sparse_attention_config")
    freq = section.get("sparse_attention_freq") if isinstance(section, dict) else None
    if freq is None:
        return [FULL] * n
    if not isinstance(freq, list) or len(freq) != n:
        raise ConfigError(f"{f.path}sparse_attention_config.sparse_attention_freq must have {n} entries")
    return [SPARSE if on else FULL for on in freq]

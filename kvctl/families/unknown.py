"""Model types that no family knows: read only where every layer is certain."""

from __future__ import annotations

import re
from typing import Any

from kvctl.errors import ConfigError
from kvctl.families.build import Layers, repeat
from kvctl.families.fields import Fields
from kvctl.spec import FullAttention, Layer

# Keys that hint at something a plain reading would get wrong.
_HINTS = re.compile(
    r"layer_type|layers_block|block_type|block_config|_pattern|pattern_|window|sliding|chunk_size|attention_chunk|"
    r"lora_rank|latent|ssm|state_size|d_state|mamba|conv|recurr|rwkv|lru|delta|linear_|_linear|share|shared_|sharing|"
    r"interval|attn_layer|attention_layers|cross_attention|is_encoder_decoder|hybrid|index_|indexer|compress|memory|"
    r"loop|num_pass|recycle|nope_head_dim|rope_head_dim|v_head_dim|value_head_dim|value_dim|kv_dim|kv_channels|"
    r"swa_|global_head|kv_heads_per|heads_per_layer|per_layer|kv_n_heads|n_head_kv|multi_query|group_num|"
    r"num_kv_heads|local_attention|global_attn|full_attn|attention_type|attn_type|cache"
)
# Keys that match, and say nothing about the cache.
_HARMLESS = re.compile(
    r"shared_expert|share_expert|expert_share|moe_|_moe|experts?_|embedding|tie_|use_cache|cache_dir|chunk_size_feed|"
    r"feed_forward|vocab|rope_(parameters|scaling|theta)|dropout|q_lora_rank$|tokeniz|vision|audio|image|video|"
    r"quantiz|_attn_implementation|attn_implementation|initializer|loss|router|residual|bias|linear_bias"
)
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {}, "none", "full", "full_attention")


def hints(f: Fields) -> list[str]:
    """Keys in the file that could change the cache and are not switched off."""
    return sorted(
        key
        for key, value in f.raw.items()
        if _HINTS.search(key) and not _HARMLESS.search(key) and not any(value is off or value == off for off in _OFF)
    )


def read_unknown(f: Fields) -> Layers:
    """Standard attention from standard fields, or a refusal that names what stands in the way."""
    if not f.type:
        raise ConfigError(
            f"{f.path}model_type is missing from the configuration", hint="give it with --set model_type=llama"
        )
    name = f.type[:60]
    doubtful = hints(f)
    if doubtful:
        raise ConfigError(
            f"model type {name!r} is unknown, and these keys may change its cache: {', '.join(doubtful[:8])}"
            + (f" and {len(doubtful) - 8} more" if len(doubtful) > 8 else ""),
            hint="size the shape directly: kvctl size --layers N --kv-heads N --head-dim N",
        )
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if f.raw.get(key) is None:
            raise ConfigError(
                f"model type {name!r} is unknown, and its configuration has no {key}",
                hint=f"give it with --set {f.path}{key}=N, or size the shape: --layers N --kv-heads N --head-dim N",
            )
    dim = f.optional_number("head_dim")
    heads = f.number("num_attention_heads")
    if dim is None:
        hidden = f.number("hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"model type {name!r} is unknown, and hidden_size {hidden} is no multiple of its {heads} heads",
                hint=f"give the width of a head with --set {f.path}head_dim=N",
            )
        dim = hidden // heads
    kv = f.number("num_key_value_heads")
    if heads % kv:
        raise ConfigError(f"model type {name!r} is unknown, and {heads} query heads do not share {kv} KV heads evenly")
    return repeat(f.layers(), Layer((FullAttention(kv, dim, dim),)))

"""GGUF architectures whose layers keep latents or states: their keys in the words of config.json.

Source: llama.cpp b11434 src/models/*.cpp (load_arch_hparams).
"""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.sources.gguf_keys import FULL, SLIDING, Config, Keys, attention, base, head_width

LINEAR = "linear_attention"


# -- latents ---------------------------------------------------------------------------------------


def latent(keys: Keys) -> Config:
    """Latent attention; files from before it was stored so hold expanded heads."""
    if keys.get("attention.key_length_mla") is None:
        return expanded(keys)
    return base(keys) | _latent(keys)


def _latent(keys: Keys) -> Config:
    rope, width = keys.number("rope.dimension_count"), keys.number("attention.key_length_mla")
    rank = keys.number("attention.kv_lora_rank")
    if rope >= width:
        raise ConfigError(f"{keys.where}: rotary keys of {rope} in keys of {width} elements")
    if keys.number("attention.key_length", rank + rope) != rank + rope:
        raise ConfigError(
            f"{keys.where}: rows of {keys.get('attention.key_length')} elements for latents of {rank} + {rope}"
        )
    layers = keys.number("block_count")
    heads = max(keys.per_layer("attention.head_count", layers, 0, minimum=0))
    if not heads:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.head_count is missing")
    kv = set(keys.per_layer("attention.head_count_kv", layers, heads, minimum=0))
    if not kv <= {0, 1}:
        raise ConfigError(f"{keys.where}: latents for {max(kv)} KV heads, and they are one row for all heads",
                          hint="convert the model again with a current llama.cpp")  # fmt: skip
    return {
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "kv_lora_rank": rank,
        "q_lora_rank": keys.number("attention.q_lora_rank", 0, minimum=0) or None,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": width - rope,
        "v_head_dim": keys.number("attention.value_length_mla"),
    }


def expanded(keys: Keys) -> Config:
    """Latents that are expanded to heads before they are stored: what such a file's cache holds."""
    config = base(keys)
    heads = keys.number("attention.head_count")
    return config | {
        "model_type": "gguf",
        "num_attention_heads": heads,
        "num_key_value_heads": keys.number("attention.head_count_kv", heads),
        "head_dim": keys.number("attention.key_length", config["hidden_size"] // heads),
        "v_head_dim": keys.number("attention.value_length", config["hidden_size"] // heads),
    }


def sparse_latent(keys: Keys) -> Config:
    """Latents with an indexer in every layer, or in those that the file lists."""
    if keys.get("attention.key_length_mla") is None:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.key_length_mla is missing")
    config = latent(keys) | {
        "index_head_dim": keys.number("attention.indexer.key_length"),
        "index_n_heads": keys.number("attention.indexer.head_count"),
        "index_topk": keys.number("attention.indexer.top_k"),
    }
    if keys.architecture != "glm-dsa":
        return config
    layers = config["num_hidden_layers"]
    own = keys.flags("attention.indexer.types", layers)
    if own is None:
        # GLM-5 and 5.1 have an indexer in every layer, 5.2 (contexts of a million) in a quarter of them.
        longer = config["max_position_embeddings"] >= 2**20
        own = [not longer or index < 2 or (index - 2) % 4 == 0 for index in range(layers)]
    return config | {"indexer_types": ["full" if flag else "shared" for flag in own]}


def kimi_linear(keys: Keys) -> Config:
    """Kimi delta attention where a layer has no KV heads, latents where it has."""
    config = base(keys) | _latent(keys)
    delta = [index + 1 for index, kv in enumerate(_kv_heads(keys, config)) if not kv]
    full = [index for index in range(1, config["num_hidden_layers"] + 1) if index not in delta]
    return config | {
        "linear_attn_config": {
            "kda_layers": delta,
            "full_attn_layers": full,
            "num_heads": config["num_attention_heads"],
            "head_dim": keys.number("kda.head_dim"),
            "short_conv_kernel_size": keys.number("ssm.conv_kernel"),
        }
    }


def bailing_hybrid(keys: Keys) -> Config:
    """Kimi delta attention where a layer has no KV heads, latents where it has."""
    config = base(keys) | _latent(keys)
    return config | {
        "layer_types": [FULL if count else LINEAR for count in _kv_heads(keys, config)],
        "linear_num_heads": config["num_attention_heads"],
        "linear_head_dim": keys.number("kda.head_dim"),
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
    }


def compressed(keys: Keys) -> Config:
    """Windows of one row in every layer, and compressed entries where the file lists a ratio."""
    if keys.number("nextn_predict_layers", 0, minimum=0):
        raise ConfigError(
            f"{keys.where}: {keys.architecture} with nextn_predict_layers, which kvctl does not know of it"
        )
    config = base(keys)
    layers = config["num_hidden_layers"]
    return config | {
        "num_attention_heads": keys.number("attention.head_count"),
        "head_dim": keys.number("attention.key_length"),
        "sliding_window": keys.number("attention.sliding_window"),
        "index_head_dim": keys.number("attention.indexer.key_length"),
        "compress_ratios": keys.per_layer("attention.compress_ratios", layers, 0, minimum=0),
    }


# -- states ----------------------------------------------------------------------------------------


def _kv_heads(keys: Keys, config: Config) -> list[int]:
    """KV heads of each layer; 0 marks those without attention."""
    return keys.per_layer("attention.head_count_kv", config["num_hidden_layers"], 0, minimum=0)


def _mixed_attention(keys: Keys) -> tuple[Config, list[int]]:
    """The attention of a model some of whose layers have none, and the KV heads of each layer."""
    config = base(keys)
    kv = _kv_heads(keys, config)
    if len(set(kv) - {0}) > 1:
        raise ConfigError(
            f"{keys.where}: {keys.architecture} with several counts of KV heads, which kvctl does not know of it"
        )
    heads = max(keys.per_layer("attention.head_count", config["num_hidden_layers"], 0, minimum=0))
    if max(kv) and not heads:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.head_count is missing")
    if max(kv):
        width = head_width(keys, config["hidden_size"] // heads)
        config |= {"num_attention_heads": heads, "num_key_value_heads": max(kv), "head_dim": width}
    return config, kv


def _scan(keys: Keys, config: Config) -> Config:
    """Sizes of a Mamba 2 layer, in the words that most hybrids share."""
    inner, heads = keys.number("ssm.inner_size"), keys.number("ssm.time_step_rank")
    groups = keys.number("ssm.group_count")
    if inner % config["hidden_size"] or inner % heads or heads % groups:
        raise ConfigError(f"{keys.where}: ssm.inner_size {inner} does not split over its {heads} heads and groups")
    return {
        "mamba_expand": inner // config["hidden_size"],
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": groups,
        "mamba_d_state": keys.number("ssm.state_size"),
        "mamba_d_conv": keys.number("ssm.conv_kernel"),
    }


def gated_delta(keys: Keys) -> Config:
    """Gated delta layers, and attention in each full_attention_interval-th or where the file says."""
    config = attention(keys)
    layers, interval = config["num_hidden_layers"], keys.number("full_attention_interval", 4)
    recurrent = keys.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        recurrent = [(index + 1) % interval != 0 for index in range(layers)]
    inner, values = _heads(keys)
    return config | {
        "layer_types": [LINEAR if flag else FULL for flag in recurrent],
        "linear_num_key_heads": keys.number("ssm.group_count"),
        "linear_num_value_heads": values,
        "linear_key_head_dim": keys.number("ssm.state_size"),
        "linear_value_head_dim": inner // values,
        "linear_conv_kernel_dim": keys.number("ssm.conv_kernel"),
    }


def mamba(keys: Keys) -> Config:
    """Selective scan in every layer."""
    return base(keys) | {
        "intermediate_size": keys.number("ssm.inner_size"),
        "state_size": keys.number("ssm.state_size"),
        "conv_kernel": keys.number("ssm.conv_kernel"),
    }


def mamba2(keys: Keys) -> Config:
    """State-space duality in every layer."""
    config = base(keys)
    scan = _scan(keys, config)
    return config | {
        "expand": scan["mamba_expand"],
        "num_heads": scan["mamba_n_heads"],
        "head_dim": scan["mamba_d_head"],
        "n_groups": scan["mamba_n_groups"],
        "state_size": scan["mamba_d_state"],
        "conv_kernel": scan["mamba_d_conv"],
    }


def granite_hybrid(keys: Keys) -> Config:
    """Mamba 2 where a layer has no KV heads."""
    config, kv = _mixed_attention(keys)
    return config | _scan(keys, config) | {"layer_types": [FULL if count else LINEAR for count in kv]}


def falcon_h1(keys: Keys) -> Config:
    """Attention and Mamba 2 side by side in every layer."""
    config = attention(keys)
    inner, heads = _heads(keys)
    return config | {
        "mamba_d_ssm": inner,
        "mamba_n_heads": heads,
        "mamba_d_head": inner // heads,
        "mamba_n_groups": keys.number("ssm.group_count"),
        "mamba_d_state": keys.number("ssm.state_size"),
        "mamba_d_conv": keys.number("ssm.conv_kernel"),
    }


def nemotron_h(keys: Keys) -> Config:
    """Mamba 2 without KV heads and MLP, attention with KV heads, else an MLP or experts."""
    config, kv = _mixed_attention(keys)
    wide = keys.per_layer("feed_forward_length", config["num_hidden_layers"], 0, minimum=0)
    kinds = ["mlp" if width else FULL if count else LINEAR for count, width in zip(kv, wide, strict=True)]
    inner, heads = _heads(keys)
    return config | {
        "layers_block_type": kinds,
        "mamba_num_heads": heads,
        "mamba_head_dim": inner // heads,
        "n_groups": keys.number("ssm.group_count"),
        "ssm_state_size": keys.number("ssm.state_size"),
        "conv_kernel": keys.number("ssm.conv_kernel"),
    }


def jamba(keys: Keys) -> Config:
    """Mamba (the first) where a layer has no KV heads; PLaMo 2 is laid out alike."""
    config, kv = _mixed_attention(keys)
    listed = [index for index, count in enumerate(kv) if count]
    period = listed[1] - listed[0] if len(listed) > 1 else len(kv)
    inner = keys.number("ssm.inner_size")
    if not listed or listed != list(range(listed[0], len(kv), period)) or inner % config["hidden_size"]:
        raise ConfigError(f"{keys.where}: attention in the layers {listed[:8]} of {len(kv)}, at no regular distance")
    if keys.number("ssm.group_count", 0, minimum=0):
        raise ConfigError(f"{keys.where}: {keys.architecture} with groups, which kvctl does not know of it")
    return config | {
        "attn_layer_period": period,
        "attn_layer_offset": listed[0],
        "mamba_expand": inner // config["hidden_size"],
        "mamba_d_state": keys.number("ssm.state_size"),
        "mamba_d_conv": keys.number("ssm.conv_kernel"),
    }


def lfm2(keys: Keys) -> Config:
    """Short convolutions where a layer has no KV heads; a window is that of all others."""
    config, kv = _mixed_attention(keys)
    if len(set(kv)) != 2 or 0 not in kv:
        raise ConfigError(f"{keys.where}: attention.head_count_kv must name one count, and 0 for convolutions")
    window = keys.number("attention.sliding_window", 0, minimum=0) if keys.architecture == "lfm2" else 0
    config |= {"conv_L_cache": keys.number("shortconv.l_cache"), "sliding_window": window or None}
    return config | {"layer_types": [(SLIDING if window else FULL) if count else "conv" for count in kv]}


def rwkv(keys: Keys) -> Config:
    """Two shifted inputs and one matrix a head."""
    config = base(keys)
    if keys.number("token_shift_count", 2) != 2:
        raise ConfigError(f"{keys.where}: {keys.architecture}.token_shift_count is not 2, which kvctl does not know")
    return config | {"head_size": keys.number("wkv.head_size"), "attention_hidden_size": config["hidden_size"]}


def lightning(keys: Keys) -> Config:
    """Lightning attention, and softmax attention in each full_attention_interval-th layer or where the file says."""
    config = attention(keys)
    layers, interval = config["num_hidden_layers"], keys.number("full_attention_interval", 8)
    recurrent = keys.flags("attention.recurrent_layers", layers)
    if recurrent is None:
        recurrent = [(index + 1) % interval != 0 for index in range(layers)]
    return config | {"attn_type_list": [0 if flag else 1 for flag in recurrent]}


def _heads(keys: Keys) -> tuple[int, int]:
    """Width of a recurrent layer and the heads that share it evenly."""
    inner, heads = keys.number("ssm.inner_size"), keys.number("ssm.time_step_rank")
    if inner % heads:
        raise ConfigError(f"{keys.where}: ssm.inner_size {inner} does not split over {heads} heads")
    return inner, heads

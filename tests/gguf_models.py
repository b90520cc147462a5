"""GGUF headers of every architecture that kvctl reads, made up at random with the keys that llama.cpp wants."""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy

Metadata = dict[str, Any]

# Keys that one architecture or another must have, and that no cache depends on.
FILLER: Metadata = {
    "vocab_size": 128, "attention.layer_norm_epsilon": 1e-5, "attention.layer_norm_rms_epsilon": 1e-5,
    "attention.group_norm_epsilon": 1e-5, "attention.group_norm_groups": 8, "feed_forward_length": 384,
    "leading_dense_block_count": 0, "logit_scale": 1.0, "attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 1.0,
    "attention.q_lora_rank": 512, "expert_feed_forward_length": 384, "expert_shared_feed_forward_length": 192,
    "moe_latent_size": 384, "interleave_moe_layer_step": 1, "expert_count": 4, "expert_used_count": 2,
    "expert_shared_count": 1, "expert_gating_func": 2, "expert_weights_scale": 1.0, "expert_weights_norm": True,
    "rope.freq_base": 10000.0, "rope.freq_base_swa": 10000.0, "rope.dimension_sections": [8, 8, 8, 8],
    "use_parallel_residual": False, "attention.decay_lora_rank": 64, "attention.iclr_lora_rank": 64,
    "attention.value_residual_mix_lora_rank": 64, "attention.gate_lora_rank": 64, "residual_scale": 1.0,
    "embedding_scale": 1.0, "experts_per_group": 2, "expert_chunk_feed_forward_length": 384, "swiglu_clamp_exp": 7.0,
    "router_logit_softcapping": 30.0, "expert_group_scale": 0.05,
}  # fmt: skip


def write(path: Path, architecture: str, metadata: Metadata, tensors: dict[str, tuple[int, ...]] | None = None) -> Path:
    """A file with these keys, and with tensors of 16 bits in these shapes, all 0; a key of None is left out."""
    writer = gguf.GGUFWriter(path, architecture)
    for name, value in (FILLER | metadata).items():
        key = f"{architecture}.{name}"
        if isinstance(value, list):
            writer.add_array(key, value)
        elif isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        elif value is not None:
            writer.add_uint32(key, value)
    for name in ("alpha_n", "alpha_p", "beta", "eps") if architecture == "apertus" else ():
        writer.add_array(f"xielu.{name}", [1.0] * metadata["block_count"])
    writer.add_string("tokenizer.ggml.model", "none")
    sizes = {name: 2 * math.prod(shape) for name, shape in (tensors or {}).items()}
    for name, shape in (tensors or {}).items():
        writer.add_tensor_info(name, shape, numpy.dtype(numpy.float16), sizes[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    if sizes:  # what is written of a file with holes takes no room
        os.truncate(path, path.stat().st_size + sum(-(-size // 32) * 32 + 32 for size in sizes.values()))
    return path


def random_keys(architecture: str, random: Random) -> Metadata:
    """Keys of a small model of the architecture."""
    layers, heads = random.choice((2, 3, 4, 5, 6, 8, 12)), random.choice((4, 8, 16, 32))
    width = random.choice((64, 96, 128, 256))
    keys = {
        "context_length": random.choice((2048, 8192, 131072)), "embedding_length": random.choice((256, 512, 1024)),
        "block_count": layers, "attention.head_count": heads, "attention.head_count_kv": random.choice((1, 2, 4)),
        "attention.key_length": width, "attention.value_length": width, "rope.dimension_count": width,
    }  # fmt: skip
    for names, change in _CHANGES.items():
        if architecture in names.split():
            keys |= change(keys, random)
    if architecture in _PREDICTS_AHEAD.split() and layers > 3 and random.random() < 0.4:
        keys |= _one_more_layer(keys)
    return {key: value for key, value in keys.items() if value is not None}


_PREDICTS_AHEAD = (
    "glm4moe bailingmoe2 hy_v3 qwen3next qwen35 qwen35moe deepseek2 deepseek32 glm-dsa exaone-moe step35 mimo2 cohere2moe "
    "nemotron_h_moe"
)


def _one_more_layer(keys: Metadata) -> Metadata:
    """A last layer that predicts further tokens: an entry more in every list."""
    layers = keys["block_count"]
    lists = {
        name: value
        for name, value in keys.items()
        if isinstance(value, list) and len(value) == layers and not name.startswith("attention.indexer")
    }
    more = {"attention.head_count_kv": 2, "attention.head_count": 4, "feed_forward_length": 512}
    return {
        "nextn_predict_layers": 1,
        "block_count": layers + 1,
        **{name: [*value, type(value[0])(more.get(name, 0))] for name, value in lists.items()},
    }


def _flags(random: Random, layers: int) -> list[bool]:
    flags = [random.random() < 0.6 for _ in range(layers)]
    return flags if any(flags) else [True, *flags[1:]]


def _window(random: Random) -> int:
    return random.choice((128, 300, 512, 1024, 4096))


def _windows(keys: Metadata, random: Random) -> Metadata:
    pattern = random.choice((None, None, _flags(random, keys["block_count"]), random.choice((2, 3, 5))))
    return {"attention.sliding_window": _window(random), "attention.sliding_window_pattern": pattern}


def _maybe_windows(keys: Metadata, random: Random) -> Metadata:
    return _windows(keys, random) if random.random() < 0.7 else {}


def _listed_windows(keys: Metadata, random: Random) -> Metadata:
    return {"attention.sliding_window": _window(random), "attention.sliding_window_pattern": _flags(random, keys["block_count"])}  # fmt: skip


def _by_kind(flags: list[bool]) -> list[int]:
    return [4 if flag else 2 for flag in flags]


def _gemma4(keys: Metadata, random: Random) -> Metadata:
    layers = keys["block_count"]
    shared = random.choice((0, 1, 2)) if layers > 4 else 0
    # Layers that share read the last windowed and the last full layer before them.
    own = [*_flags(random, layers - shared)[2:], True, False]
    flags = [*own, *[True] * (shared - 1), False] if shared else [True, *own[1:]]
    return {
        "attention.sliding_window": _window(random), "attention.sliding_window_pattern": flags,
        "attention.key_length": 512, "attention.value_length": 512, "rope.dimension_count": 512,
        "attention.key_length_swa": 256, "attention.value_length_swa": 256, "rope.dimension_count_swa": 256,
        "attention.head_count_kv": _by_kind(flags), "attention.shared_kv_layers": shared,
        "embedding_length_per_layer_input": 256,
    }  # fmt: skip


def _mimo2(keys: Metadata, random: Random) -> Metadata:
    flags = _flags(random, keys["block_count"])
    return {
        "attention.sliding_window": _window(random), "attention.sliding_window_pattern": flags,
        "attention.key_length": 192, "attention.value_length": 128, "rope.dimension_count": 64,
        "attention.head_count_kv": _by_kind(flags),
    }  # fmt: skip


def _deci(keys: Metadata, random: Random) -> Metadata:
    counts = [4, *(random.choice((0, 2, 4)) for _ in range(keys["block_count"] - 1))]
    heads = keys["attention.head_count"]
    return {
        "attention.head_count_kv": counts, "attention.head_count": [heads if count else 0 for count in counts],
        "feed_forward_length": [256] * len(counts),
    }  # fmt: skip


def _latent(keys: Metadata, random: Random) -> Metadata:
    return {
        "attention.head_count_kv": 1, "attention.key_length": 576, "attention.value_length": 512,
        "attention.kv_lora_rank": 512, "attention.key_length_mla": 192, "attention.value_length_mla": 128,
        "rope.dimension_count": 64, "attention.q_lora_rank": 256,
    }  # fmt: skip


def _deepseek2(keys: Metadata, random: Random) -> Metadata:
    return _latent(keys, random) if random.random() < 0.5 else _expanded(keys, random)


def _expanded(keys: Metadata, random: Random) -> Metadata:
    return {
        "attention.head_count_kv": keys["attention.head_count"], "attention.key_length": 192,
        "attention.value_length": 128, "attention.kv_lora_rank": 512, "rope.dimension_count": 64,
    }  # fmt: skip


def _indexed(keys: Metadata, random: Random) -> Metadata:
    return _latent(keys, random) | {
        "attention.indexer.head_count": 16, "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048,
    }  # fmt: skip


def _shared_indexers(keys: Metadata, random: Random) -> Metadata:
    own = [True, *_flags(random, keys["block_count"])[1:]]
    return {
        "attention.indexer.types": random.choice((None, own)),
        "context_length": random.choice((8192, 1048576)),
    }


def _minimax_m3(keys: Metadata, random: Random) -> Metadata:
    return {
        "attention.indexer.head_count": keys["attention.head_count_kv"], "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 16, "attention.indexer.block_size": 64, "attention.indexer.local_blocks": 1,
        "leading_dense_block_count": random.choice((0, 1)), "rope.dimension_count": 64,
    }  # fmt: skip


def _kimi_linear(keys: Metadata, random: Random) -> Metadata:
    layers = max(keys["block_count"], 4)
    return _latent(keys, random) | {
        "block_count": layers, "ssm.conv_kernel": 4, "kda.head_dim": 128,
        "attention.head_count_kv": [0 if (index + 1) % 4 else 1 for index in range(layers)],
    }  # fmt: skip


def _kimi_k3(keys: Metadata, random: Random) -> Metadata:
    return _kimi_linear(keys, random) | {
        "attn_res.block_size": 2, "activation.situ_beta": 1.0, "activation.situ_linear_beta": 1.0,
        "kda.gate_lower_bound": -5.0,
    }  # fmt: skip


def _bailingmoe3(keys: Metadata, random: Random) -> Metadata:
    return _kimi_linear(keys, random) | {
        "kda.safe_gate": True, "kda.gate_lower_bound": -5.0, "rope.dimension_sections": [8, 12, 12, 0],
    }  # fmt: skip


def _deepseek4(keys: Metadata, random: Random) -> Metadata:
    return {
        "attention.head_count": 8, "attention.head_count_kv": 1, "attention.key_length": 512, "attention.value_length": 512,
        "rope.dimension_count": 64, "attention.q_lora_rank": 64, "attention.sliding_window": _window(random),
        "attention.output_group_count": 8, "attention.output_lora_rank": 32, "attention.compress_rope_freq_base": 160000.0,
        "attention.compress_ratios": [4, *(random.choice((0, 4, 128)) for _ in range(keys["block_count"] - 1))],
        "hyper_connection.count": 4, "hyper_connection.sinkhorn_iterations": 2, "hyper_connection.epsilon": 1e-6,
        "hash_layer_count": 0, "attention.indexer.head_count": 64, "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 512, "expert_gating_func": 4,
    }  # fmt: skip


def _gated_delta(keys: Metadata, random: Random) -> Metadata:
    values = random.choice((8, 16))
    recurrent = [*_flags(random, keys["block_count"] - 1), False]
    return {
        "ssm.conv_kernel": 4, "ssm.state_size": 128, "ssm.time_step_rank": values, "ssm.inner_size": 128 * values,
        "ssm.group_count": random.choice((4, 8)), "rope.dimension_count": 64,
        "attention.recurrent_layers": random.choice((None, recurrent)),
        "full_attention_interval": random.choice((None, 2)),
    }  # fmt: skip


def _scan(keys: Metadata, random: Random) -> Metadata:
    return {
        "ssm.conv_kernel": 4, "ssm.inner_size": 2 * keys["embedding_length"], "ssm.state_size": random.choice((16, 64, 128)),
        "ssm.time_step_rank": random.choice((8, 16)), "ssm.group_count": random.choice((1, 2, 4, 8)),
    }  # fmt: skip


def _no_attention(keys: Metadata, random: Random) -> Metadata:
    gone = ("head_count_kv", "key_length", "value_length")
    return {"attention.head_count": 0, "rope.dimension_count": None} | {f"attention.{name}": None for name in gone}


def _every(period: int, keys: Metadata) -> Metadata:
    kv = keys["attention.head_count_kv"]
    return {
        "attention.head_count_kv": [kv if index % period == period // 2 else 0 for index in range(keys["block_count"])]
    }


def _jamba(keys: Metadata, random: Random) -> Metadata:
    period = random.choice((2, 3, 4))
    layers = {"block_count": period * random.choice((1, 2, 3))}
    return layers | _every(period, keys | layers) | {"ssm.group_count": None}


def _plamo2(keys: Metadata, random: Random) -> Metadata:
    heads = [keys["attention.head_count"] if count else 0 for count in keys["attention.head_count_kv"]]
    return {"attention.head_count": heads, "ssm.group_count": 0}


def _nemotron_h(keys: Metadata, random: Random) -> Metadata:
    kinds = [
        "mamba",
        "attention",
        "mlp",
        *(random.choice(("mamba", "attention", "mlp")) for _ in range(keys["block_count"])),
    ]
    kv = keys["attention.head_count_kv"]
    return {
        "block_count": len(kinds),
        "attention.head_count_kv": [kv if kind == "attention" else 0 for kind in kinds],
        "feed_forward_length": [512 if kind == "mlp" else 0 for kind in kinds],
    }


def _lfm2(keys: Metadata, random: Random) -> Metadata:
    return {"shortconv.l_cache": random.choice((3, 4))} | _every(2, keys)


def _lightning(keys: Metadata, random: Random) -> Metadata:
    return {"rope.dimension_count": 64, "full_attention_interval": random.choice((None, 2, 4))}


def _openelm(keys: Metadata, random: Random) -> Metadata:
    layers = keys["block_count"]
    return {
        "attention.head_count": [8] * layers, "attention.head_count_kv": [random.choice((2, 4)) for _ in range(layers)],
        "feed_forward_length": [256] * layers,
    }  # fmt: skip


_CHANGES: dict[str, Callable[[Metadata, Random], Metadata]] = {
    "gemma2 gpt-oss cohere2 cohere2moe exaone-moe muse-glimmer": _windows,
    "afmoe mellum olmo2 gemma3 plamo3 smallthinker": _maybe_windows,
    "granite_swa step35 maple spark2_5": _listed_windows,
    "exaone4": lambda keys, random: _windows(keys, random) | {"block_count": random.choice((4, 64)), "attention.sliding_window_pattern": None},
    "gemma3n": lambda keys, random: {"attention.sliding_window": _window(random), "block_count": random.choice((22, 30, 35))},
    "gemma4": _gemma4,
    "mimo2": _mimo2,
    "llama": lambda keys, random: {"attention.sliding_window": random.choice((None, 4096))},
    "llama4": lambda keys, random: {"block_count": 8, "attention.sliding_window": random.choice((None, 0))},
    "deci": _deci,
    "deepseek2": _deepseek2,
    "mistral4": _latent,
    "deepseek32 glm-dsa": _indexed,
    "glm-dsa": _shared_indexers,
    "minicpm3 plm": _expanded,
    "minimax-m3": _minimax_m3,
    "kimi-linear": _kimi_linear,
    "kimi-k3": _kimi_k3,
    "bailingmoe3": _bailingmoe3,
    "deepseek4": _deepseek4,
    "qwen3next qwen35 qwen35moe": _gated_delta,
    "mamba mamba2 jamba plamo2 granitehybrid falcon-h1 nemotron_h nemotron_h_moe": _scan,
    "mamba mamba2 rwkv7": _no_attention,
    "mamba": lambda keys, random: {"ssm.group_count": None},
    "jamba plamo2": _jamba,
    "plamo2": _plamo2,
    "granitehybrid": lambda keys, random: _every(2, keys),
    "nemotron_h nemotron_h_moe": _nemotron_h,
    "lfm2 lfm2moe": _lfm2,
    "lfm2": lambda keys, random: {"attention.sliding_window": random.choice((None, _window(random)))},
    "rwkv7": lambda keys, random: {"wkv.head_size": 64},
    "minimax-01": _lightning,
    "openelm": _openelm,
}  # fmt: skip


def random_context(random: Random) -> dict[str, Any]:
    """What a context may be asked for, as the fields of llama_context_params."""
    types = ("f16", "f16", "f16", "q8_0", "q4_0", "q5_1", "q4_1", "q5_0", "iq4_nl", "bf16", "f32")
    key = random.choice(types)
    asked: dict[str, Any] = {
        "n_ctx": random.choice((100, 512, 1000, 3000, 4096, 8192, 20000, 32768)),
        "n_seq_max": random.choice((1, 1, 2, 3, 4)),
        "kv_unified": random.random() < 0.4,
        "swa_full": random.random() < 0.15,
        "flash_attn": random.choice((-1, -1, 1, 0)),
        "type_k": key,
        "type_v": random.choice((key, random.choice(types))),
    }
    if random.random() < 0.3:
        asked["n_ubatch"] = random.choice((64, 256, 1024, 4096))
    if random.random() < 0.3:
        asked["n_batch"] = random.choice((128, 1024, 4096))
    return asked

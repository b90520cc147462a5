"""The keys of a GGUF file in the words of config.json, by architecture.

Sources: llama.cpp b11434 src/llama-arch.cpp (keys), src/models/*.cpp (defaults and which layers
have windows) and conversion/ (which model type becomes which architecture).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from kvctl.errors import ConfigError
from kvctl.sources import gguf_states as states
from kvctl.sources import jsonfile
from kvctl.sources.gguf_keys import CHUNKED, FULL, SLIDING, Config, Keys, attention, base

Reader = Callable[[Keys], Config]


def _plain(keys: Keys) -> Config:
    """The same attention everywhere; some of these architectures name a window that all layers have."""
    config = attention(keys)
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


# What llama.cpp stores in full all the same.
_WINDOWED_THROUGHOUT = {"llama": "mistral", "mistral3": "mistral", "phi3": "phi3", "starcoder2": "starcoder2"}


def _windowed(config: Config, windowed: list[bool], window: int) -> Config:
    return config | {"sliding_window": window, "layer_types": [SLIDING if flag else FULL for flag in windowed]}


def _mixed(every: int, *, full_first: bool = False, optional: bool = False, default: int | None = None) -> Reader:
    """Windows in all but each `every`-th layer (`optional`: if the file names one)."""

    def read(keys: Keys) -> Config:
        config = attention(keys)
        if optional and not keys.get("attention.sliding_window"):
            return config | {"layer_types": [FULL] * config["num_hidden_layers"]}
        windowed = keys.windowed(config["num_hidden_layers"], every, full_first=full_first)
        return _windowed(config, windowed, keys.number("attention.sliding_window", default))

    return read


def _listed(keys: Keys) -> Config:
    """Windows in the layers that the file lists."""
    config = attention(keys)
    windowed = keys.flags("attention.sliding_window_pattern", config["num_hidden_layers"])
    if windowed is None:
        raise ConfigError(f"{keys.where}: {keys.architecture}.attention.sliding_window_pattern is missing, or no list")
    return _windowed(config, windowed, keys.number("attention.sliding_window"))


def _exaone4(keys: Keys) -> Config:
    """The model of 64 layers has windows; the smaller ones have none."""
    config = attention(keys)
    if config["num_hidden_layers"] == 64:
        return _mixed(4, default=4096)(keys)
    return config | {"layer_types": [FULL] * config["num_hidden_layers"]}


def _smallthinker(keys: Keys) -> Config:
    """Windows of 4,096 tokens, whatever size the file names."""
    config = _mixed(4, full_first=True, optional=True)(keys)
    return config | ({"sliding_window": 4096} if "sliding_window" in config else {})


def _llama4(keys: Keys) -> Config:
    """Chunks of 8,192 tokens, unless a window of 0 switches them off."""
    config = attention(keys)
    layers = config["num_hidden_layers"]
    if keys.get("attention.sliding_window") == 0:
        return config | {"layer_types": [FULL] * layers}
    kinds = [CHUNKED if flag else FULL for flag in keys.windowed(layers, 4)]
    return config | {"attention_chunk_size": 8192, "layer_types": kinds}


def _gemma3n(keys: Keys) -> Config:
    # llama.cpp knows no other number of layers with a cache of their own.
    config = _mixed(5)(keys)
    return config | {"num_kv_shared_layers": max(config["num_hidden_layers"] - 20, 0)}


def _gemma4(keys: Keys) -> Config:
    """Windowed and full layers of widths and KV heads of their own; a tail of layers shares."""
    config = base(keys)
    layers = config["num_hidden_layers"]
    windowed = keys.flags("attention.sliding_window_pattern", layers)
    if windowed is None or windowed[-1]:
        raise ConfigError(f"{keys.where}: gemma4.attention.sliding_window_pattern is no list that ends in a full layer")
    heads = keys.per_layer("attention.head_count", layers, 0, minimum=1)
    kv = keys.per_layer("attention.head_count_kv", layers, heads[0], minimum=1)
    full, local = keys.number("attention.key_length"), keys.number("attention.key_length_swa")
    for name, width in (("value_length", full), ("value_length_swa", local)):
        if keys.number(f"attention.{name}", width) != width:
            raise ConfigError(f"{keys.where}: keys and values of several widths, which kvctl does not know of gemma4")
    return _windowed(config, windowed, keys.number("attention.sliding_window")) | {
        "num_attention_heads": heads[0],
        "num_key_value_heads": kv[0],
        "head_dim": local,
        "global_head_dim": full,
        "num_kv_shared_layers": keys.number("attention.shared_kv_layers", 0, minimum=0),
        "per_layer_config": {
            str(i): {"num_key_value_heads": n, "head_dim": local if flag else full}
            for i, (n, flag) in enumerate(zip(kv, windowed, strict=True))
        },
    }


def _mimo2(keys: Keys) -> Config:
    """Values narrower than keys; windowed layers have KV heads of their own."""
    config = base(keys)
    layers = config["num_hidden_layers"]
    windowed = keys.flags("attention.sliding_window_pattern", layers)
    if windowed is None:
        raise ConfigError(f"{keys.where}: mimo2.attention.sliding_window_pattern is missing, or no list")
    heads = max(keys.per_layer("attention.head_count", layers, 0, minimum=1))
    kv = keys.per_layer("attention.head_count_kv", layers, heads, minimum=1)
    counts = [{n for n, flag in zip(kv, windowed, strict=True) if flag is kind} for kind in (False, True)]
    if any(len(found) > 1 for found in counts):
        raise ConfigError(f"{keys.where}: layers of one kind with several counts of KV heads")
    full = min(counts[0] or counts[1])
    key, value = keys.number("attention.key_length"), keys.number("attention.value_length")
    return config | {
        "num_attention_heads": heads,
        "num_key_value_heads": full,
        "head_dim": key,
        "v_head_dim": value,
        "swa_num_key_value_heads": min(counts[1] or counts[0]),
        "swa_head_dim": keys.number("attention.key_length_swa", key),
        "swa_v_head_dim": keys.number("attention.value_length_swa", value),
        "sliding_window": keys.number("attention.sliding_window"),
        "hybrid_layer_pattern": [int(flag) for flag in windowed],
    }


def _deci(keys: Keys) -> Config:
    """KV heads of each layer; without any, a layer has no attention."""
    config = base(keys)
    layers = config["num_hidden_layers"]
    heads = keys.per_layer("attention.head_count", layers, 0, minimum=0)
    kv = keys.per_layer("attention.head_count_kv", layers, 0, minimum=0)
    most = max(heads)
    if not most or any(n and h % n for h, n in zip(heads, kv, strict=True)):
        raise ConfigError(f"{keys.where}: deci.attention.head_count does not split over its KV heads")
    width = keys.number("attention.key_length", config["hidden_size"] // most)
    blocks = [{"attention": {"n_heads_in_group": most // n} if n else {"no_op": True}} for n in kv]
    return config | {"num_attention_heads": most, "head_dim": width, "block_configs": blocks}


def _minimax_m3(keys: Keys) -> Config:
    """An indexer's key beside the attention of every layer but the leading dense ones."""
    config = _plain(keys)
    layers, dense = config["num_hidden_layers"], keys.number("leading_dense_block_count", 0, minimum=0)
    return config | {
        "layer_types": [FULL if index < dense else "minimax_m3_sparse" for index in range(layers)],
        "sparse_attention_config": {"sparse_index_dim": keys.number("attention.indexer.key_length")},
    }


def _same(names: str, read: Reader) -> dict[str, tuple[str, Reader]]:
    """Rows "architecture" or "architecture=model_type" that are read alike."""
    rows = (name.partition("=") for name in names.split())
    return {architecture: (model_type or architecture, read) for architecture, _, model_type in rows}


# Architecture → the model type of config.json, and how its keys are read. Those without a class of
# their own that is laid out alike are called llama, or gguf where layers differ.
ARCHITECTURES: dict[str, tuple[str, Reader]] = {
    **_same(
        "llama mistral3=llama llama-embed=llama qwen=llama qwen2 qwen2moe=qwen2_moe qwen2vl=qwen2 qwen3 qwen3moe=qwen3_moe "
        "qwen3vl=qwen3 qwen3vlmoe=qwen3_moe gemma phi2=llama phi3 phimoe stablelm internlm2=llama granite granitemoe glm4 "
        "glm4moe=glm4_moe chatglm=glm olmo olmoe nemotron exaone=llama command-r=cohere starcoder2 starcoder=llama refact=llama "
        "falcon=llama bloom=llama mpt=llama gpt2=llama gptneox=llama jais=llama jais2 codeshell=llama plamo=llama dbrx=llama "
        "arctic chameleon=llama deepseek deepseek2-ocr=deepseek bitnet smollm3 ernie4_5 ernie4_5-moe=ernie4_5_moe "
        "hunyuan-dense=hunyuan_v1_dense hunyuan-moe=hunyuan_v1_moe hunyuan_vl=hunyuan_v1_dense hy_v3 arcee seed_oss dots1 "
        "apertus minimax-m2=minimax_m2 bailingmoe=bailing_moe bailingmoe2=bailing_moe_v2 grovemoe=qwen3_moe grok=grok-1 "
        "openelm=llama minicpm baichuan=llama orion xverse=llama maincoder=llama paddleocr=ernie4_5 pangu-embedded=llama "
        "cogvlm=llama talkie=llama", _plain),
    "gemma2": ("gemma2", _mixed(2, default=4096)),
    "gemma3": ("gemma3_text", _mixed(6, optional=True)),
    "gemma3n": ("gemma3n_text", _gemma3n),
    "gemma4": ("gemma4_text", _gemma4),
    "gpt-oss": ("gpt_oss", _mixed(2)),
    "cohere2": ("cohere2", _mixed(4)),
    "cohere2moe": ("cohere2_moe", _mixed(4, full_first=True)),
    "olmo2": ("olmo3", _mixed(4, optional=True)),
    "exaone4": ("exaone4", _exaone4),
    "exaone-moe": ("exaone_moe", _mixed(4, default=128)),
    "afmoe": ("afmoe", _mixed(4, optional=True)),
    "laguna": ("laguna", _mixed(4, full_first=True, optional=True)),
    "mellum": ("mellum", _mixed(4, optional=True)),
    "muse-glimmer": ("muse_glimmer_text", _mixed(4)),
    "plamo3": ("gguf", _mixed(8, optional=True)),
    "smallthinker": ("gguf", _smallthinker),
    "llama4": ("llama4_text", _llama4),
    **_same("granite_swa step35=step3p5 maple=gguf spark2_5=gguf", _listed),
    "mimo2": ("mimo_v2_flash", _mimo2),
    "deci": ("deci", _deci),
    **_same("deepseek2=deepseek_v3 mistral4", states.latent),
    **_same("minicpm3=gguf plm=gguf", states.expanded),
    **_same("deepseek32=deepseek_v32 glm-dsa=glm_moe_dsa", states.sparse_latent),
    "minimax-m3": ("minimax_m3", _minimax_m3),
    **_same("kimi-linear=kimi_linear kimi-k3=kimi_linear", states.kimi_linear),
    "bailingmoe3": ("bailing_hybrid", states.bailing_hybrid),
    "deepseek4": ("deepseek_v4", states.compressed),
    **_same("qwen3next=qwen3_next qwen35=qwen3_5_text qwen35moe=qwen3_5_moe_text", states.gated_delta),
    "mamba": ("mamba", states.mamba),
    "mamba2": ("mamba2", states.mamba2),
    **_same("jamba plamo2=jamba", states.jamba),
    "granitehybrid": ("granitemoehybrid", states.granite_hybrid),
    "falcon-h1": ("falcon_h1", states.falcon_h1),
    **_same("nemotron_h nemotron_h_moe=nemotron_h", states.nemotron_h),
    **_same("lfm2 lfm2moe=lfm2_moe", states.lfm2),
    **_same("rwkv6 rwkv7=rwkv6", states.rwkv),
    "minimax-01": ("minimax_text_01", states.lightning),
}  # fmt: skip

_WITHOUT_CACHE = frozenset(
    [
        "bert",
        "modern-bert",
        "nomic-bert",
        "nomic-bert-moe",
        "neo-bert",
        "jina-bert-v2",
        "jina-bert-v3",
        "eurobert",
        "gemma-embedding",
        "t5encoder",
        "wavtokenizer-dec",
        "dream",
        "llada",
        "llada-moe",
        "rnd1",
        "clef",
        "clip",
    ]
)
"""Encoders and diffusion models: llama.cpp keeps nothing between their calls."""


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
    if architecture in _WITHOUT_CACHE:
        raise ConfigError(f"{where} is a {architecture} model, which keeps no cache", hint="give a language model")
    known = ARCHITECTURES.get(architecture)
    if known is None:
        raise ConfigError(
            f"{where}: kvctl does not know the GGUF architecture {jsonfile.plain(architecture)[:60]!r} yet",
            hint="size the original model by its name or config.json",
        )
    model_type, read = known
    keys = Keys(metadata, architecture, where)
    return {"model_type": model_type, "gguf_architecture": architecture, **_feed_forward(keys), **read(keys)}


_FEED_FORWARD = {
    "feed_forward_length": "intermediate_size", "vocab_size": "vocab_size", "expert_count": "num_experts",
    "expert_used_count": "num_experts_per_tok", "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_feed_forward_length": "shared_expert_intermediate_size", "expert_shared_count": "n_shared_experts",
    "leading_dense_block_count": "first_k_dense_replace",
}  # fmt: skip


def _feed_forward(keys: Keys) -> Config:
    """Widths that no cache depends on, and compute buffers do; where layers differ, the widest."""
    out: Config = {}
    for key, name in _FEED_FORWARD.items():
        value = keys.get(key)
        if isinstance(value, list):
            value = max((n for n in value if isinstance(n, int)), default=None)
        if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= 2**40:
            out[name] = value
    return out

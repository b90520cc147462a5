"""Model types that no family knows: read only where every layer is certain."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from kvctl.errors import ConfigError, Hint
from kvctl.families.build import Layers, repeat
from kvctl.families.fields import Fields
from kvctl.spec import FullAttention, Layer

# Fields whose meaning is the same in every model, and settings that have none for the cache.
_STANDARD = frozenset(
    [
        "model_type",
        "architectures",
        "auto_map",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "original_max_position_embeddings",
        "model_max_length",
        "max_length",
        "min_length",
        "vocab_size",
        "padded_vocab_size",
        "hidden_act",
        "hidden_activation",
        "activation_function",
        "use_cache",
        "torch_dtype",
        "dtype",
        "pretraining_tp",
        "rotary_dim",
        "rotary_pct",
        "rotary_base",
        "torchscript",
        "use_bfloat16",
        "is_decoder",
        "prefix",
        "num_beams",
        "num_beam_groups",
        "num_return_sequences",
        "num_labels",
        "top_k",
        "do_sample",
        "return_dict",
        "return_dict_in_generate",
        "early_stopping",
        "problem_type",
        "attn_implementation",
        "_attn_implementation",
        "use_flash_attn",
        "flash_attn",
        "gradient_checkpointing",
        "attention_dropout",
        "ep_size",
        "scoring_func",
        "score_function",
        "seq_aux",
        "unsloth_fixed",
        "query_pre_attn_scalar",
        "dim_model_base",
        "mup_denominator",
        "use_mup",
        "lora_r",
        "lora_alpha",
        "trust_remote_code",
        "use_reentrant",
        "is_causal",
        "neftune_noise_alpha",
        "swiglu_limit",
        "swiglu",
        "use_swiglu",
        "is_llama_config",
        "capacity_factor",
        "attention_softmax_in_fp32",
        "use_flash_attention_2",
        "seq_length",
        "max_seq_len",
        "max_seq_length",
        "max_sequence_length",
        "use_dynamic_ntk",
        "use_logn_attn",
        "keys_to_ignore_at_inference",
        "top_p",
        "typical_p",
        "decoder_sparse_step",
        "_commit_hash",
        "_attn_implementation_autoset",
        "_flash_attn_2_enabled",
        "attention_gate",
        "attn_output_gate",
        "use_position_ids",
        "model_name",
        "license",
        "qkv_bias",
        "use_qkv_bias",
        "add_qkv_bias",
        "clip_qkv",
        "pack_qkv",
    ]
)
# Names that say what a key is about, and it is not the cache.
_HARMLESS = re.compile(
    r"norm|bias|dropout|pdrop|token_id|token_index|tokenizer|_per_tok|suppress_tokens|rope|rotary|moe|expert|router|routed|scal(e|ing)|multiplier|_eps$|epsilon|init|loss|"
    r"vocab|embed|^tie_|quant|version|^_?name|label|vision|visual|image|video|audio|mlp|ffn|feed_forward|logit|softcap|"
    r"temperature|penalty|theta|jitter|^(pad|bos|eos|sep)_|seed|activation|gated|residual|parallel|fused|sampl|topk|top_k|"
    r"first_k_dense|n_group|^mm_|use_mm_proj|^img_|patch_size|^slice_|query_num|^(num_)?train_|^transformers_"
)
# Names that hint at something a plain reading would get wrong, whatever else they say.
_HINTS = re.compile(
    r"layer_type|layers_block|block_type|block_config|pattern|window|sliding|chunk|local|global|hybrid|interval|"
    r"lora_rank|latent|(?<![a-z])(?:mla|mqa|gqa)|multi_query|group_num|head_dim|head_size|heads_per|kv_|_kv|key_dim|value_dim|v_head|"
    r"ssm|mamba|d_state|state_size|d_inner|d_conv|conv(?!ert|ers)|recurr|rnn|rwkv|lru|delta|kda|gdn|hgrn|retention|retnet|yoco|cla_|"
    r"linear_att|lightning|linear_num|linear_key|linear_value|share_kv|shared_kv|kv_shared|sharing|num_kv|cross_att|"
    r"encoder_decoder|decoder_layers|encoder_layers|index_|indexer|compress|memory|mem_|sink|(?<![a-z])nsa|moba|sparse_att|"
    r"attention_type|attn_type|attn_(every|layer|period|offset|config)|attention_(layers|every|pattern|config)|"
    r"full_att|self_att|no_rope|nope|loop|recycle|num_pass|early_exit|nextn|mtp|per_layer|(?<!downsample_)(?<!shuffle_)(?<!aspect_)ratio$|cache_|layer_skip|skip_layer|moa_|moe_att|tie_layer|ssd|ut_steps"
)
# Matches of the hints that are certain to be about something else.
_NO_HINT = re.compile(
    r"shared_expert|share_expert|(?<!attention_)expert_|(?<!attention_)_experts?$|^moe_(?!kv|att)|_moe_|"
    r"chunk_size_feed_forward|vision|visual|image|video|audio|^img_|quant|mlp_ratio|dropout|"
    r"^(?!.*(?:kv_|_kv|window|recur|layers|memory))(?=.*(?:embedding|norm|vocab))"
)
_OFF: tuple[Any, ...] = (None, False, 0, "", [], {})
_FULL = {"full", "full_attention", "global", "attention"}
# What a window's own switch turns off with it.
_WINDOW_FIELDS = {"sliding_window", "max_window_layers", "sliding_window_size"}


def doubts(f: Fields) -> list[str]:
    """Keys that are not switched off and not known to leave the cache alone."""
    off = _WINDOW_FIELDS if f.raw.get("use_sliding_window") is False else set()
    return sorted(key for key, value in f.raw.items() if key not in off and not _certain(key, value))


def hinting(raw: Mapping[str, Any]) -> list[str]:
    """Keys, at any depth, that hint at a cache of another kind and are not switched off."""
    off = _WINDOW_FIELDS if raw.get("use_sliding_window") is False else set()
    return sorted(key for key, value in raw.items() if key not in off and _hints(key, value))


def _is_off(value: Any) -> bool:
    if isinstance(value, list) and value and all(isinstance(v, str) and v in _FULL for v in value):
        return True
    return any(value is off or (value == off and type(value) is type(off)) for off in _OFF)


def _hints(key: str, value: Any) -> bool:
    name = key.lower()
    if _is_off(value) or _NO_HINT.search(name):
        return False
    return bool(_HINTS.search(name)) or (isinstance(value, Mapping) and bool(hinting(value)))


def _certain(key: str, value: Any) -> bool:
    name = key.lower()
    if name in _STANDARD or _is_off(value) or (isinstance(value, str) and value in _FULL):
        return True
    if _hints(key, value):
        return False
    # A fraction is no number of heads, layers or tokens.
    return bool(_HARMLESS.search(name)) or (isinstance(value, float) and not value.is_integer())


def read_unknown(f: Fields) -> Layers:
    """Standard attention from standard fields, or a refusal that names what stands in the way."""
    if not f.type:
        raise ConfigError(
            f"{f.path}model_type is missing from the configuration",
            hint=Hint("give it with --set model_type=llama", "size", "profile", otherwise="say it in its config.json"),
        )
    name = f.type[:60]
    doubtful = doubts(f)
    names = f.raw.get("architectures")
    if isinstance(names, list) and names and not str(names[0]).endswith(("ForCausalLM", "LMHeadModel", "Model")):
        doubtful.append(f"architectures {str(names[0])[:40]}")
    if doubtful:
        raise ConfigError(
            f"model type {name!r} is unknown, and these keys may change its cache: {', '.join(doubtful[:8])}"
            + (f" and {len(doubtful) - 8} more" if len(doubtful) > 8 else ""),
            hint=Hint(
                "if it is built like a known type, say so: --set model_type=llama; or size the shape: --layers N --kv-heads N --head-dim N",
                "size",
                "profile",
                otherwise="say it in its config.json",
            ),
        )
    for key in ("num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
        if f.raw.get(key) is None:
            raise ConfigError(
                f"model type {name!r} is unknown, and its configuration has no {key}",
                hint=Hint(
                    f"give it with --set {f.path}{key}=N, or size the shape: --layers N --kv-heads N --head-dim N",
                    "size",
                    "profile",
                    otherwise="say it in its config.json",
                ),
            )
    dim = f.optional_number("head_dim")
    heads = f.number("num_attention_heads")
    if dim is None:
        hidden = f.number("hidden_size")
        if hidden % heads:
            raise ConfigError(
                f"model type {name!r} is unknown, and hidden_size {hidden} is no multiple of its {heads} heads",
                hint=Hint(
                    f"give the width of a head with --set {f.path}head_dim=N",
                    "size",
                    "profile",
                    otherwise="say it in its config.json",
                ),
            )
        dim = hidden // heads
    kv = f.number("num_key_value_heads")
    if heads % kv:
        raise ConfigError(f"model type {name!r} is unknown, and {heads} query heads do not share {kv} KV heads evenly")
    return repeat(f.layers(), Layer((FullAttention(kv, dim, dim),)))

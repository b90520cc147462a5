"""Write kvctl/data/catalogue.jsonl, the bundled models, from a file of collected configurations.

    PYTHONPATH=. python scripts/build_catalogue.py MODELS.jsonl

MODELS.jsonl has one object a line: repo_id, config, source, verbatim, and where known
params_total, params_active, notes, derived_fields, kv_incomplete. Every row is read by
kvctl's own families. What a row that is no whole config.json leaves out is no class
default: such a row is kept only where `ACCEPTED` says why each default it rests on is
right, or where `FIXES` puts the value in; else it stays as `incomplete`, with the reason.
"""

from __future__ import annotations

import json
import re
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from kvctl.errors import KvctlError
from kvctl.families import find_reader, read_layers, text_fields
from kvctl.families.fields import Fields
from kvctl.model import _LENGTHS as LENGTHS
from kvctl.model import build_spec
from kvctl.sources import Found
from kvctl.spec import ChunkedAttention, FullAttention, LatentAttention, Layer, ModelSpec, Provenance, SlidingWindow

OUT = Path(__file__).parent.parent / "kvctl" / "data" / "catalogue.jsonl"

# Keys without bearing on memory, at any depth. A key that is not named here is kept.
DROP = re.compile(
    r"_token|token_id|tokens_|^(bos|eos|pad|eod|im)_|_id$|_ids$|_idx$|dropout|pdrop|_act$|act_fn|activation|"
    r"initializ|_std$|_eps$|epsilon|^rope_|_rope_|rope_theta|rope_param|^rotary_(?!dim)|theta|yarn|original_rope|original_max_pos|"
    r"bias$|add_\w*bias|vision|audio|image|video|pixel|vit_|patch|projector|mm_|vae|anyres|tile|"
    r"auto_map|transformers|^_|router|routed_scal|scoring|topk_(group|method)|^n_group$|norm_topk|aux_|seq_aux|loss|"
    r"layernorm|layer_norm|rms_?norm|norm_(type|eps|head|softmax)|qk_norm|postnorm|residual|softcap|scal(e|ing)|multiplier|"
    r"mask_|_prob$|spec_augment|layerdrop|suppress|begin_|forced_|beam|length_penalty|temperature|top_[kp]$|typical_p|"
    r"repeat|repetition|diversity|do_sample|early_stopping|return_dict|output_(att|hid|sco|rout|log)|label|problem_type|"
    r"pruned|torchscript|tf_legacy|tie_encoder|use_bfloat16|num_return|min_length|^max_length|prefix$|bad_words|"
    r"exponential_decay|remove_invalid|finetuning|task_specific|summary|chunk_size_feed|init_|jitter|"
    r"use_cache|cache_implementation|pretraining|sequence_parallel|selective_check|gradient|attn_impl|flash|fused|"
    r"time_step|hc_|mtp|nextn|swiglu|limit|gating|glu_|_bottleneck|tokenizer|template|select_layer|"
    r"draft_|default_|checkpoint|_bytes_per_element|config_max|^(full|sliding|linear)_attention_layers$|"
    r"layer_type_counts|formula|mlp_layer_types|moe_layers_enum|"
    r"ignore_|verbose|sub_configs|base_config|language_model_only|gen_config|is_llama|component_policy|ep_size|"
    r"noise|dspark|markov|candidate|global_view|alpha$|beta$|interpolat|class_num|num_media|pool_type|"
    r"drop_tokens|dense_list|moe_(latent|random|apply|shared_expert_overlap|norm)|rescale|use_mamba_kernels|conv_bias|proj_bias|"
    r"embedding_fraction|expansion_ratio|learned_pos|clip_qkv|interleave|xdrope|position_embedding|"
    r"architectures|^tie_|xavier|auto_adjust|multiple_of|use_(thumbnail|backbone|llm_lora|dynamic|logn|pos_enc|weighted|moe|mixed)|"
    r"add_class|att_impl|score_func|softmax_in|for_llm|lm_head|rm_head|median_filter|mel_bins|ps_version|logits_to_keep|"
    r"gate_lower|_gate$|use_grouped|norm_expert|renorm|enable_moe|qk_ln|logits_soft|query_pre_attn|downsample|runner_|"
    r"gemma_norm|parallel_attn|use_parallel|use_rotary|partial_rot|mrope|hidden_act|w_init|precision|model_version"
)
# Kept although DROP names something like it.
NEEDED = {
    "cross_attention_layers", "use_bidirectional_attention", "num_media_layers", "max_position_embeddings",
    "qk_rope_head_dim", "no_rope_layers", "no_rope_layer_interval", "n_positions", "max_source_positions",
    "max_target_positions", "linear_conv_kernel_dim", "mamba_ssm_cache_dtype",
    "index_skip_topk_offset", "local_layer_ids", "full_attn_idxs", "num_nextn_predict_layers", "mtp_num_hidden_layers",
    # Beside the cache: what else there are parameters for.
    "tie_word_embeddings", "attention_bias", "attention_out_bias", "mlp_bias", "qkv_bias", "use_bias", "use_qkv_bias",
    "bias", "lm_head_bias", "use_qk_norm", "qk_layernorm", "use_parallel_residual", "mlp_layer_types", "norm_position",
    "use_conv_bias", "mamba_proj_bias", "mamba_conv_bias", "conv_bias", "mlp_only_layers", "moe_latent_size",
}  # fmt: skip

# Long names of sources, as the catalogue writes them.
SOURCES = (
    (
        re.compile(r"package:llmfit==([\d.]+): model table embedded in the binary \(rows scraped from the hub\)"),
        r"llmfit \1, model table",
    ),
    (
        re.compile(r"package:aiconfigurator-core==([\d.]+):aiconfigurator_core/model_configs/"),
        r"aiconfigurator-core \1: ",
    ),
    (re.compile(r"package:([\w-]+)==([\d.]+):(?:transformers/models/\w+/)?"), r"\1 \2: "),
)

Config = dict[str, Any]
# Of quantization_config: how the weights are packed, and the cache's format that the checkpoint has scales for.
QUANTIZATION = (
    "quant_method", "quant_algo", "bits", "format", "kv_cache_scheme", "kv_cache_quant_algo", "weight_block_size",
    "activation_scheme", "group_size", "zero_point", "version", "desc_act", "dynamic", "modules_to_not_convert", "ignore",
    "exclude_modules", "config_groups", "load_in_4bit", "load_in_8bit", "bnb_4bit_use_double_quant",
    "llm_int8_skip_modules",
)  # fmt: skip
# Models whose vision tower's parameters are counted, and what they are counted from.
TOWERS = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe", "gemma3")
VISION = (
    "model_type", "hidden_size", "intermediate_size", "depth", "patch_size", "temporal_patch_size", "in_channels",
    "out_hidden_size", "spatial_merge_size", "num_position_embeddings", "deepstack_visual_indexes", "num_hidden_layers",
    "num_channels", "image_size", "embed_dim", "mlp_ratio", "in_chans",
)  # fmt: skip


class Fix(NamedTuple):
    """Values put into a row (None: null), keys taken out of it, and why both are certain."""

    why: str
    put: Mapping[str, Any]
    drop: tuple[str, ...] = ()


# -- what rows leave out, and is certain -----------------------------------------------------

_BLOOM = "hidden size from the exact parameter count (250,880 × h + 12 × layers × h² + …); length from the model card"
_LLAMA = "a LLaMA by name and shape"
_LLAMA2 = "maximum length of Llama 2; the copy is of an early upload"
_NEOX = "a GPT-NeoX by name and shape"
_WINDOWLESS = "LitGPT gives the window of each Mistral model that has one, and none here"
_FALCON_H1 = "one group and a kernel of 4: with them the parameter count is exact, at a whole MLP width"
_NEMOTRON = "eight groups and a kernel of 4: with them the parameter count is exact"
_T5 = "width of a head from the T5 paper (64; 128 for 3B and 11B)"
_FLAN = "width of a head of the T5 1.1 family (64)"
_GEMMA4 = "full layers' shape and the pattern as in the file of the pre-trained model of the same size"
_FROM_V01 = "window as in Mistral-7B-v0.1, from which it was tuned"
_SSM = (
    "recurrent states in float32, as every whole file of this type has it; start-up logs of vLLM that were published for "
    "this size or shape show it"
)
_KPOOL = (
    "the checkpoint's own pool and prediction module, not the class's defaults: vllm-project/vllm#57261 prints blocks of "
    "12 x (1,152 x 1,024 + 288 x 132) bytes with MTP"
)
_SMALL = "no window, as in Mistral-Small-24B-Instruct-2501, of whose line it is"


def _typed(model_type: str, why: str, **put: Any) -> Fix:
    return Fix(f"model_type {model_type}: {why}", {"model_type": model_type, **put})


def _bloom(hidden: int) -> Fix:
    return _typed("bloom", _BLOOM, hidden_size=hidden, seq_length=2048)


def _t5(d_kv: int, why: str) -> Fix:
    # "T5WithLMHeadModel" is an old name of the whole encoder-decoder, not of a decoder alone.
    return Fix(f"model_type t5: {why}", {"model_type": "t5", "d_kv": d_kv}, ("architectures",))


FIXES: dict[str, Fix] = {
    "allenai/OLMoE-1B-7B-0924": Fix(
        "experts of 1,024: with them the parameter count is exact; with the class's 2,048 it is not",
        {"intermediate_size": 1024}),
    "bigscience/bloom": _bloom(14336),
    "bigscience/bloom-1b1": _bloom(1536),
    "bigscience/bloom-3b": _bloom(2560),
    "bigscience/bloom-560m": _bloom(1024),
    "bigscience/bloom-7b1": _bloom(4096),
    "bigscience/bloomz": _bloom(14336),
    "bigscience/bloomz-7b1": _bloom(4096),
    "codellama/CodeLlama-70b-hf": _typed("llama", _LLAMA),
    "databricks/dbrx-instruct": Fix(
        "the source is a test file of another shape; published are 40 layers and 8 KV heads, as the 132B parameters prove",
        {"n_layers": 40, "attn_config.kv_n_heads": 8},
    ),
    "databricks/dolly-v2-12b": _typed("gpt_neox", "tuned from pythia-12b"),
    "deepseek-ai/DeepSeek-OCR": Fix(
        "the language model nested and without a latent, as in deepseek-vl2-tiny, whose shape it has",
        {"language_config.model_type": "deepseek_v2", "language_config.kv_lora_rank": None,
         "language_config.num_hidden_layers": 12, "language_config.hidden_size": 1280,
         "language_config.num_attention_heads": 10, "language_config.num_key_value_heads": 10,
         "language_config.max_position_embeddings": 8192},
        ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
         "max_position_embeddings")),
    "EleutherAI/pythia-14m": _typed("gpt_neox", _NEOX),
    "EleutherAI/pythia-70m": _typed("gpt_neox", _NEOX),
    "google-t5/t5-11b": _t5(128, _T5),
    "google-t5/t5-3b": _t5(128, _T5),
    "google-t5/t5-base": _t5(64, _T5),
    "google-t5/t5-large": _t5(64, _T5),
    "google-t5/t5-small": _t5(64, _T5),
    "google/flan-t5-base": _t5(64, _FLAN),
    "google/flan-t5-large": _t5(64, _FLAN),
    "google/flan-t5-small": _t5(64, _FLAN),
    "google/flan-t5-xl": _t5(64, _FLAN),
    "google/flan-t5-xxl": _t5(64, _FLAN),
    "google/gemma-2-9b-it": Fix("dtype of the tuned model, from its model card", {"torch_dtype": "bfloat16"}),
    "google/recurrentgemma-2b": Fix(
        "one KV head: with it the parameter count is exact (2,682,862,080); with one a query head it is not",
        {"num_key_value_heads": 1, "head_dim": 256}),
    "hpcai-tech/grok-1": _typed("grok-1", "by name; the shape is that of xAI's own code"),
    "HuggingFaceH4/zephyr-7b-beta": Fix(_FROM_V01, {"sliding_window": 4096}),
    "ibm-granite/granite-4.0-h-micro": Fix(
        "tied embeddings: with them the parameter count is exact", {"tie_word_embeddings": True}),
    "ibm-granite/granite-4.0-h-small": Fix(
        "128 heads of 64 in one group: with them the parameter count is exact; attention at the places of "
        "granite-4.0-h-micro, which has as many layers of each kind",
        {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1,
         "layer_types": ["attention" if i % 10 == 5 else "mamba" for i in range(40)]}),
    "keeeeenw/MicroLlama": _typed("llama", _LLAMA),
    "lmsys/vicuna-13b-v1.5": _typed("llama", "tuned from Llama 2 13B, which is multi-head", num_key_value_heads=40),
    "lmsys/vicuna-7b-v1.5": _typed("llama", "tuned from Llama 2 7B, which is multi-head", num_key_value_heads=32),
    "meta-llama/Llama-2-13b-hf": Fix(_LLAMA2, {"max_position_embeddings": 4096}),
    "meta-llama/Llama-2-13b-chat-hf": Fix(_LLAMA2, {"max_position_embeddings": 4096}),
    "microsoft/Phi-4-mini-reasoning": _typed("phi3", "the source altered it"),
    "microsoft/Phi-4-reasoning": Fix(
        "no window, as in microsoft/phi-4, from which it was tuned", {"sliding_window": None}),
    "MiniMaxAI/MiniMax-M3": _typed("minimax_m3_vl_text", "the language model's fields, flat in the source"),
    "mistral-community/pixtral-12b": Fix(
        "no window: its decoder is Mistral Nemo", {"text_config.sliding_window": None}),
    "mistralai/Devstral-Small-2505": Fix(_SMALL, {"sliding_window": None}),
    "mistralai/mathstral-7B-v0.1": _typed("mistral", _WINDOWLESS, sliding_window=None),
    "mistralai/Ministral-3-3B-Instruct-2512": _typed("mistral3", "the source renamed the wrapper"),
    "mistralai/Mistral-7B-Instruct-v0.1": Fix("window as in Mistral-7B-v0.1", {"sliding_window": 4096}),
    "mistralai/Mistral-7B-v0.1": Fix(
        "window from the class default, which mirrors this checkpoint; the source took the key out",
        {"sliding_window": 4096}),
    "mistralai/Mistral-7B-v0.3": _typed("mistral", _WINDOWLESS, sliding_window=None),
    "mistralai/Mistral-Large-Instruct-2407": _typed("mistral", _WINDOWLESS, sliding_window=None),
    "mistralai/Mistral-Large-Instruct-2411": _typed("mistral", _WINDOWLESS, sliding_window=None),
    "mistralai/Mistral-Small-3.1-24B-Instruct-2503": Fix(_SMALL, {"sliding_window": None}),
    "mistralai/Mixtral-8x22B-Instruct-v0.1": Fix("no window, as in Mixtral-8x22B-v0.1", {"sliding_window": None}),
    "nvidia/Nemotron-H-4B-Base-8K": Fix(
        _NEMOTRON + ", and so with the width of a head that NVIDIA's class gives (128)",
        {"n_groups": 8, "conv_kernel": 4, "mamba_head_dim": 64, "head_dim": 128}),
    "nvidia/NVIDIA-Nemotron-Nano-9B-v2": Fix(_NEMOTRON, {"n_groups": 8, "conv_kernel": 4}),
    "openai-community/gpt2-large": _typed("gpt2", "by name and keys", n_positions=1024),
    "openai-community/gpt2-xl": _typed("gpt2", "by name and keys", n_positions=1024),
    "OpenGVLab/InternVL2_5-1B": Fix(
        "dtype of the published checkpoint; the copy was saved in float32",
        {"torch_dtype": "bfloat16", "llm_config.torch_dtype": "bfloat16"}),
    "openlm-research/open_llama_13b": _typed("llama", _LLAMA),
    "openlm-research/open_llama_3b": _typed("llama", _LLAMA),
    "openlm-research/open_llama_7b": _typed("llama", _LLAMA),
    "Qwen/Qwen2.5-Coder-0.5B": _typed("qwen2", "by name and shape"),
    "Qwen/Qwen2.5-Coder-1.5B": _typed("qwen2", "by name and shape"),
    "Qwen/Qwen2.5-Coder-3B": _typed("qwen2", "by name and shape"),
    "zai-org/GLM-5.3-Flash": Fix(_KPOOL, {"index_kpool": 4, "num_nextn_predict_layers": 1}),
    "Qwen/Qwen3.5-0.8B": Fix(_SSM, {"mamba_ssm_dtype": "float32"}),
    "Qwen/Qwen3.5-2B": Fix(_SSM, {"mamba_ssm_dtype": "float32"}),
    "Qwen/Qwen3.5-35B-A3B-Base": Fix(_SSM, {"mamba_ssm_dtype": "float32"}),
    "Qwen/Qwen3.5-4B": Fix(_SSM, {"mamba_ssm_dtype": "float32"}),
    "Qwen/Qwen3.6-27B": Fix(_SSM, {"mamba_ssm_dtype": "float32"}),
    "rednote-hilab/dots.llm1.base": Fix(
        "hidden size 4096, heads of 128, 128 experts of which 6 are chosen and 2 shared, a first layer without (dots.llm1 report): "
        "with them the parameter count is exact; with the class's 4608 and no experts it is not",
        {"hidden_size": 4096, "head_dim": 128, "sliding_window": None, "n_routed_experts": 128, "n_shared_experts": 2,
         "num_experts_per_tok": 6, "first_k_dense_replace": 1}),
    "stabilityai/FreeWilly2": _typed("llama", "tuned from Llama 2 70B"),
    "stabilityai/stablelm-base-alpha-7b": _typed("gpt_neox", _NEOX),
    "swiss-ai/Apertus-8B-Instruct-2509": Fix(
        "8 KV heads and an MLP of 21,504 (Apertus report): with them the parameter count is exact; "
        "with the class's it is not",
        {"num_key_value_heads": 8, "intermediate_size": 21504}),
    "teknium/OpenHermes-2.5-Mistral-7B": Fix(_FROM_V01, {"sliding_window": 4096}),
    "tiiuae/falcon-180B": Fix(
        "8 KV heads are the new decoder architecture", {"num_kv_heads": 8, "new_decoder_architecture": True},
        ("num_key_value_heads",)),
    "tiiuae/falcon-40b": Fix("maximum length from the model card", {"max_position_embeddings": 2048}),
    "tiiuae/falcon-7b": Fix("maximum length from the model card", {"max_position_embeddings": 2048}),
    "tiiuae/Falcon-H1-0.5B-Instruct": Fix(_FALCON_H1, {"mamba_n_groups": 1, "mamba_d_conv": 4}),
    "tiiuae/Falcon-H1-1.5B-Deep-Instruct": Fix(_FALCON_H1, {"mamba_n_groups": 1, "mamba_d_conv": 4}),
    "tiiuae/Falcon-H1-1.5B-Instruct": Fix(_FALCON_H1, {"mamba_n_groups": 1, "mamba_d_conv": 4}),
    "tiiuae/Falcon-H1-3B-Instruct": Fix(_FALCON_H1, {"mamba_n_groups": 1, "mamba_d_conv": 4}),
    "togethercomputer/GPT-NeoXT-Chat-Base-20B": _typed("gpt_neox", _NEOX),
    "togethercomputer/LLaMA-2-7B-32K": Fix(
        "model_type llama: a LLaMA by name and shape; length unknown: 32K by name, 4,096 in the source",
        {"model_type": "llama", "max_position_embeddings": None}),
    "WizardLM/WizardCoder-15B-V1.0": _typed(
        "gpt_bigcode", "tuned from StarCoder, which is multi-query", multi_query=True),
    "xai-org/grok-2": _typed("grok-1", "its class is Grok1ForCausalLM"),
}  # fmt: skip

# Rows whose file leaves out what the row of the same architecture has: row → (row to copy from, keys).
_GEMMA4_KEYS = ("layer_types", "global_head_dim", "num_global_key_value_heads", "attention_k_eq_v")
COPIES: dict[str, str] = {
    "google/gemma-4-26B-A4B-it": "google/gemma-4-26B-A4B",
    "google/gemma-4-31B-it": "google/gemma-4-31B",
    "google/gemma-4-E2B-it": "google/gemma-4-E2B",
    "google/gemma-4-E4B-it": "google/gemma-4-E4B",
}

# -- what rows leave out, and is not certain --------------------------------------------------

_WINDOW = "sliding_window is not in the source"
INCOMPLETE: dict[str, str] = {
    "bigcode/starcoder2-15b": _WINDOW,
    "bigcode/starcoder2-3b": _WINDOW,
    "CohereLabs/North-Mini-Code-1.0": "sliding window and layer pattern are not in the source",
    "deepseek-ai/DeepSeek-V4-Pro-0813": "head widths, window and compress_ratios are not in the source",
    "deepseek-ai/DeepSeek-V4.1-Flash": "everything but the number of layers and heads is missing from the source",
    "google/diffusiongemma-26B-A4B-it": "window, layer pattern and the full layers' shape are not in the source",
    "JetBrains/Mellum2-12B-A2.5B-Base": "layer_types are not in the source, and some layers are windowed",
    "microsoft/Phi-3-medium-128k-instruct": _WINDOW,
    "microsoft/Phi-3-medium-4k-instruct": _WINDOW,
    "microsoft/Phi-3-mini-4k-instruct": _WINDOW,
    "microsoft/Phi-4-mini-flash-reasoning": "Mamba states, window and which layers share a cache are not in the source",
    "microsoft/Phi-4-multimodal-instruct": _WINDOW,
    "mistralai/Ministral-8B-Instruct-2410": "sliding window and layer pattern are not in the source",
    "mistralai/Mistral-Medium-3.5-128B": _WINDOW,
    "moonshotai/Kimi-VL-A3B-Instruct": "MLA ranks are not in the source",
    "Motif-Technologies/Motif-2-12.7B-Instruct": "the settings of its differential attention are not in the source",
    "openbmb/MiniCPM4.1-8B": "the settings of its sparse attention are not in the source",
    "Qwen/Qwen3-Omni-30B-A3B-Instruct": "KV heads and the width of a head are not in the source",
    "ServiceNow-AI/Apriel-1.6-15b-Thinker": _WINDOW,
    "skt/A.X-K2": "MLA ranks and the indexer's width are not in the source",
    "tencent/Hy4-preview": "MLA ranks, the indexer's width and layers are not in the source",
    "upstage/Solar-Open2-250B": "only a shape is in the source, and the architecture is not known",
    "XiaomiMiMo/MiMo-V2.5-Pro": "which 10 of its 70 layers are not windowed is not in the source",
    "Zyphra/ZAYA1-base": "layer kinds and convolution lengths are not in the source",
    "Zyphra/Zamba2-2.7B": "which layers have attention, and the Mamba heads, are not in the source",
}

# Rows of class defaults whose maximum length is known to be that of the checkpoint; for others it stays unknown.
LENGTH_HOLDS = {
    "allenai/OLMo-7B-hf", "allenai/OLMoE-1B-7B-0924", "baidu/ERNIE-4.5-0.3B-PT", "baidu/ERNIE-4.5-21B-A3B-PT",
    "ByteDance-Seed/Seed-OSS-36B-Instruct", "google/gemma-3n-E4B-it", "internlm/internlm3-8b-instruct",
    "meituan-longcat/LongCat-Flash-Chat", "moonshotai/Kimi-Linear-48B-A3B-Instruct",
    "swiss-ai/Apertus-8B-Instruct-2509",
    "upstage/Solar-Open-100B",
}  # fmt: skip


class Accept(NamedTuple):
    """Fields that rows of some model types may leave out, and why nothing hangs on it."""

    types: str
    fields: str
    why: str


_OTHER_FIELDS = "layers_block_type per_layer_config"
_PATTERN_FIELDS = "layer_types " + _OTHER_FIELDS
_WINDOW_FIELDS = "sliding_window attention_chunk_size " + _PATTERN_FIELDS

ACCEPTED: tuple[Accept, ...] = (
    Accept("apertus arcee arctic bailing_moe bitnet cohere ernie4_5 ernie4_5_moe ernie4_5_moe_vl gemma glm4 glm4_moe "
           "glm4v_moe_text glm4v_text granite granitemoe grok-1 hunyuan_v1_dense hy_v3 internlm2 internlm3 iquestcoder "
           "llada2_moe llama mimo minicpm minimax_m2 nemotron olmo olmo2 olmoe phi qwen3_vl_moe_text qwen3_vl_text "
           "sarvam_moe seed_oss solar_open stablelm", _WINDOW_FIELDS, "full attention in every layer, by architecture"),
    Accept("axk1 deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 mistral4 sarvam_mla telechat3", _PATTERN_FIELDS,
           "a latent in every layer, by architecture"),
    Accept("mistral mixtral phi3", "attention_chunk_size " + _PATTERN_FIELDS, "layers alike; the row has the window"),
    Accept("qwen2 qwen2_moe qwen2_vl_text qwen2_5_vl_text qwen3 qwen3_moe", "use_sliding_window attention_chunk_size "
           + _PATTERN_FIELDS, "the window is off in every published file of these types; then all layers are full"),
    Accept("cohere2", "sliding_window_pattern " + _PATTERN_FIELDS, "every 4th layer is full; the row's counts agree"),
    Accept("gemma2", _PATTERN_FIELDS, "every 2nd layer is full, by architecture"),
    Accept("gemma3_text", "use_bidirectional_attention " + _PATTERN_FIELDS, "a decoder; the row has the pattern"),
    Accept("gemma4_text", "use_bidirectional_attention", "a decoder"),
    Accept("afmoe dots1 gemma3n_text gpt_oss granitemoehybrid jamba kimi_linear laguna lfm2 lfm2_moe minimax_m1 "
           "minimax_text_01 olmo3 smollm3 step3p5", _OTHER_FIELDS, "the row has the pattern, or the window is off"),
    Accept("deepseek_v4 deepseek_ref", "compress_rates compressed_sparse_attention heavily_compressed_attention "
           "compress_rate_csa compress_rate_hca " + _PATTERN_FIELDS, "the row has compress_ratios"),
    Accept("glm5_next_text", "head_dim index_skip_topk_offset index_topk_freq index_topk_pattern linear_attn_config "
           "num_heads short_conv_kernel_size " + _OTHER_FIELDS, "other spellings; the row has the class's own"),
    Accept("inkling_text", "local_layer_ids " + _PATTERN_FIELDS, "every 6th layer is full; the row's counts agree"),
    Accept("mimo_v2", "hybrid_layer_pattern " + _PATTERN_FIELDS, "the first and every 6th layer are full;"
           " the row's counts agree"),
    Accept("minimax_m3_vl_text", _PATTERN_FIELDS, "the row lists the sparse layers"),
    Accept("nemotron_h", "mamba_d_conv mamba_n_groups " + _OTHER_FIELDS, "other spellings of what the row has"),
    Accept("nemotron_h", "mamba_ssm_cache_dtype", "float32 in the reference implementation"),
    Accept("qwen3_next qwen3_5_text qwen3_5_moe_text", "full_attention_interval " + _PATTERN_FIELDS,
           "every 4th layer has attention, by architecture; where the row has counts they agree"),
    Accept("mamba", "intermediate_size", "expand × hidden_size"),
    Accept("mpt", "attn_config attn_type", "multi-head, says the model card"),
    Accept("hunyuan hunyuan_image_3_moe", "use_cla use_mla", "off, as in the file of Hunyuan-A13B"),
    Accept("qwen3_next qwen3_5_text qwen3_5_moe_text olmo_hybrid", "mamba_ssm_dtype", "float32, as the reference keeps it"),
    Accept("longcat_flash", "num_hidden_layers", "another name of twice num_layers, which the row has"),
    Accept("bloom falcon", "n_embed", "an old spelling of hidden_size, which the row has"),
    Accept("gpt2", "add_cross_attention", "a decoder alone"),
    Accept("t5", "num_decoder_layers architectures is_encoder_decoder", "two stacks of equal depth"),
    Accept("qwen", "kv_channels", "the row has head_dim"),
    Accept("ernie4_5_moe granitemoehybrid jamba lfm2 lfm2_moe llama nemotron-nas olmo "
           "olmo3 olmoe phi phi3 qwen2 qwen2_moe smollm3 apertus", "head_dim", "hidden size over heads, in these"),
)  # fmt: skip
_ACCEPTED = {(kind, field) for accept in ACCEPTED for kind in accept.types.split() for field in accept.fields.split()}

# -- weights -----------------------------------------------------------------------------------

_QUANTISED_NAME = re.compile(r"fp8|nvfp4|4bit|int4|awq|gptq", re.IGNORECASE)
# Published quantised: a row that is no whole file may have lost its quantization_config.
_QUANTISED_TYPES = {"deepseek_v3", "deepseek_v4", "deepseek_ref", "kimi_k2", "kimi_k25", "minimax_m2",
                    "minimax_m3_vl_text", "mimo_v2", "gpt_oss", "telechat3", "laguna", "step3p7"}  # fmt: skip
# Parameter counts in the source that the model's own shape contradicts.
WRONG_PARAMETERS = {
    "deepseek-ai/deepseek-llm-7b-chat", "deepseek-ai/deepseek-llm-67b-base", "openlm-research/open_llama_7b",
    "baichuan-inc/Baichuan-7B", "baichuan-inc/Baichuan2-7B-Chat", "baichuan-inc/Baichuan2-13B-Chat",
    "internlm/internlm-chat-7b", "internlm/internlm2-20b", "nvidia/NVIDIA-Nemotron-Nano-12B-v2",
    "RWKV/rwkv-5-world-3b",
}  # fmt: skip

KNOWN_WEIGHTS = {
    "deepseek-ai/DeepSeek-V3": [
        round(641.3 * 2**30),
        "catalogue: estimate, 641.3 GiB (fp8, block scales, embeddings in bf16)",
    ],
}

# -- shapes that articles use, of models that nobody published ------------------------------------

_NOBODY = "no model {} is published: this is a reference shape, {}; nearest published models: {}"
_SHAPED = {
    "Qwen2.5-72B": (29_568, 152_064),
    "Qwen1.5-7B": (11_008, 151_936),
    "LLaMA-65B": (22_016, 32_000),
}
"""Feed-forward width and vocabulary of published models with just such layers: articles say nothing of them."""


def _reference(name: str, layers: int, heads: int, kv_heads: int, near: str, like: str) -> Config:
    shape = f"{layers} layers × {kv_heads} KV heads × 128, else like {like}"
    width, vocabulary = _SHAPED[like]
    return {
        "id": name,
        "reference": True,
        "verbatim": True,
        "source": "reference shape of articles on KV cache sizes",
        "notes": [_NOBODY.format(name, shape, near)],
        "config": {
            "model_type": "llama", "num_hidden_layers": layers, "hidden_size": heads * 128, "head_dim": 128,
            "num_attention_heads": heads, "num_key_value_heads": kv_heads, "torch_dtype": "bfloat16",
            "max_position_embeddings": None, "intermediate_size": width, "vocab_size": vocabulary,
            "tie_word_embeddings": False,
        },
    }  # fmt: skip


REFERENCES = (
    _reference(
        "Llama-4-70B",
        80,
        64,
        64,
        "meta-llama/Llama-3.3-70B-Instruct, meta-llama/Llama-4-Scout-17B-16E-Instruct",
        "LLaMA-65B",
    ),
    _reference(
        "Qwen3-72B", 80, 64, 8, "Qwen/Qwen2.5-72B-Instruct, Qwen/Qwen3-32B, Qwen/Qwen3-235B-A22B", "Qwen2.5-72B"
    ),
    _reference("Qwen3-7B", 32, 32, 32, "Qwen/Qwen3-8B, Qwen/Qwen2.5-7B-Instruct, Qwen/Qwen3-4B", "Qwen1.5-7B"),
    _reference(
        "Qwen3.5-72B", 80, 64, 8, "Qwen/Qwen2.5-72B-Instruct, Qwen/Qwen3.5-27B, Qwen/Qwen3.5-122B-A10B", "Qwen2.5-72B"
    ),
)

# -- building ------------------------------------------------------------------------------------


def slim(config: Mapping[str, Any]) -> Config:
    """The keys with bearing on memory, at every depth."""
    out: Config = {}
    for key, value in config.items():
        if key == "quantization_config" and isinstance(value, dict):
            out[key] = {k: v for k, v in value.items() if k in QUANTIZATION and v is not None}
        elif key == "block_configs":
            out[key] = [
                {"attention": {k: v for k, v in block["attention"].items() if k in _BLOCK and v}} for block in value
            ]
        elif key == "vision_config" and config.get("model_type") in TOWERS and isinstance(value, dict):
            out[key] = {k: v for k, v in value.items() if k in VISION}
        elif key in NEEDED or not DROP.search(key):
            out[key] = slim(value) if isinstance(value, dict) else value
    return out


_BLOCK = ("n_heads_in_group", "no_op", "replace_with_linear", "window_length", "num_sink_tokens", "sparsify")


def without_rules(name: str, config: Config) -> Config:
    """Leave out the lists that only spell out what the class's own rule comes to."""
    for key in ("layer_types", "layers_block_type", "indexer_types", "no_rope_layers"):
        for path in (key, "text_config." + key):
            parent, _, last = path.rpartition(".")
            part = config.get(parent) if parent else config
            if isinstance(part, dict) and part.get(last):
                shorter = json.loads(json.dumps(config))
                del (shorter[parent] if parent else shorter)[last]
                if same(name, config, shorter):
                    config = shorter
    return config


def put(config: Config, path: str, value: Any) -> None:
    """Set a key, dotted for nested ones."""
    *parents, last = path.split(".")
    for parent in parents:
        config = config.setdefault(parent, {})
    config[last] = value


def fixed(row: Config, rows: Mapping[str, Config]) -> tuple[Config, list[str]]:
    """A row's configuration with what is certain put in, and the reasons."""
    name, config, why = row["repo_id"], json.loads(json.dumps(row["config"])), list(row.get("derived_fields") or ())
    fix = FIXES.get(name)
    if fix is not None:
        for path, value in fix.put.items():
            put(config, path, value)
        for key in fix.drop:
            config.pop(key, None)
        why.append(fix.why)
    if name in COPIES:
        model = rows[COPIES[name]]["config"]["text_config"]
        for key in _GEMMA4_KEYS:
            config["text_config"][key] = model[key]
        why.append(f"{_GEMMA4}, {COPIES[name]}")
    return config, why


def reason_against(row: Config, config: Config) -> str | None:
    """Why a row cannot stand: what it leaves out, or what contradicts it."""
    name = row["repo_id"]
    if name in INCOMPLETE:
        return INCOMPLETE[name]
    if row.get("kv_incomplete"):
        return str(row["kv_incomplete"])
    root = Fields(config)
    text = text_fields(root)
    if (
        find_reader(root.type) is not None
        and isinstance(config.get("text_config"), dict)
        and "num_hidden_layers" in config["text_config"]
    ):
        raise SystemExit(f"{name}: {root.type} is read flat, and there is a text_config")
    try:
        layers = read_layers(root)
    except KvctlError as err:
        return f"kvctl does not read it: {err.message}"
    if is_whole(row):
        return None
    if find_reader(text.type) is None:
        return f"only a shape is in the source, and the architecture {text.type} is not known"
    missing = sorted(
        {path.rpartition(".")[2] for path, origin in root.read.items() if origin != "config"}
        - {field for kind, field in _ACCEPTED if kind == text.type}
    )
    if missing:
        return f"not in the source: {', '.join(missing)}"
    return against_counts(config, layers)


def against_counts(config: Config, layers: tuple[Layer, ...]) -> str | None:
    """Some sources count layers of each kind: the rule of the class must come to the same."""
    kinds: Counter[str] = Counter()
    for layer in layers:
        windowed = any(isinstance(state, SlidingWindow | ChunkedAttention) for state in layer.states)
        full = any(isinstance(state, FullAttention | LatentAttention) for state in layer.states)
        kinds["sliding" if windowed else "full" if full else "linear"] += 1
    for kind in ("full", "sliding", "linear"):
        count = config.get(f"{kind}_attention_layers")
        if isinstance(count, int) and count != kinds[kind]:
            return f"the class's pattern has {kinds[kind]} layers of {kind} attention, the source counts {count}"
    return None


def is_whole(row: Config) -> bool:
    """True where the configuration is the model's own file, with nothing but the defaults left out."""
    return bool(row["verbatim"]) and row["repo_id"] not in COPIES


def unknown_lengths(row: Config, config: Config) -> None:
    """Put null where a maximum length would be a class default that nothing vouches for."""
    from_class = "class defaults" in row.get("notes", "")
    if is_whole(row) or row["repo_id"] in LENGTH_HOLDS:
        return
    text = text_fields(Fields(config))
    for length in LENGTHS:
        if text.get(length) is not None and (
            from_class or text.read[text.path + text.stored_name(length)] == "default"
        ):
            put(config, text.path + length, None)


def weight_dtype(row: Config, config: Config) -> str | None:
    """The dtype of the weights, where the checkpoint is not quantised."""
    if (
        "quantization_config" in json.dumps(config)
        or "expert_dtype" in config
        or _QUANTISED_NAME.search(row["repo_id"])
    ):
        return None
    if not row["verbatim"] and config.get("model_type") in _QUANTISED_TYPES:
        return None
    dtype = spec_of(row["repo_id"], config).dtype
    return None if dtype is None else dtype.name


def entry(row: Config, rows: Mapping[str, Config]) -> Config:
    """One line of the catalogue."""
    name = row["repo_id"]
    config, why = fixed(row, rows)
    source = row["source"]
    for long, short in SOURCES:
        source = long.sub(short, source)
    if name in WRONG_PARAMETERS:
        row = {**row, "params_total": None}
    facts = {"parameters": row.get("params_total"), "active": row.get("params_active"), "source": source}
    against = reason_against(row, config)
    if against:
        return {"id": name, "incomplete": against, "model_type": config.get("model_type")} | {
            k: v for k, v in facts.items() if v
        }
    unknown_lengths(row, config)
    notes = ["the name was inferred from the shape"] if "name inferred" in row.get("notes", "") else []
    if why:
        notes.append("derived, not quoted: " + "; ".join(why))
    kept = without_rules(name, slim(config))
    if not same(name, config, kept):
        raise SystemExit(f"{name}: a key that counts was dropped")
    facts |= {
        "verbatim": is_whole(row) and name not in FIXES,
        "weight_dtype": weight_dtype(row, config),
        "weights": KNOWN_WEIGHTS.get(name),
        "max_context": spec_of(name, config).max_context,
        "notes": notes,
        "config": kept,
    }
    return {"id": name} | {key: value for key, value in facts.items() if value}


def spec_of(name: str, config: Config) -> ModelSpec:
    return build_spec(Found(name, config, Provenance("catalogue", "")))


def same(name: str, one: Config, other: Config) -> bool:
    """Whether two configurations come to the same for all that kvctl says."""
    a, b = spec_of(name, one), spec_of(name, other)
    return (a.layers, a.dtype, a.max_context, a.naive, a.default_encoder) == (
        b.layers,
        b.dtype,
        b.max_context,
        b.naive,
        b.default_encoder,
    )


def lines(rows: Mapping[str, Config]) -> Iterator[Config]:
    for name in sorted(rows, key=str.casefold):
        yield entry(rows[name], rows)
    yield from REFERENCES


def main() -> None:
    if len(sys.argv) != 2:
        raise SystemExit(__doc__)
    read = [json.loads(line) for line in Path(sys.argv[1]).read_text("utf-8").splitlines()]
    rows = {row["repo_id"]: row for row in read}
    for name in [*FIXES, *COPIES, *INCOMPLETE, *LENGTH_HOLDS, *KNOWN_WEIGHTS, *WRONG_PARAMETERS]:
        if name not in rows:
            raise SystemExit(f"{name} is named in this script and not in the file")
    entries = list(lines(rows))
    incomplete = [line for line in entries if "incomplete" in line]
    header = {
        "catalogue": 1,
        "models": len(entries) - len(incomplete),
        "incomplete": len(incomplete),
        "about": "configurations of published models, each with its source; written by scripts/build_catalogue.py",
    }
    text = "".join(json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n" for line in [header, *entries])
    OUT.write_text(text, "utf-8")
    print(f"{header['models']} models, {len(incomplete)} incomplete, {len(text.encode()):,} bytes", file=sys.stderr)
    for line in incomplete:
        print(f"  {line['id']}: {line['incomplete']}", file=sys.stderr)


if __name__ == "__main__":
    main()

"""Families: from a configuration to layers, by rules of model types.

Adding one: a reader `Fields -> Layers` in a module here, and a row in `FAMILIES`.
Rows name their reader as "module:function", so that a run imports only what it uses.
The first row that lists a model type wins.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import import_module
from typing import Any, NamedTuple

from kvctl.errors import ConfigError
from kvctl.families.build import Layers, windows_of_the_cache
from kvctl.families.fields import Fields


class Family(NamedTuple):
    """A reader and the model types whose configurations it reads."""

    reader: str
    types: tuple[str, ...]


def _types(text: str) -> tuple[str, ...]:
    return tuple(text.split())


FAMILIES: tuple[Family, ...] = (
    # Latent attention
    Family("latent:deepseek_v4", _types("deepseek_v4 deepseek_ref")),
    Family("latent:deepseek_v2", _types("deepseek_v2")),
    Family("latent:latent", _types(
        "deepseek_v3 kimi_k2 axk1 glm4_moe_lite minicpm3 mistral4 sarvam_mla youtu telechat3")),
    Family("latent:longcat", _types("longcat_flash")),
    Family("latent:indexed", _types("deepseek_v32 axk2")),
    Family("latent:indexed_shared", _types("glm_moe_dsa hy_v4 hy_v4_vl_text")),
    Family("latent:mistral_large4", _types("mistral_large4_text")),
    Family("latent:dots3_note", _types("dots3_note_text")),
    Family("latent:kimi_linear", _types("kimi_linear")),
    Family("latent:bailing_hybrid", _types("bailing_hybrid")),
    Family("latent:glm5_next", _types("glm5_next_text")),
    Family("latent:minimax_m3", _types("minimax_m3_vl_text minimax_m3")),
    Family("latent:qwen4_exp", _types("qwen4_exp_text")),
    # Recurrent layers, alone or mixed with attention
    Family("linear:gated_delta", _types("qwen3_next qwen3_5_text qwen3_5_moe_text")),
    Family("linear:olmo_hybrid", _types("olmo_hybrid")),
    Family("linear:lara_mini", _types("lara_mini")),
    Family("linear:mamba", _types("mamba falcon_mamba")),
    Family("linear:mamba2", _types("mamba2")),
    Family("linear:jamba", _types("jamba")),
    Family("linear:bamba", _types("bamba")),
    Family("linear:granite_hybrid", _types("granitemoehybrid")),
    Family("linear:falcon_h1", _types("falcon_h1")),
    Family("linear:nemotron_h", _types("nemotron_h")),
    Family("linear:zamba", _types("zamba")),
    Family("linear:zamba2", _types("zamba2")),
    Family("linear:lfm2", _types("lfm2 lfm2_moe")),
    Family("linear:lfm3", _types("lfm3")),
    Family("linear:inkling", _types("inkling_text")),
    Family("linear:inkling2", _types("inkling2_text")),
    Family("linear:inkling2_loop", _types("inkling2_loop_text")),
    Family("linear:minimax", _types("minimax")),
    Family("other:minimax_text_01", _types("minimax_text_01 minimax_m1")),
    Family("linear:zaya", _types("zaya")),
    Family("linear:recurrent_gemma", _types("recurrent_gemma")),
    Family("linear:rwkv", _types("rwkv")),
    Family("linear:xlstm", _types("xlstm")),
    Family("linear:dory", _types("dory")),
    Family("linear:hrm_text", _types("hrm_text")),
    # Encoder-decoders and cross attention
    Family("encdec:bart", _types(
        "bart bigbird_pegasus blenderbot blenderbot-small fsmt led m2m_100 marian mbart mvp nllb-moe pegasus "
        "pegasus_x plbart pp_formulanet_text florence2_language seamless_m4t seamless_m4t_v2 speech_to_text speecht5 "
        "trocr whisper")),
    Family("encdec:t5", _types("t5 mt5 umt5 longt5 switch_transformers udop pop2piano")),
    Family("encdec:pix2struct", _types("pix2struct_text_model")),
    Family("encdec:blip_text", _types("blip_text_model")),
    Family("encdec:prophetnet", _types("prophetnet")),
    Family("encdec:moonshine", _types("moonshine")),
    Family("encdec:flat_grouped", _types("cohere_asr moonshine_streaming")),
    Family("encdec:nested_grouped", _types("canary")),
    Family("encdec:dia", _types("dia")),
    Family("encdec:nested_decoder", _types("encoder-decoder vision-encoder-decoder speech-encoder-decoder")),
    Family("encdec:t5gemma", _types("t5gemma t5gemma2")),
    Family("encdec:musicgen", _types("musicgen")),
    Family("encdec:mllama", _types("mllama_text_model")),
    Family("encdec:seq2seq_text_model", _types("florence2 pp_formulanet")),
    Family("encdec:gpt2", _types("gpt2 gpt-sw3 decision_transformer musicgen_decoder musicgen_melody_decoder")),
    Family("encdec:cross_where_added", _types(
        "bert bert-generation big_bird camembert data2vec-text electra ernie megatron-bert rembert roberta "
        "roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl xmod")),
    # Attention with rules of its own
    Family("attention:falcon", _types("falcon")),
    Family("attention:refined_web", _types("RefinedWeb RefinedWebModel")),
    Family("attention:gpt_bigcode", _types("gpt_bigcode")),
    Family("attention:bloom", _types("bloom")),
    Family("attention:gpt_neo", _types("gpt_neo")),
    Family("attention:dbrx", _types("dbrx")),
    Family("attention:mpt", _types("mpt")),
    Family("attention:jetmoe", _types("jetmoe")),
    Family("attention:mimo_v2", _types("mimo_v2_flash mimo_v2")),
    Family("attention:modernbert_decoder", _types("modernbert-decoder")),
    Family("attention:gemma3n", _types("gemma3n_text")),
    Family("attention:gemma4", _types(
        "gemma4_text gemma4_unified_text diffusion_gemma_text embedding_gemma2_text")),
    Family("attention:per_layer_lists", _types("openelm")),
    Family("attention:uneven", _types("gguf")),
    Family("other:gemma4_assistant", _types("gemma4_assistant gemma4_unified_assistant")),
    Family("other:block_configs", _types("nemotron-nas deci")),
    Family("other:chatglm", _types("chatglm")),
    Family("other:qwen", _types("qwen")),
    Family("other:step3", _types("step3_text")),
    Family("other:baichuan_m1", _types("baichuan_m1")),
    Family("other:hunyuan", _types("hunyuan hunyuan_image_3_moe")),
    Family("other:phi_msft", _types("phi-msft")),
    Family("other:rwkv5", _types("rwkv5 rwkv6")),
    Family("other:phi3small", _types("phi3small")),
    Family("other:cpmant", _types("cpmant")),
    Family("other:openai_gpt", _types("openai-gpt")),
    Family("other:xlnet", _types("xlnet")),
    Family("other:blt", _types("blt")),
    Family("other:unsupported", _types("reformer phi4flash")),
    # Plain attention: the class splits the hidden size over the heads
    Family("attention:split_hidden", _types(
        "deepseek_ocr2_text unlimited_ocr_text chameleon qwen2_vl_text qwen2_5_vl_text idefics")),
    Family("attention:multi_head", _types(
        "biogpt codegen ctrl git gptj gpt_neox gpt_neox_japanese imagegpt kosmos_2_text_model "
        "kosmos_2_5_text_model opt persimmon xglm xlm baichuan xverse")),
    # Plain attention: KV heads and head width as given
    Family("attention:grouped_query", _types(
        "afmoe cohere2 cohere_compass_text apertus apertus1p5_text arcee aria_text beam bitnet cohere cohere2_moe cosmos3_edge_text "
        "cosmos3_omni_text cwm diffllama doge dots1 emu3_text_model ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text "
        "evolla exaone exaone4 exaone_moe flex_olmo flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm46v_text "
        "glm4v_text glm4v_moe_text glm_ocr_text glmga_text gpt_oss granite granite_docling_text granite_swa "
        "granite4_vision_text granitemoe granitemoe_swa granitemoeshared helium hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v3 "
        "hyperclovax internlm internlm2 internlm3 iquestcoder jais2 kolibri1 kyutai_speech_to_text laguna llama "
        "llama4_text mellum minimax_m2 ministral ministral3 mistral mixtral molmo2_text moshi muse_glimmer_text "
        "muse_spark_text nanochat nemotron olmo olmo2 olmo3 olmoe paddleocr_vl_text phi phi3 phi4_multimodal phimoe "
        "qwen2 qwen2_5_omni_text qwen2_moe qwen3 qwen3_moe qwen3_omni_moe_text qwen3_vl_text qwen3_vl_moe_text "
        "sarvam_moe seed_oss smollm3 solar_open stablelm starcoder2 step3p5 step3p7_text vaultgemma "
        "voxtral_realtime_text t5_gemma_module t5gemma2_decoder t5gemma2_text csm csm_depth_decoder_model "
        "higgs_audio_v2 qwen2_5_omni_talker qwen3_omni_moe_talker_text qwen3_omni_moe_talker_code_predictor "
        "glm_image_text muse_glimmer_assistant canary_decoder "
        "bailing_moe_v2 bunny-llama internlmxcomposer2 llava_llama llava_mistral llava_qwen llava_qwen2 minicpmo "
        "minicpmv molmo stablelm_epoch Yi "
        "arctic bailing_moe deepseek ernie4_5_moe_vl exaone4_5_text grok-1 llada2_moe mimo minicpm Motif orion phi3_v "
        "phi4 phi4mm solar telechat2 yi")),
    # Encoders
    Family("other:no_cache", _types(
        "albert distilbert deberta deberta-v2 modernbert mpnet esm longformer eurobert esmc nomic_bert convbert ibert "
        "layoutlm layoutlmv2 layoutlmv3 layoutxlm lilt luke mobilebert mra nystromformer squeezebert splinter tapas "
        "yoso fnet funnel bros markuplm gte jina_embeddings_v3 ultrabert neomme perceiver visual_bert vilt "
        "wav2vec2 wav2vec2-bert wav2vec2-conformer wavlm hubert unispeech unispeech-sat data2vec-audio sew sew-d "
        "clip_text_model siglip_text_model siglip2_text_model aimv2_text_model align_text_model altclip_text_model "
        "chinese_clip_text_model clap_text_model clipseg_text_model flava_text_model groupvit_text_model "
        "metaclip_2_text_model owlv2_text_model owlvit_text_model xclip_text_model vit dinov2 siglip_vision_model "
        "clip_vision_model clip siglip siglip2")),
)  # fmt: skip

# Readers of models that have no window, and whose cache in transformers slides all the same if the file names one.
WINDOWLESS = frozenset(_types(
    "latent:latent latent:deepseek_v2 latent:longcat encdec:bart encdec:t5 encdec:moonshine encdec:flat_grouped "
    "encdec:gpt2 encdec:cross_where_added encdec:mllama attention:falcon attention:bloom attention:gpt_bigcode "
    "encdec:blip_text encdec:prophetnet encdec:pix2struct attention:dbrx attention:gpt_neo attention:mpt "
    "attention:jetmoe attention:multi_head other:cpmant linear:hrm_text"))  # fmt: skip

# Where a wrapper keeps its language model, tried in this order.
NESTED_NAMES = ("text_config", "decoder", "generator", "llm_config", "language_config", "thinker_config",
                "language_model_config", "decoder_config", "llm_model_config", "vlm_config", "llm_cfg")  # fmt: skip

# Language models of wrappers that run outside of transformers, where the file may not name the type.
WRAPPED = {"kimi_vl": ("text_config", "deepseek_v3"), "deepseek_vl_v2": ("language_config", "deepseek_v2"),
           "interns1": ("text_config", "qwen3_moe"), "internvl_chat": ("llm_config", ""), "ovis": ("llm_config", ""),
           "ovis2_5": ("llm_config", ""), "llava_llama": ("llm_cfg", ""), "kimi_k3": ("text_config", "kimi_linear")}  # fmt: skip

_MAX_NESTING = 4


@cache
def _readers() -> Mapping[str, str]:
    table: dict[str, str] = {}
    for family in FAMILIES:
        for model_type in family.types:
            table.setdefault(model_type, family.reader)
    return table


@cache
def _load(reader: str) -> Any:
    module, _, function = reader.partition(":")
    return getattr(import_module(f"kvctl.families.{module}"), function)


def find_reader(model_type: str) -> Any | None:
    """The reader for a model type, or None."""
    name = _readers().get(model_type)
    return None if name is None else _load(name)


def _wraps_its_own_kind(f: Fields, reader: str) -> bool:
    """A file that names the language model's type at the top, and keeps its fields nested."""
    if not reader.startswith(("attention:", "latent:", "linear:")):
        return False  # these readers find their nested decoder themselves
    layers = {"num_hidden_layers", f.stored_name("num_hidden_layers"), "layer_types", "layers_block_type"}
    if layers & f.raw.keys():
        return False
    return any(isinstance(f.raw.get(name), Mapping) and layers & f.raw[name].keys() for name in NESTED_NAMES)


# Parts of a wrapper that run before or after the language model, and keep nothing between tokens.
_OTHER_PARTS = re.compile(
    r"encoder|projector|adapter|aligner|qformer|resampler|perceiver|connector|tower|vit|tokenizer|quant"
)


def _check_unknown_wrapper(f: Fields) -> None:
    """A wrapper of unknown type may be read through only if it wraps one language model and says no more of it."""
    inner = [name for name in NESTED_NAMES if isinstance(f.raw.get(name), Mapping)]
    if not inner:
        return
    from kvctl.families.unknown import hinting

    others = [key for key, value in f.raw.items() if key not in inner and isinstance(value, Mapping)
              and {"num_hidden_layers", "num_attention_heads", "vocab_size"} <= value.keys()]  # fmt: skip
    if len(inner) + len(others) > 1:
        raise ConfigError(f"{f.type[:60]!r} is unknown and has several language models: {', '.join([*inner, *others])}",
                          hint="size the part that you mean from a file of its own")  # fmt: skip
    model = f.raw[inner[0]]
    doubtful = hinting(
        {
            key: value
            for key, value in f.raw.items()
            if key not in inner
            and not (isinstance(value, Mapping) and _OTHER_PARTS.search(key))
            and not (key != "use_sliding_window" and key in model and model[key] == value)
        }
    )
    if doubtful:
        raise ConfigError(f"{f.type[:60]!r} is unknown, and these keys beside {inner[0]} may change its cache: "
                          + ", ".join(doubtful[:8]))  # fmt: skip


def text_fields(f: Fields, depth: int = 0) -> Fields:
    """The part of a configuration that describes the layers with the cache.

    A type with a family of its own is read as it is; a wrapper leads to what it wraps.
    """
    if f.type == "git" and str((f.entries("architectures") or [""])[0]).startswith("Grok"):
        # Grok 2 is published under the name of another model's type.
        f = Fields({**f.raw, "model_type": "grok-1"}, path=f.path, read=f.read)
    reader = _readers().get(f.type)
    if reader is not None and not _wraps_its_own_kind(f, reader):
        return f
    if depth >= _MAX_NESTING:
        raise ConfigError(f"{f.path}: configurations nested too deep")
    wrapped, wrapped_type = WRAPPED.get(f.type, ("", ""))
    if not f.nested_types and not wrapped:
        _check_unknown_wrapper(f)
    for name in NESTED_NAMES:
        if isinstance(f.raw.get(name), Mapping):
            nested = f.nested(name, default_type=wrapped_type if name == wrapped else "")
            if nested is not None:
                return text_fields(nested, depth + 1)
    for name in NESTED_NAMES:
        declared = f.nested_types.get(name) or (wrapped_type if name == wrapped else "")
        if declared:
            if "num_hidden_layers" in f.raw or "num_attention_heads" in f.raw or "hidden_size" in f.raw:
                # Older files keep the language model flat, beside the vision settings.
                flat = Fields({**f.raw, "model_type": declared}, path=f.path, read=f.read)
                return text_fields(flat, depth + 1)
            raise ConfigError(
                f"{f.path}{name} is missing: {f.type[:60]} keeps its language model there",
                hint=f"its class would fill in a {declared} of default size; a published model is hardly that",
            )
    return f


def read_layers(f: Fields) -> Layers:
    """The layers of a configuration, by its family; unknown types only where nothing is in doubt."""
    text = text_fields(f)
    reader = find_reader(text.type)
    if reader is None:
        from kvctl.families.unknown import read_unknown

        layers: Layers = read_unknown(text)
        return layers
    result: Layers = reader(text)
    return windows_of_the_cache(text, result) if _readers()[text.type] in WINDOWLESS else result

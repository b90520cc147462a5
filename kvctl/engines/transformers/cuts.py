"""What transformers' tensor-parallel plans do to the cache, by type of model.

Source: `base_model_tp_plan` of the configuration classes of 5.24 (`src/transformers/models/*/configuration_*.py`), checked by
walking the caches of two ranks; all but ernie4_5_vl_moe_text, muse_spark_text and voxtral_realtime_text, which are by source
alone. A plan that gives every rank its own outputs of the key and value projections ("colwise") divides KV heads; one that
gathers them, or names neither, leaves the cache whole on every rank. Latents, recurrent states and cross attention are whole
in all of them.
"""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.spec import ModelSpec

_CUT = """
    apertus apertus1p5_text arcee aria_text beam codegen cohere cohere2 cohere2_moe cohere_compass_text
    cosmos3_edge_text cwm deepseek_ocr2_text dots1 ernie4_5 ernie4_5_moe ernie4_5_vl_moe_text exaone exaone4
    exaone_moe gemma gemma2 gemma3_text gemma3n_text gemma4_text gemma4_unified_text glm glm4 glm4_moe
    glm4v_moe_text glm4v_text glm_ocr_text gpt_neox gptj granite granite4_vision_text granite_docling_text
    granite_swa granitemoe_swa helium hrm_text hy_v3 hyperclovax internlm3 iquestcoder jais2 kolibri1 laguna
    lara_mini llama llama4_text mellum mimo_v2_flash minimax ministral ministral3 mistral mixtral
    muse_glimmer_text nanochat nemotron olmo paddleocr_vl_text phi qwen2 qwen2_5_omni_text qwen2_5_vl_text
    qwen2_moe qwen2_vl_text qwen3 qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next qwen3_omni_moe_text
    qwen3_vl_moe_text sarvam_moe seed_oss smollm3 solar_open starcoder2 t5gemma unlimited_ocr_text vaultgemma
    voxtral_realtime_text
"""
CUT = frozenset(_CUT.split())
"""Types whose ranks hold their own KV heads."""

_WHOLE = """
    afmoe axk1 axk2 bailing_hybrid bamba dbrx deepseek_v2 deepseek_v3 deepseek_v32 deepseek_v4 diffllama dory
    emu3_text_model falcon_h1 flex_olmo flint glm4_moe_lite glm_moe_dsa gpt_oss granitemoe granitemoehybrid
    granitemoeshared hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl_text hy_v4 hy_v4_vl_text inkling2_loop_text
    inkling2_text jamba kimi_linear lfm2 lfm2_moe lfm3 longcat_flash minicpm3 minimax_m2 minimax_m3_vl_text
    mistral4 mistral_large4_text muse_spark_text nemotron_h olmo2 olmo3 olmo_hybrid olmoe phi3 phi4_multimodal
    phimoe qwen3_vl_text qwen4_exp_text sarvam_mla step3p5 youtu
"""
WHOLE = frozenset(_WHOLE.split())
"""Types whose plan leaves the cache alone."""

_FAIL = """
    diffusion_gemma_text doge dots3_note_text gemma4 glm5_next_text inkling_text
"""
FAIL = frozenset(_FAIL.split())
"""Types with a plan by which 5.24 does not run: its first pass over two ranks raises an error."""


def heads_are_cut(spec: ModelSpec, ranks: int) -> bool:
    """Whether each of so many ranks holds its own KV heads; False: all of them.

    Raises:
        ConfigError: transformers has no plan for the model, or one that does not run.

    """
    if ranks == 1:
        return False
    if spec.provenance.source == "shape":
        return True
    name = text_fields(Fields(spec.config)).type
    if name in FAIL or spec.model_type in FAIL:
        raise ConfigError(f"{spec.id}: transformers 5.24 fails to run {spec.model_type[:60]} over several ranks")
    if name in CUT or name in WHOLE:
        return name in CUT
    raise ConfigError(f"{spec.id}: transformers 5.24 has no tensor-parallel plan for {name[:60]}",
                      hint="one rank, or several devices that hold whole layers (device_map)")  # fmt: skip

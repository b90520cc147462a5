"""Models that see: the tower beside the language model."""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.families.fields import Fields
from kvctl.parameters import Layers, Model, write

_LANGUAGE = {"qwen3_vl_text": "dense:dense", "qwen3_vl_moe_text": "dense:dense", "gemma3_text": "dense:dense",
             "qwen2_vl_text": "dense:dense", "qwen2_5_vl_text": "dense:dense",
             "qwen3_5_text": "hybrid:gated_delta", "qwen3_5_moe_text": "hybrid:gated_delta"}  # fmt: skip


def _language(m: Model) -> None:
    """The language model's tensors, named as in the wrapper's checkpoints."""
    writer = _LANGUAGE.get(m.f.type)
    if writer is None:
        raise ConfigError(f"the parameters of {m.f.type[:60]} in {m.root.type[:60]} are not known")
    write(m, writer)
    m.tensors = [
        t.replace(name=t.name.replace("model.", "model.language_model.", 1)) if t.name.startswith("model.") else t
        for t in m.tensors
    ]


def _tower(m: Model) -> Fields:
    """The tower's own configuration."""
    vision = m.root.nested("vision_config")
    if vision is None:
        raise ConfigError(f"the configuration of {m.root.type[:60]} does not describe its vision tower")
    if not m.whole:
        raise ConfigError("the vision tower is not in the source of this configuration")
    return vision


def qwen3_vl(m: Model) -> None:
    """Qwen3-VL and Qwen3.5: blocks over patches, mergers between them and the language model."""
    _language(m)
    v = _tower(m)
    hidden, width = v.number("hidden_size"), v.number("intermediate_size")
    patch, time, colours = v.number("patch_size"), v.number("temporal_patch_size"), v.number_or("in_channels", 3)
    out, merged = v.number("out_hidden_size"), hidden * v.number("spatial_merge_size") ** 2
    blocks: Layers = tuple(range(v.layers("depth")))
    prefix = "model.visual."
    m.add(prefix + "patch_embed.proj.weight", hidden, colours, time, patch, patch)
    m.add(prefix + "patch_embed.proj.bias", hidden)
    m.add(prefix + "pos_embed.weight", v.number("num_position_embeddings"), hidden)
    block = prefix + "blocks.N."
    for name in ("norm1", "norm2"):
        m.norm(block + name, hidden, blocks, bias=True)
    m.linear(block + "attn.qkv", 3 * hidden, hidden, blocks, bias=True)
    m.linear(block + "attn.proj", hidden, hidden, blocks, bias=True)
    m.linear(block + "mlp.linear_fc1", width, hidden, blocks, bias=True)
    m.linear(block + "mlp.linear_fc2", hidden, width, blocks, bias=True)
    _merger(m, prefix + "merger.", hidden, merged, out, 1)
    deep = v.entries("deepstack_visual_indexes") or []
    if deep:
        _merger(m, prefix + "deepstack_merger_list.N.", merged, merged, out, len(deep))


def qwen2_vl(m: Model) -> None:
    """Qwen2-VL and Qwen2.5-VL: blocks over patches and one merger, a norm and two layers."""
    _language(m)
    v = _tower(m)
    newer = m.root.type == "qwen2_5_vl"
    hidden = v.number("hidden_size" if newer else "embed_dim")
    out = v.number("out_hidden_size" if newer else "hidden_size")
    patch, time = v.number("patch_size"), v.number("temporal_patch_size")
    colours = v.optional_number("in_channels") or v.number("in_chans")
    merged = hidden * v.number("spatial_merge_size") ** 2
    blocks: Layers = tuple(range(v.layers("depth")))
    prefix = "model.visual."
    m.add(prefix + "patch_embed.proj.weight", hidden, colours, time, patch, patch)
    block = prefix + "blocks.N."
    for name in ("norm1", "norm2"):
        m.norm(block + name, hidden, blocks, bias=not newer)
    m.linear(block + "attn.qkv", 3 * hidden, hidden, blocks, bias=True)
    m.linear(block + "attn.proj", hidden, hidden, blocks, bias=True)
    if newer:
        width = v.number("intermediate_size")
        for name, shape in (
            ("gate_proj", (width, hidden)),
            ("up_proj", (width, hidden)),
            ("down_proj", (hidden, width)),
        ):
            m.linear(f"{block}mlp.{name}", *shape, blocks, bias=True)
    else:
        width = hidden * v.number("mlp_ratio")
        m.linear(block + "mlp.fc1", width, hidden, blocks, bias=True)
        m.linear(block + "mlp.fc2", hidden, width, blocks, bias=True)
    m.norm(prefix + "merger.ln_q", hidden, bias=not newer)
    for rows, count in ((merged, 1), (out, 1)) if merged != out else ((merged, 2),):
        m.add(prefix + "merger.mlp.N.weight", rows, merged, each=count)
        m.add(prefix + "merger.mlp.N.bias", rows, each=count)


def _merger(m: Model, prefix: str, norm: int, merged: int, out: int, count: int) -> None:
    for name, shape in (
        ("norm.weight", (norm,)), ("norm.bias", (norm,)),
        ("linear_fc1.weight", (merged, merged)), ("linear_fc1.bias", (merged,)),
        ("linear_fc2.weight", (out, merged)), ("linear_fc2.bias", (out,)),
    ):  # fmt: skip
        m.add(prefix + name, *shape, each=count)


def gemma3(m: Model) -> None:
    """SigLIP's tower, a norm and one matrix into the language model."""
    _language(m)
    v = _tower(m)
    if v.type != "siglip_vision_model":
        raise ConfigError(f"the parameters of a {v.type[:60]} in gemma3 are not known")
    hidden, width, patch = v.number("hidden_size"), v.number("intermediate_size"), v.number("patch_size")
    blocks: Layers = tuple(range(v.layers()))
    prefix = "model.vision_tower.vision_model."
    m.add(prefix + "embeddings.patch_embedding.weight", hidden, v.number_or("num_channels", 3), patch, patch)
    m.add(prefix + "embeddings.patch_embedding.bias", hidden)
    m.add(prefix + "embeddings.position_embedding.weight", (v.number("image_size") // patch) ** 2, hidden)
    block = prefix + "encoder.layers.N."
    for name in ("layer_norm1", "layer_norm2"):
        m.norm(block + name, hidden, blocks, bias=True)
    for name in ("q_proj", "k_proj", "v_proj", "out_proj"):
        m.linear(block + "self_attn." + name, hidden, hidden, blocks, bias=True)
    m.linear(block + "mlp.fc1", width, hidden, blocks, bias=True)
    m.linear(block + "mlp.fc2", hidden, width, blocks, bias=True)
    m.norm(prefix + "post_layernorm", hidden, bias=True)
    m.norm("model.multi_modal_projector.mm_soft_emb_norm", hidden)
    m.add("model.multi_modal_projector.mm_input_projection_weight", hidden, m.hidden)

"""The sizes of a model that decide how large its tensors grow while it runs, read from its configuration."""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.engines.widths import EXPERT_WIDTHS, EXPERTS, FEED, MEASURED, SHARED, UNGATED, USED, base, first, whole
from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import Attention, ConvState, LatentAttention, ModelSpec, RecurrentState


class Vision(Record):
    """The encoder of images beside a language model."""

    hidden: int
    width: int
    patches: int
    """Patches that one position of the language model stands for."""
    any_size: bool
    """Whether images keep their size, so that one alone may take many positions."""


class Shape(Record):
    """What of a model's sizes its activations depend on."""

    kind: str
    """The language model's type."""
    layers: int
    hidden: int
    vocabulary: int
    width: int
    """Of the widest feed-forward part that is no mixture of experts, shared experts among them; 0 without one."""
    gated: bool
    chosen: int = 0
    """Experts that a token goes to."""
    expert_width: int = 0
    attention: int = 0
    """Queries, keys and values of a token, the queries once more as they are rotated, and the output."""
    latent_heads: int = 0
    """Heads of latent attention, and how wide their keys (without rotation) and values are together."""
    latent_width: int = 0
    recurrent: bool = False
    quantized: bool = False
    packed_experts: bool = False
    """Whether experts are stored in MXFP4, whose kernels take no workspace."""
    vision: Vision | None = None


@kept
def shape_of(spec: ModelSpec) -> Shape:
    """Sizes of a model.

    Raises:
        ConfigError: its configuration names no width or no vocabulary.

    """
    root = Fields(spec.config)
    f = text_fields(root)
    hidden, vocabulary, heads = base(spec, f)
    if not spec.config or not hidden or not vocabulary:
        raise ConfigError(f"{spec.id}: activations are not estimated without a hidden size and a vocabulary",
                          hint=MEASURED)  # fmt: skip
    experts = first(f, EXPERTS)
    chosen = first(f, USED) if experts else 0
    latent = spec.keeps(LatentAttention, engine="vllm")
    return Shape(
        kind=f.type,
        layers=len(spec.layers),
        hidden=hidden,
        vocabulary=vocabulary,
        width=_dense_width(f, chosen) or (0 if chosen else 4 * hidden),
        gated=f.type not in UNGATED,
        chosen=chosen,
        expert_width=first(f, EXPERT_WIDTHS + FEED) if chosen else 0,
        attention=max(
            (
                3 * heads * state.key_dim + 2 * state.kv_heads * state.key_dim
                for layer, _ in spec.groups
                for state in layer.states_in("vllm")
                if isinstance(state, Attention)
            ),
            default=0,
        ),
        latent_heads=heads if latent else 0,
        latent_width=first(f, ("qk_nope_head_dim",)) + first(f, ("v_head_dim",)) if latent else 0,
        recurrent=spec.keeps(RecurrentState, ConvState),
        quantized=bool(root.raw.get("quantization_config") or f.raw.get("quantization_config")),
        packed_experts=f.type == "gpt_oss",
        vision=_vision(root) if spec.takes_media and (root.type != f.type or "vision_config" in root.raw) else None,
    )


def _dense_width(f: Fields, chosen: int) -> int:
    """Width of the widest feed-forward part that every token goes through."""
    widths = [whole(f.get(name)) for name in ("intermediate_size_mlp", "shared_expert_intermediate_size")]
    shared = first(f, SHARED)
    widths.append(shared * first(f, ("moe_intermediate_size",)))
    dense = first(f, ("first_k_dense_replace", "moe_layer_start_index", "num_dense_layers")) or f.get("mlp_only_layers")
    if not chosen or dense or whole(f.get("decoder_sparse_step")) > 1:
        widths += [whole(f.get(name)) for name in FEED]
    return max(widths)


def _vision(root: Fields) -> Vision:
    """The encoder's sizes; 0 where the file does not name them."""
    config = root.raw.get("vision_config")
    if not isinstance(config, Mapping):
        config = {}
    hidden = next((size for name in ("embed_dim", "hidden_size", "width") if (size := whole(config.get(name)))), 0)
    if not hidden:
        return Vision(0, 0, 1, any_size=False)
    width = whole(config.get("intermediate_size")) or 4 * hidden
    side = whole(config.get("image_size")) // (whole(config.get("patch_size")) or 14)
    merge = whole(config.get("spatial_merge_size")) or whole(root.raw.get("spatial_merge_size")) or 1
    positions = whole(root.raw.get("mm_tokens_per_image")) or whole(root.raw.get("image_seq_length"))
    patches = side * side // positions if positions and side else merge * merge
    return Vision(hidden, width, max(patches, 1), any_size=not side and merge > 1)

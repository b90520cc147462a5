"""What of a model's weights lies on each rank, by vLLM's rules of sharding.

Read from vLLM 0.32 (model_executor/layers/linear.py, vocab_parallel_embedding.py, fused_moe, quantization,
distributed/utils.py and the model classes) and compared with its own classes, built on torch's meta
device for one to eight ranks (tests/test_weights.py).

- Column-parallel layers are cut along their outputs, row-parallel ones along their inputs; the bias
  of a row-parallel layer is whole on every rank. Scales follow their weight.
- Heads are not cut: KV heads are repeated where there are more ranks than heads.
- Vocabularies are padded to a multiple of 64 rows, then cut.
- Norms, routers, down projections of latent attention and its indexer are whole on every rank.
- Experts are cut like any feed-forward part, or spread whole with expert parallelism.
- Pipeline stages take equal shares of the layers; what is left over goes to stages from the last but one forward.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import accumulate, pairwise
from typing import Any

from kvctl.engines.vllm.stages import stage_sizes
from kvctl.errors import ConfigError, UsageError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.parameters import layer_count, tied
from kvctl.quantization import facts_of
from kvctl.record import Record
from kvctl.tensors import Tensor, of_vision, without_drafts

VOCABULARY_PADDING = 64
MOST_RANKS = 65_536


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


SHARDED = _names(
    "llama granite smollm3 mistral qwen2 qwen3 gemma gemma2 gemma3_text olmo olmo2 olmo3 cohere cohere2 "
    "phi3 glm glm4 starcoder2 stablelm ernie4_5 seed_oss exaone4 arcee nemotron apertus hunyuan_v1_dense internlm3 "
    "mixtral qwen2_moe qwen3_moe olmoe phimoe granitemoe ernie4_5_moe glm4_moe minimax_m2 mellum gpt_oss "
    "deepseek_v2 deepseek_v3 kimi_k2 glm4_moe_lite axk1 qwen3_next qwen3_5_text qwen3_5_moe_text nemotron_h "
    "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe gemma3 deepseek_v32 glm_moe_dsa granitemoehybrid falcon_h1 lfm2 lfm2_moe "
    "gpt_neox qwen2_vl qwen2_5_vl"
)
"""Model types whose cuts were compared with vLLM's own classes."""

# The last part of a module's name, and how it is cut: along outputs, inputs, the vocabulary, or not.
_OUTPUTS = frozenset((
    "q_proj", "k_proj", "v_proj", "qkv_proj", "q_b_proj", "kv_b_proj",
    "gate_proj", "up_proj", "gate_up_proj", "w1", "w3", "c_fc", "fc1", "linear_fc1", "input_linear", "qkv", "query_key_value", "dense_h_to_4h",
    "in_proj_qkvz", "in_proj_ba", "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj", "conv1d", "conv",
))  # fmt: skip
_INPUTS = frozenset(
    (
        "o_proj",
        "out_proj",
        "proj",
        "down_proj",
        "w2",
        "c_proj",
        "fc2",
        "linear_fc2",
        "output_linear",
        "dense",
        "dense_4h_to_h",
    )
)
_VOCABULARY = frozenset(("embed_tokens", "embeddings", "embed_in", "embed_out", "lm_head"))
_WHOLE = frozenset((
    "norm", "input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm",
    "post_self_attn_layernorm", "post_mlp_layernorm", "attention_layernorm", "feedforward_layernorm",
    "q_norm", "k_norm", "q_a_layernorm", "kv_a_layernorm", "query_layernorm", "key_layernorm", "act_fn",
    "gate", "router", "layer", "shared_expert_gate", "moe_statics", "q_a_proj", "kv_a_proj_with_mqa", "norm_f",
    "final_layernorm", "final_layer_norm", "pre_ff_layernorm", "operator_norm", "ffn_norm", "embedding_norm", "q_layernorm", "k_layernorm",
    "norm1", "norm2", "ln_q", "layer_norm1", "layer_norm2", "post_layernorm", "pos_embed", "position_embedding",
    "fc1_latent_proj", "fc2_latent_proj", "patch_embedding", "patch_embed", "mm_soft_emb_norm", "multi_modal_projector",
))  # fmt: skip
# Vectors of recurrent layers, one value or more a head.
_BY_HEAD = frozenset(("A_log", "D", "dt_bias", "sinks"))
_RECURRENT = frozenset(("mixer", "mamba"))
_HEADS = {
    "q_proj": "query",
    "q_b_proj": "query",
    "kv_b_proj": "query",
    "o_proj": "query",
    "k_proj": "kv",
    "v_proj": "kv",
}
# Norms that run over the heads of a rank: over all of them in MiniMax-M2, one a head in Cohere.
_CUT_NORMS = {("minimax_m2", "q_norm"): "query", ("minimax_m2", "k_norm"): "kv",
              ("cohere", "q_norm"): "query", ("cohere", "k_norm"): "kv"}  # fmt: skip
# Models whose router vLLM keeps in float32, whatever the checkpoint's dtype.
_WIDE_ROUTERS = frozenset(("glm4_moe", "glm4_moe_lite", "ernie4_5_moe", "minimax_m2", "nemotron_h"))
# Layers that vLLM puts together with another: one shape, one scale of the inputs for both.
_JOINED = frozenset(("k_proj", "v_proj", "up_proj", "w3"))
_PARTS = {"qkv_proj": 3, "gate_up_proj": 2}
_SCALARS = frozenset(("input_scale", "weight_scale_2", "weight_global_scale", "input_global_scale"))
_EXPERTS = ("gate_up_proj", "up_proj", "down_proj")
_BITSANDBYTES = ("SCB", "absmax", "quant_map", "weight_format")


Part = tuple[int, int, bool]
"""Rows of a matrix, how many heads (groups) they are, and whether these are repeated over more ranks."""


class Split(Record):
    """How many ranks share the weights, and how."""

    tensor: int = 1
    pipeline: int = 1
    expert: bool = False
    """Experts whole, spread over the ranks (`--enable-expert-parallel`)."""
    data: int = 1
    """Data-parallel groups; experts are spread over the ranks of all of them."""
    stages: tuple[int, ...] = ()
    """Layers of each pipeline stage, where they are not divided evenly (VLLM_PP_LAYER_PARTITION)."""

    @property
    def ranks(self) -> int:
        """Of one data-parallel group."""
        return self.tensor * self.pipeline

    @property
    def cuts(self) -> bool:
        """Whether a rank has less than everything."""
        return self.ranks > 1 or (self.expert and self.data > 1)


def per_rank(tensors: Sequence[Tensor], config: Mapping[str, Any], split: Split) -> tuple[int, ...]:
    """Bytes on each rank, tensor-parallel ranks of the first pipeline stage first.

    Raises:
        ConfigError: the architecture's cuts are not known, or a tensor's.
        UsageError: it cannot be cut so.

    """
    if split.ranks > MOST_RANKS:
        raise UsageError(f"weights on {split.ranks:,} ranks: at most {MOST_RANKS:,} are told")
    cut = _Cut(tensors, config, split)
    stages = stages_of(cut.layers, split)
    ranks = [[0] * split.tensor for _ in stages]
    for tensor in cut.tensors:
        try:
            shares = [cut.share(tensor, rank) for rank in range(split.tensor)]
        except (IndexError, ZeroDivisionError):
            # Fewer dimensions than a tensor of that name has, or none of a length.
            raise ConfigError(
                f"how vLLM shards {tensor.name[:100]} of shape {str(tensor.shape)[:60]} is not known to kvctl"
            ) from None
        for stage, layers in enumerate(stages):
            times = cut.times(tensor, layers, stage)
            for rank, size in enumerate(shares):
                ranks[stage][rank] += times * size
    return tuple(size for stage in ranks for size in stage)


def left_in_file(tensors: Sequence[Tensor], config: Mapping[str, Any]) -> int:
    """Bytes of a checkpoint that vLLM does not load: layers for drafting, a head that is tied."""
    return _Cut(tensors, config, Split()).left


def stages_of(layers: int, split: Split) -> list[range]:
    """Layers of every pipeline stage."""
    bounds = (0, *accumulate(stage_sizes(layers, split.pipeline, split.stages)))
    return [range(first, last) for first, last in pairwise(bounds)]


def _of_bitsandbytes() -> ConfigError:
    return ConfigError("how engines hold bitsandbytes weights is not known to kvctl",
                       hint="without parallel sizes, the total is known")  # fmt: skip


class _Cut:
    """What of a configuration and of neighbouring tensors the cuts depend on."""

    def __init__(self, tensors: Sequence[Tensor], config: Mapping[str, Any], split: Split) -> None:
        root = Fields(config)
        f = text_fields(root)
        self.split, self.type = split, f.type
        if root.type not in SHARDED:
            raise ConfigError(f"how vLLM shards {root.type[:60] or 'an unnamed type'} is not known to kvctl",
                              hint="without parallel sizes, the total is known")  # fmt: skip
        if split.expert and split.data > 1 and split.tensor > 1:
            raise ConfigError(
                "how vLLM lays out shared experts over data- and tensor-parallel ranks is not known to kvctl"
            )
        self.layers = layer_count(f)
        self.query = f.number("num_attention_heads")
        if self.query % split.tensor:
            raise UsageError(f"vLLM does not spread {self.query} attention heads over {split.tensor} ranks",
                             hint="name a tensor-parallel size that divides them")  # fmt: skip
        self.kv = f.optional_number("num_key_value_heads") or self.query
        self.tied = tied(root, f)
        self.states = None
        self.merged = 0
        if root.type in ("qwen2_vl", "qwen2_5_vl"):
            vision = root.section("vision_config")
            width = vision.number("embed_dim" if root.type == "qwen2_vl" else "hidden_size")
            self.merged = width * vision.number("spatial_merge_size") ** 2
        if f.type in ("nemotron_h", "granitemoehybrid", "falcon_h1"):
            from kvctl.parameters.hybrid import mamba2_sizes

            sizes = mamba2_sizes(f)
            self.states = (sizes.heads, sizes.inner, sizes.groups, sizes.groups * sizes.state)
        if split.pipeline > 1 and any(map(of_vision, tensors)):
            raise ConfigError("which pipeline stages have the vision tower is not known to kvctl")
        self.tensors, self.left = without_drafts(tensors, self.layers)
        if self.tied:
            self.left += sum(tensor.total for tensor in self.tensors if tensor.name == "lm_head.weight")
            self.tensors = tuple(tensor for tensor in self.tensors if tensor.name != "lm_head.weight")
        self.shapes = {tensor.name: tensor.shape for tensor in self.tensors}
        facts = facts_of(config) or {}
        if facts.get("quant_method") == "bitsandbytes":
            raise _of_bitsandbytes()  # before packed layers, which are one column wide, are cut
        if facts.get("desc_act"):
            raise ConfigError("how vLLM shards GPTQ with activation order (desc_act) is not known to kvctl")
        block = facts.get("weight_block_size")
        whole = isinstance(block, list) and len(block) == 2 and all(isinstance(b, int) and b > 0 for b in block)
        self.block = block if block is not None and whole else [128, 128]

    def times(self, tensor: Tensor, layers: range, stage: int) -> int:
        """How many layers of a stage have a tensor; for others whether the stage has it."""
        if tensor.layers:
            return len(tensor.layers) if of_vision(tensor) else sum(layer in layers for layer in tensor.layers)
        first, last = stage == 0, stage == self.split.pipeline - 1
        if any(name in tensor.name for name in ("embed_tokens", "backbone.embeddings", "embed_in")):
            # A tied head reads the embeddings on the last stage too.
            return int(first or (last and self.tied))
        return int(last)

    def share(self, tensor: Tensor, rank: int) -> int:
        """Bytes of one layer's tensors of a kind on a tensor-parallel rank."""
        path = tensor.name.split(".")
        name, part = path[-2] if len(path) > 1 else path[0], path[-1]
        if "patch_embed" in path:
            name = "patch_embed"
        if "merger" in path and name == "N":  # a square layer cut along its outputs, then one along its inputs
            return self._merger(tensor, part)
        if "indexer" in path:
            if part.startswith(("weight_", "q", "scales")):
                raise ConfigError("how vLLM loads a quantised indexer is not known to kvctl")
            return tensor.elements * 4 if name == "k_norm" else tensor.bytes
        if part.startswith(_EXPERTS):
            # All experts of a layer in one tensor, named like a layer and not ".weight".
            name, part = next((n, part.removeprefix(n).lstrip("_") or "weight") for n in _EXPERTS if part.startswith(n))
        if part.startswith(_BITSANDBYTES) or "quant_state" in part:
            raise _of_bitsandbytes()
        if part in ("e_score_correction_bias", "expert_bias"):
            return tensor.bytes * tensor.each
        if name == "gate" and part == "weight" and self.type in _WIDE_ROUTERS:
            return tensor.elements * 4
        routed = "experts" in path or ("block_sparse_moe" in path and len(tensor.shape) == 3)
        loaded = self._loaded(tensor, name, part, routed)
        if routed and self.split.expert:
            count = tensor.each if tensor.each > 1 else tensor.shape[0]
            ranks = self.split.tensor * self.split.data
            local = count // ranks + (rank < count % ranks)
            return self._one(tensor, name, part, loaded, routed, 1) * tensor.each // count * local
        return tensor.each * self._one(tensor, name, part, loaded, routed, self.split.tensor)

    def _merger(self, tensor: Tensor, part: str) -> int:
        """Both layers of Qwen2-VL's merger, where their shapes are equal; the second's bias is whole."""
        ranks = self.split.tensor
        if part != "bias":
            return tensor.each * _even(tensor, tensor.bytes, ranks)
        if tensor.each == 2:
            return _even(tensor, tensor.bytes, ranks) + tensor.bytes
        return _even(tensor, tensor.bytes, ranks) if tensor.shape[0] == self.merged else tensor.bytes

    def _loaded(self, tensor: Tensor, name: str, part: str, routed: bool) -> int:
        """Bytes of a tensor as vLLM keeps it, where that differs from the file."""
        if part == "A_log":
            return tensor.elements * 4
        if part == "g_idx":
            return 0  # without activation order it says nothing
        if part == "weight_shape":
            # Layers that are joined have one; experts keep it in two elements of the model's dtype.
            return 0 if name in _JOINED else 4 if routed else tensor.bytes
        if (
            part == "input_scale"
            and routed
            and name in _JOINED
            and f"{tensor.module}.weight_scale_2" not in self.shapes
        ):
            return 0
        if tensor.elements == 1 and not routed and part.startswith(("weight_scale", "input_scale")):
            return tensor.bytes * _PARTS.get(name, 1)  # one for each of the layers in one matrix
        if part == "weight_scale" and tensor.dtype == "BF16" and tensor.shape[-1:] == (1,):
            return tensor.bytes * 2  # float32 for every output
        return tensor.bytes

    def _one(self, tensor: Tensor, name: str, part: str, size: int, routed: bool, ranks: int) -> int:
        """Bytes of one tensor, `size` in all, on each of `ranks`."""
        if name in _VOCABULARY:
            padded = -(-tensor.shape[0] // VOCABULARY_PADDING) * VOCABULARY_PADDING
            return _even(tensor, padded, ranks) * (size // tensor.shape[0])
        norm = _CUT_NORMS.get((self.type, name))
        if norm is not None or part == "sinks":
            return self._by_heads(tensor, norm or "query", size, ranks)
        if part in _BY_HEAD or (name == "norm" and _RECURRENT & {*tensor.name.split(".")}):
            return _even(tensor, size, ranks)
        if name in _WHOLE or part in _SCALARS or part == "weight_shape" or tensor.elements == 1 or not size:
            return size
        if (part in ("blocks", "scales") and len(tensor.shape) > 2) or (
            part == "bias" and f"{tensor.name[:-5]}_blocks" in self.shapes
        ):
            return _packed_experts(tensor, name, part, ranks)
        if name not in _OUTPUTS and name not in _INPUTS:
            raise ConfigError(f"how vLLM shards {tensor.name[:100]} is not known to kvctl")
        if name in _INPUTS and (part == "bias" or not _has_inputs(tensor, part)):
            return size
        if routed and part == "weight_scale_inv":
            return self._ragged_blocks(tensor, name, ranks)
        joined = self._joined(name, tensor.name)
        if joined:
            return _by_parts(tensor, joined, size, ranks)
        if name in _HEADS and not of_vision(tensor):
            return self._by_heads(tensor, _HEADS[name], size, ranks)
        if part == "weight" and len(tensor.shape) == 2:
            rows, columns = tensor.shape
            _even(tensor, (rows // 2 if name == "gate_up_proj" else rows) if name in _OUTPUTS else columns, ranks)
        biases = 0
        if part == "qweight" and routed and f"{tensor.module}.g_idx" in self.shapes:
            # vLLM gives GPTQ's experts biases, 16 bits each.
            biases = 2 * tensor.shape[1] // (ranks if name in _OUTPUTS else 1)
        return _even(tensor, size, ranks) + biases

    def _joined(self, name: str, path: str) -> tuple[Part, ...]:
        """Layers of one matrix for several things, each cut for itself."""
        if name == "qkv_proj":
            return (self.query, self.query, False), (2 * self.kv, self.kv, True)
        if self.states is None or not _RECURRENT & {*path.split(".")}:
            return ()
        heads, inner, groups, width = self.states
        if name == "conv1d":
            return (inner, heads, False), (2 * width, groups, groups == 1)
        if name == "in_proj":
            return (2 * inner, heads, False), (2 * width, groups, groups == 1), (heads, heads, False)
        return ()

    def _by_heads(self, tensor: Tensor, kind: str, size: int, ranks: int) -> int:
        count = self.query if kind == "query" else self.kv
        if kind == "kv" and ranks > count and ranks % count == 0:
            ranks = count  # every rank keeps a whole head
        _even(tensor, count, ranks)
        return _even(tensor, size, ranks)

    def _ragged_blocks(self, tensor: Tensor, name: str, ranks: int) -> int:
        """Scales of an expert's blocks: where a rank's width is no whole number of blocks, finer ones that divide it."""
        weight = self.shapes.get(f"{tensor.module}.weight")
        if weight is None or len(weight) != 2:
            raise ConfigError(f"{tensor.name[:100]} has no weight beside it")
        rows, columns = weight
        width, hidden = (rows, columns) if name in _OUTPUTS else (columns, rows)
        width = _even(tensor, width, ranks)
        high, wide = self.block
        if ranks > 1 and (width % high or width % wide):
            fine = math.gcd(high, wide, width, hidden)
            high = wide = fine if fine >= 32 else high
        rows, columns = (width, hidden) if name in _OUTPUTS else (hidden, width)
        return -(-rows // high) * -(-columns // wide) * (tensor.bytes // tensor.elements)


def _has_inputs(tensor: Tensor, part: str) -> bool:
    """Whether a part of a row-parallel layer has a length along the inputs: groups and blocks have, rows' scales not."""
    if part in ("scales", "qzeros"):
        return tensor.shape[0] > 1
    return not part.startswith("weight_scale") or (len(tensor.shape) > 1 and tensor.shape[-1] > 1)


def _even(tensor: Tensor, length: int, ranks: int) -> int:
    if length % ranks:
        raise UsageError(f"vLLM does not cut {tensor.name[:80]} ({length:,}) into {ranks} equal parts",
                         hint="name another tensor-parallel size")  # fmt: skip
    return length // ranks


def _by_parts(tensor: Tensor, parts: tuple[Part, ...], size: int, ranks: int) -> int:
    row = size // sum(length for length, _, _ in parts)
    rows = 0
    for length, count, repeated in parts:
        rows += (
            length // count
            if repeated and ranks > count and ranks % count == 0
            else length // count * _even(tensor, count, ranks)
        )
    return row * rows


def _packed_experts(tensor: Tensor, name: str, part: str, ranks: int) -> int:
    """Experts of gpt-oss: whole blocks of 32 on each rank, their width rounded up to 64 (Triton's kernels)."""
    if part == "bias" and name == "down_proj":
        return tensor.bytes
    width = tensor.shape[1] // 2 if name == "gate_up_proj" else tensor.shape[2] * 32
    blocks = -(-(width // 32) // ranks)
    return tensor.bytes // width * (-(-blocks * 32 // 64) * 64)

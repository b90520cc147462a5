"""Formats of weights: what quantisation makes of a model's tensors, scales and all.

A format rewrites the weights of linear layers into the tensors that its tool stores. Which layers
those are is the tool's default: embeddings, the head, norms, routers and convolutions stay as they are.

Sources: bitsandbytes 0.49 (run: tests/test_weight_formats.py), AutoAWQ's WQLinear_GEMM, AutoGPTQ's
QuantLinear, compressed-tensors' formats, NVIDIA modelopt's NVFP4 and FP8, DeepSeek-V3's weight_scale_inv, and
the experts of gpt-oss as published; vLLM 0.32 creates the same parameters for each.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.tensors import Tensor, tensor

Packer = Callable[[Tensor, int, int], tuple[Tensor, ...]]
"""A weight [outputs, inputs] in, what is stored instead out."""

_LINEAR = frozenset((
    "q_proj", "k_proj", "v_proj", "o_proj", "qkv_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj",
    "gate_proj", "up_proj", "gate_up_proj", "down_proj", "w1", "w2", "w3", "c_fc", "c_proj",
))  # fmt: skip
_EVERY_LINEAR = _LINEAR | frozenset((
    "c_attn", "query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h", "out_proj", "fc1", "fc2", "fc_in", "fc_out",
    "in_proj", "x_proj", "dt_proj",
))  # fmt: skip
"""Of tools that take every linear layer, whatever the architecture: bitsandbytes."""
_FLOAT32 = frozenset(("A_log", "e_score_correction_bias", "expert_bias"))


class WeightFormat(Record):
    """One format: how a linear layer is stored, and what else changes."""

    name: str
    title: str
    pack: Packer | None
    """None: nothing is packed, everything is stored in `plain`."""
    plain: str = ""
    """The dtype of what is not packed; empty: as it is."""
    experts: bool = True
    """Whether the tool reaches the experts of a mixture."""
    shared_gate: bool = False
    """Whether it takes every linear layer: the one-row gate of shared experts, and those of older architectures."""
    note: str = ""


def _new(source: Tensor, suffix: str, shape: tuple[int, ...], dtype: str) -> Tensor:
    """A tensor beside or in place of a weight, in the same layers."""
    return tensor(f"{source.module}.{suffix}", shape, dtype, source.layers, source.each)


def _blocks(length: int, block: int) -> int:
    return -(-length // block)


def _fp8(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    return _new(w, "weight", (rows, columns), "F8_E4M3"), _new(w, "weight_scale", (), "F32")


def _fp8_static(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    return (*_fp8(w, rows, columns), _new(w, "input_scale", (), "F32"))


def fp8_blocks(height: int, width: int) -> Packer:
    """FP8 with a float32 scale for every block of `height` × `width`."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        scales = (_blocks(rows, height), _blocks(columns, width))
        return _new(w, "weight", (rows, columns), "F8_E4M3"), _new(w, "weight_scale_inv", scales, "F32")

    return pack


def by_channel(dtype: str, scale: str) -> Packer:
    """8 bits with a scale for every output (compressed-tensors)."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        return _new(w, "weight", (rows, columns), dtype), _new(w, "weight_scale", (rows, 1), scale)

    return pack


def _int8(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    return _new(w, "weight", (rows, columns), "I8"), _new(w, "SCB", (rows,), "F32")


def four_bits(*, double: bool, block: int = 64) -> Packer:
    """bitsandbytes: two weights a byte, a scale every 64; with double quantisation the scales in 8 bits."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        count = rows * columns
        scales = _blocks(count, block)
        out = [_new(w, "weight", (_blocks(count, 2), 1), "U8"), _new(w, "weight.quant_map", (16,), "F32")]
        if not double:
            return (*out, _new(w, "weight.absmax", (scales,), "F32"))
        return (
            *out,
            _new(w, "weight.absmax", (scales,), "U8"),
            _new(w, "weight.nested_absmax", (_blocks(scales, 256),), "F32"),
            _new(w, "weight.nested_quant_map", (256,), "F32"),
            _new(w, "weight.nested_offset", (), "F32"),
        )

    return pack


def awq(bits: int = 4, group: int = 128, *, zeros: bool = True) -> Packer:
    """AWQ: weights packed along the outputs into int32, a scale and a zero for every group of inputs."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        size = columns if group < 1 else next((g for g in (group, 64, 32) if g <= group and columns % g == 0), 0)
        if not size or rows % (32 // bits):
            return (w,)
        out = [_new(w, "qweight", (columns, rows * bits // 32), "I32")]
        if zeros:
            out.append(_new(w, "qzeros", (columns // size, rows * bits // 32), "I32"))
        return (*out, _new(w, "scales", (columns // size, rows), "F16"))

    return pack


def gptq(bits: int = 4, group: int = 128) -> Packer:
    """GPTQ: weights packed along the inputs into int32, a scale and a zero for every group, an index for every input."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        if columns % 32 or rows % 32:
            return (w,)
        groups = 1 if group < 1 else _blocks(columns, group)
        return (
            _new(w, "qweight", (columns * bits // 32, rows), "I32"),
            _new(w, "qzeros", (groups, rows * bits // 32), "I32"),
            _new(w, "scales", (groups, rows), "F16"),
            _new(w, "g_idx", (columns,), "I32"),
        )

    return pack


def packed_integers(bits: int, group: int, scale: str = "BF16") -> Packer:
    """compressed-tensors' pack-quantized: int32 along the inputs, a scale for every group, and the shape."""

    def pack(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
        per = 32 // bits
        groups = 1 if group < 1 else _blocks(columns, group)
        return (
            _new(w, "weight_packed", (rows, _blocks(columns, per)), "I32"),
            _new(w, "weight_scale", (rows, groups), scale),
            _new(w, "weight_shape", (2,), "I64"),
        )

    return pack


def _mxfp4(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    if columns % 32:
        return (w,)
    return _new(w, "weight_packed", (rows, columns // 2), "U8"), _new(w, "weight_scale", (rows, columns // 32), "U8")


def _nvfp4(w: Tensor, rows: int, columns: int) -> tuple[Tensor, ...]:
    if columns % 16:
        return (w,)
    return (
        _new(w, "weight", (rows, columns // 2), "U8"),
        _new(w, "weight_scale", (rows, columns // 16), "F8_E4M3"),
        _new(w, "weight_scale_2", (), "F32"),
        _new(w, "input_scale", (), "F32"),
    )


_BNB = "bitsandbytes in transformers 5 packs linear layers and leaves the experts of a mixture as they are"

FORMATS: tuple[WeightFormat, ...] = (
    WeightFormat("bf16", "2 bytes a weight", None, "BF16"),
    WeightFormat("fp16", "2 bytes a weight", None, "F16"),
    WeightFormat("fp32", "4 bytes a weight", None, "F32"),
    WeightFormat("fp8", "1 byte a weight, a scale for each layer", _fp8),
    WeightFormat("fp8-block", "1 byte a weight, a float32 scale for every 128 × 128", fp8_blocks(128, 128)),
    WeightFormat("fp8-channel", "1 byte a weight, a bf16 scale for each output", by_channel("F8_E4M3", "BF16")),
    WeightFormat("w8a8", "1 byte a weight, a bf16 scale for each output (compressed-tensors)", by_channel("I8", "BF16")),
    WeightFormat("int8", "LLM.int8(): 1 byte a weight, a float32 scale for each output (bitsandbytes)", _int8,
                 experts=False, shared_gate=True, note=_BNB),
    WeightFormat("nf4", "4 bits a weight, a float32 scale for every 64 (bitsandbytes)", four_bits(double=False),
                 experts=False, shared_gate=True, note=_BNB),
    WeightFormat("fp4", "4 bits a weight, a float32 scale for every 64 (bitsandbytes)", four_bits(double=False),
                 experts=False, shared_gate=True, note=_BNB),
    WeightFormat("nf4-dq", "nf4 with its scales in 8 bits (bitsandbytes' double quantization)", four_bits(double=True),
                 experts=False, shared_gate=True, note=_BNB),
    WeightFormat("awq", "4 bits a weight, an fp16 scale and a 4-bit zero for every 128", awq(), "F16"),
    WeightFormat("gptq", "4 bits a weight, an fp16 scale and a 4-bit zero for every 128, an index", gptq(), "F16"),
    WeightFormat("w4a16", "4 bits a weight, a bf16 scale for every 128 (compressed-tensors)", packed_integers(4, 128)),
    WeightFormat("mxfp4", "4 bits a weight, an 8-bit exponent for every 32", _mxfp4),
    WeightFormat("nvfp4", "4 bits a weight, an 8-bit scale for every 16, two float32 for each layer", _nvfp4),
)  # fmt: skip
_BY_NAME = {fmt.name: fmt for fmt in FORMATS}
_ALIASES = {"bfloat16": "bf16", "float16": "fp16", "half": "fp16", "float32": "fp32", "int4": "w4a16", "bnb-4bit": "nf4",
            "bnb-8bit": "int8", "llm.int8": "int8", "fp8-dynamic": "fp8-channel", "fp8_block": "fp8-block"}  # fmt: skip


GGUF_BITS = {
    "iq1_s": 2.0042, "iq1_m": 2.1460, "iq2_xxs": 2.3824, "iq2_xs": 2.5882, "iq2_s": 2.7403, "iq2_m": 2.9294,
    "iq3_xxs": 3.2548, "iq3_xs": 3.4977, "iq3_s": 3.6606, "iq3_m": 3.7628, "iq4_xs": 4.4597, "iq4_nl": 4.6818,
    "q2_k_s": 2.9697, "q2_k": 3.1593, "q3_k_s": 3.6429, "q3_k_m": 3.9960, "q3_k_l": 4.2979, "q4_k_s": 4.6672,
    "q4_k_m": 4.8944, "q5_k_s": 5.5704, "q5_k_m": 5.7036, "q6_k": 6.5633, "q8_0": 8.5008,
}  # fmt: skip
"""Bits a parameter of GGUF files, all tensors together, as Llama-3.1-8B has them: llama.cpp tools/quantize/README.md.

Which tensor gets which type depends on the model and on who made the file: other models are some per cent off.
"""


def weight_format(name: str) -> WeightFormat:
    """A format by name; unknown names list what there is."""
    fmt = _BY_NAME.get(_ALIASES.get(name.lower(), name.lower()))
    if fmt is None:
        raise UsageError(f"--weights-dtype: unknown format {name[:40]!r}", hint="one of " + ", ".join(_BY_NAME))
    return fmt


def is_linear(t: Tensor, fmt: WeightFormat) -> bool:
    """Whether a tensor is the weight of a layer that `fmt` packs."""
    path = t.name.split(".")
    if path[-1] != "weight" or not t.layers or len(path) < 2:
        return False
    if path[-2] == "shared_expert_gate":
        return fmt.shared_gate
    known = _EVERY_LINEAR if fmt.shared_gate else _LINEAR
    return path[-2] in known and len(t.shape) == 2 and (fmt.experts or "experts" not in path)


def convert(
    tensors: Sequence[Tensor], fmt: WeightFormat, keep: Callable[[str, int], bool] | None = None
) -> tuple[tuple[Tensor, ...], tuple[str, ...]]:
    """The tensors that `fmt` makes of unquantised ones, and lines on what it left as it was.

    `keep` tells modules that stay, by name (with N for numbers) and layer.
    """
    if fmt.pack is not None and any("indexer" in t.name.split(".") for t in tensors):
        raise ConfigError(f"what {fmt.name} makes of a sparse attention's indexer is not known", hint="bf16 or fp16")
    out: list[Tensor] = []
    left: dict[str, None] = {}
    for t in tensors:
        if fmt.pack is not None and _fused_experts(t):
            out += _pack_fused(t, fmt)
            continue
        if fmt.pack is None or not is_linear(t, fmt):
            out.append(_plain(t, fmt.plain))
            continue
        stay = tuple(layer for layer in t.layers if keep is not None and keep(t.module, layer))
        if stay:
            out.append(_plain(t.replace(layers=stay), fmt.plain))
        rest = tuple(layer for layer in t.layers if layer not in set(stay))
        if not rest:
            continue
        packed = fmt.pack(t.replace(layers=rest), *t.shape)
        if len(packed) == 1:
            left[f"{t.module.rpartition('.')[2]} ({t.shape[0]:,} × {t.shape[1]:,})"] = None
            packed = (_plain(packed[0], fmt.plain),)
        out += packed
    notes = [f"{fmt.name} does not divide and leaves as they are: {', '.join(left)}"] if left else []
    if fmt.note and any("experts" in t.name.split(".") for t in tensors):
        notes.append(fmt.note)
    return tuple(out), tuple(notes)


def _plain(t: Tensor, dtype: str) -> Tensor:
    """A tensor in another unquantised dtype; what engines keep in float32 (corrections, decays) stays."""
    if not dtype or t.dtype not in ("BF16", "F16", "F32") or t.name.rpartition(".")[2] in _FLOAT32:
        return t
    return tensor(t.name, t.shape, dtype, t.layers, t.each)


def _fused_experts(t: Tensor) -> bool:
    return len(t.shape) == 3 and "experts" in t.name.split(".")[-2:]


def _pack_fused(t: Tensor, fmt: WeightFormat) -> tuple[Tensor, ...]:
    """Experts of gpt-oss, [experts, inputs, outputs]: MXFP4 has blocks and scales of its own."""
    if not fmt.experts:
        return (t,)
    if fmt.name != "mxfp4":
        raise ConfigError(
            f"how {fmt.name} stores the fused experts of this model is not known", hint="mxfp4, bf16 or fp16"
        )
    count, inputs, outputs = t.shape
    groups = _blocks(inputs, 32)
    return (
        tensor(t.name + "_blocks", (count, outputs, groups, 16), "U8", t.layers, t.each),
        tensor(t.name + "_scales", (count, outputs, groups), "U8", t.layers, t.each),
    )

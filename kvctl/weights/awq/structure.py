"""Which linear layers of a decoder layer share their inputs, and what before them can take their scales.

A table of architectures says where things are; it has only those whose layers were compared, scales folded and not, in
float64 (tests/test_awq.py). Every layer of every model is compared again when it is quantized (kvctl.weights.layerwise).
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError
from kvctl.record import Record

if TYPE_CHECKING:
    import torch


class Architecture(Record):
    """Where a decoder layer has what; names are those of its modules."""

    attention_norm: str | None = "input_layernorm"
    """What gives the attention's inputs; None where that is no norm, but what the layer before adds up."""
    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    mlp_norm: str | None = "post_attention_layernorm"
    up: tuple[str, ...] = ("gate_proj", "up_proj")
    """The last gives the values that the others gate; one alone has both, values last."""
    down: str = "down_proj"
    parallel: bool = False
    """Attention and MLP have one norm and the same inputs."""
    norm_offset: int = 0
    """What norms add to their weights before they multiply by them."""
    mlp: str = "mlp"
    """As checkpoints call it."""
    experts: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj")
    """As checkpoints call those of an expert."""
    router: str = "gate"


_LLAMA = Architecture()
_SANDWICH = Architecture(mlp_norm="pre_feedforward_layernorm", norm_offset=1)
ARCHITECTURES: dict[str, Architecture] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "granite": _LLAMA,
    "smollm3": _LLAMA,
    "stablelm": _LLAMA,
    "gemma": Architecture(norm_offset=1),
    "gemma2": _SANDWICH,
    "gemma3_text": _SANDWICH,
    "phi3": Architecture(qkv=("qkv_proj",), up=("gate_up_proj",)),
    "cohere": Architecture(mlp_norm=None, parallel=True),
    "olmo2": Architecture(attention_norm=None, mlp_norm=None),
    "olmo3": Architecture(attention_norm=None, mlp_norm=None),
    "mixtral": Architecture(mlp="block_sparse_moe", experts=("w1", "w3", "w2")),
    "qwen2_moe": _LLAMA,
    "qwen3_moe": _LLAMA,
    "olmoe": _LLAMA,
}

_REASONS = {
    "starcoder2": "transformers looks for scales of its activation there, which vLLM does not know",
    "gpt2": "its layers are Conv1D, which no reader of AWQ knows",
    "openai-gpt": "its layers are Conv1D, which no reader of AWQ knows",
    "gpt_oss": "its experts lie in one tensor, which AWQ has no layout for; it is published in MXFP4",
    "llama4_text": "its experts lie in one tensor, which AWQ has no layout for",
    "mamba": "its mixers are no linear layers alone: how scales pass through them is not known",
    "mamba2": "its mixers are no linear layers alone: how scales pass through them is not known",
}


class Slot(Record):
    """A weight [outputs, inputs] that is packed: a parameter of a decoder layer, or a part of one."""

    name: str
    """As checkpoints call it in a layer, without .weight."""
    path: str
    """The parameter, in a layer."""
    expert: int | None = None
    rows: tuple[int, int] | None = None

    def of(self, layer: Any) -> torch.Tensor:
        """A view of it."""
        data: torch.Tensor = layer.get_parameter(self.path).data
        if self.expert is not None:
            data = data[self.expert]
        return data if self.rows is None else data[self.rows[0] : self.rows[1]]


class Fold(Record):
    """What comes before and takes the inverse of scales: a norm's weight, or the last rows of a linear layer."""

    slot: Slot
    bias: str | None
    """A parameter that is divided with it."""
    offset: int = 0
    rows: int | None = None
    """How many of its last rows; None: a norm."""

    def divide(self, layer: Any, scales: torch.Tensor) -> None:
        """Divide what it gives by `scales`."""
        weight = self.slot.of(layer)
        if self.rows is None:
            weight.add_(self.offset).div_(scales).sub_(self.offset)
        else:
            weight[-self.rows :].div_(scales[:, None])
        if self.bias is not None:
            bias = layer.get_parameter(self.bias).data
            bias[len(bias) - len(scales) :].div_(scales)


class Site(Record):
    """Layers that share inputs."""

    name: str
    slots: tuple[Slot, ...]
    source: str
    """The module whose inputs these are; of experts' down projections the experts."""
    expert: int | None = None
    """Of down projections of experts: which."""
    fold: Fold | None = None
    why_not: str = ""
    """Why nothing takes scales."""
    beside: tuple[str, ...] = ()
    """Parameters [.., inputs] that get the same inputs and are not packed."""
    repeats: tuple[int, int, int] | None = None
    """(n, times, width): inputs are n blocks that each stand there so many times."""

    def scale(self, layer: Any, scales: torch.Tensor) -> torch.Tensor:
        """Fold `scales` [inputs] into what comes before, and multiply all that gets these inputs; nothing changes.

        Returns what came before was divided by.
        """
        if self.fold is None:
            raise ValueError(f"{self.name}: {self.why_not}")
        one = scales
        if self.repeats is not None:
            count, times, width = self.repeats
            one = scales.view(count, times, width)[:, 0].reshape(-1)
        self.fold.divide(layer, one)
        for slot in self.slots:
            slot.of(layer).mul_(scales)
        for path in self.beside:
            layer.get_parameter(path).data.mul_(scales)
        return one


def architecture(config: Mapping[str, Any]) -> Architecture:
    """Where a model of this configuration has what.

    Raises:
        ConfigError: its type is none that was compared.

    """
    model_type = str(config.get("model_type"))
    found = ARCHITECTURES.get(model_type)
    if found is None:
        why = _REASONS.get(model_type, "where its layers' scales go is not known")
        raise ConfigError(f"AWQ of {model_type[:40]}: {why}", hint="known: " + ", ".join(ARCHITECTURES))
    if config.get("use_parallel_residual"):  # some of stablelm
        return found.replace(parallel=True, mlp_norm=None)
    return found


def sites(layer: Any, known: Architecture, config: Any) -> tuple[Site, ...]:
    """The sites of a decoder layer, in the order in which inputs pass them.

    Raises:
        ConfigError: it has linear layers that the table does not know.

    """
    found = (*_attention(layer, known, config), *_mlp(layer, known))
    _check_complete(layer, found)
    return found


def _linear(layer: Any, path: str) -> Slot:
    return Slot(path, f"{path}.weight")


def _bias(layer: Any, path: str) -> str | None:
    module = layer.get_submodule(path)
    return f"{path}.bias" if getattr(module, "bias", None) is not None else None


def _norm(layer: Any, name: str | None, known: Architecture) -> Fold | None:
    if name is None:
        return None
    return Fold(Slot(name, f"{name}.weight"), _bias(layer, name), known.norm_offset)


_NO_NORM = "no norm before it: scales have nowhere to go"


def _attention(layer: Any, known: Architecture, config: Any) -> Iterator[Site]:
    norm = _norm(layer, known.attention_norm, known)
    names = tuple(f"self_attn.{name}" for name in known.qkv)
    slots = tuple(_linear(layer, name) for name in names)
    if known.parallel:
        slots += tuple(_linear(layer, f"mlp.{name}") for name in known.up)
    yield Site("attention inputs", slots, names[0], None, norm, "" if norm else _NO_NORM)
    values, output = names[-1], f"self_attn.{known.output}"
    width = config.head_dim if getattr(config, "head_dim", None) else config.hidden_size // config.num_attention_heads
    heads = layer.get_submodule(output).in_features // width
    kv = getattr(config, "num_key_value_heads", None) or heads
    rows = kv * width
    bias = _bias(layer, values)
    repeats = None if kv == heads else (kv, heads // kv, width)
    if getattr(config, "clip_qkv", None) is not None:
        yield Site(
            "attention output", (_linear(layer, output),), output, why_not="values are cut off: scales do not pass"
        )
        return
    fold = Fold(_linear(layer, values), bias, rows=rows)
    yield Site("attention output", (_linear(layer, output),), output, None, fold, repeats=repeats)


def _mlp(layer: Any, known: Architecture) -> Iterator[Site]:
    if hasattr(layer.mlp, "experts"):
        yield from _experts(layer, known)
        return
    up = tuple(f"mlp.{name}" for name in known.up)
    if not known.parallel:
        norm = _norm(layer, known.mlp_norm, known)
        yield Site(
            "mlp inputs", tuple(_linear(layer, name) for name in up), up[0], None, norm, "" if norm else _NO_NORM
        )
    yield _down(layer, "mlp", known)


def _down(layer: Any, mlp: str, known: Architecture) -> Site:
    down, values = f"{mlp}.{known.down}", f"{mlp}.{known.up[-1]}"
    fold = Fold(_linear(layer, values), _bias(layer, values), rows=layer.get_submodule(down).in_features)
    return Site(f"{mlp} output", (_linear(layer, down),), down, None, fold)


def _experts(layer: Any, known: Architecture) -> Iterator[Site]:
    """Fused experts of transformers: gate_up_proj [experts, 2 * width, inputs], down_proj [experts, outputs, width]."""
    gate, up, down = known.experts
    count, width = layer.mlp.experts.down_proj.shape[0], layer.mlp.experts.down_proj.shape[2]
    paths = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
    slots: list[Slot] = []
    for expert in range(count):
        prefix = f"{known.mlp}.experts.{expert}"
        slots.append(Slot(f"{prefix}.{gate}", paths[0], expert, (0, width)))
        slots.append(Slot(f"{prefix}.{up}", paths[0], expert, (width, 2 * width)))
    beside = [f"mlp.{known.router}.weight"]
    shared = hasattr(layer.mlp, "shared_expert")
    if shared:
        slots += [_linear(layer, f"mlp.shared_expert.{name}") for name in known.up]
        beside.append("mlp.shared_expert_gate.weight")
    yield Site(
        "expert inputs", tuple(slots), "mlp.experts", None, _norm(layer, known.mlp_norm, known), "", tuple(beside)
    )
    for expert in range(count):
        name = f"{known.mlp}.experts.{expert}"
        values = slots[2 * expert + 1]
        yield Site(f"expert {expert} output", (Slot(f"{name}.{down}", paths[1], expert),), "mlp.experts", expert,
                   Fold(values, None, rows=width))  # fmt: skip
    if shared:
        yield _down(layer, "mlp.shared_expert", known)


def _check_complete(layer: Any, found: tuple[Site, ...]) -> None:
    """Refuses a layer that has matrices which no site knows."""
    known = {slot.path for site in found for slot in site.slots} | {path for site in found for path in site.beside}
    strange = [name for name, parameter in layer.named_parameters() if parameter.dim() > 1 and name not in known]
    if strange:
        raise ConfigError(f"AWQ: a layer of this model has {strange[0]}, which is not known",
                          hint="nf4, fp4 and int8 need no such knowledge")  # fmt: skip


def file_names(
    path: str, shape: tuple[int, ...], known: Architecture
) -> tuple[tuple[str, int | None, tuple[int, int] | None], ...]:
    """The tensors of a checkpoint's layer that make up a parameter: (name, expert, rows)."""
    if path == "mlp.experts.gate_up_proj":
        half = shape[1] // 2
        return tuple(
            (f"{known.mlp}.experts.{expert}.{name}.weight", expert, rows)
            for expert in range(shape[0])
            for name, rows in zip(known.experts[:2], ((0, half), (half, 2 * half)), strict=True)
        )
    if path == "mlp.experts.down_proj":
        return tuple(
            (f"{known.mlp}.experts.{expert}.{known.experts[2]}.weight", expert, None) for expert in range(shape[0])
        )
    return ((re.sub(r"^mlp\.", f"{known.mlp}.", path), None, None),)

"""The parameters that a configuration implies, by architecture: what a checkpoint of it holds.

Shapes and names are those of the published checkpoints (transformers' classes, and for mixtures of
experts one tensor an expert). Every model type here was counted against transformers 5.24 on torch's
meta device (tests/test_parameters.py); a type that is not here has no number, because a wrong
one would look like a right one.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from kvctl.engines.widths import EXPERTS
from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.tensors import Tensor, tensor

Layers = tuple[int, ...]

STANDARD = ("input_layernorm", "post_attention_layernorm")
LAYER = "model.layers.N."

# Who writes the parameters of which model types; types in `dense.DENSE` are written by `dense:dense`.
_WRITERS = {
    "latent:latent": "deepseek_v2 deepseek_v3 kimi_k2 glm4_moe_lite axk1 deepseek_v32 glm_moe_dsa",
    "hybrid:gated_delta": "qwen3_next qwen3_5_text qwen3_5_moe_text",
    "hybrid:nemotron_h": "nemotron_h",
    "hybrid:granite_hybrid": "granitemoehybrid",
    "hybrid:falcon_h1": "falcon_h1",
    "hybrid:lfm2": "lfm2 lfm2_moe",
    "hybrid:gpt_neox": "gpt_neox",
    "vision:qwen3_vl": "qwen3_vl qwen3_vl_moe qwen3_5 qwen3_5_moe",
    "vision:gemma3": "gemma3",
    "vision:qwen2_vl": "qwen2_vl qwen2_5_vl",
}
_WRITER_OF = {name: writer for writer, names in _WRITERS.items() for name in names.split()}


def parameters(config: Mapping[str, Any], dtype: str = "BF16", *, whole: bool = True) -> tuple[Tensor, ...]:
    """Every parameter of the model that `config` describes, stored in `dtype`.

    `whole`: the file is the model's own, so that what it leaves out is its class's default;
    else a size that is not in the file is not known.

    Raises:
        ConfigError: the architecture is not known here, or the file does not say enough.

    """
    root = Fields(config)
    f = text_fields(root)
    writer = _WRITER_OF.get(root.type)
    if writer is None and root.type != f.type:
        raise ConfigError(
            f"the parameters of {root.type[:60] or 'this wrapper'} beside its language model's are not known"
        )
    if writer is None:
        from kvctl.parameters.dense import DENSE

        writer = "dense:dense" if f.type in DENSE else None
    if writer is None:
        raise ConfigError(f"the parameters of {f.type[:60] or 'an unnamed type'} are not known from its configuration")
    model = Model(root, f, dtype, whole)
    write(model, writer)
    return tuple(model.tensors)


def write(model: Model, writer: str) -> None:
    """Let a writer, "module:function", add its tensors."""
    module, _, function = writer.partition(":")
    getattr(import_module(f"kvctl.parameters.{module}"), function)(model)


def tied(root: Fields, text: Fields) -> bool:
    """Whether the head reads the embeddings."""
    if "tie_embedding" in text.raw:  # LFM2's name for it
        return text.flag("tie_embedding")
    return root.flag("tie_word_embeddings") if "tie_word_embeddings" in root.raw else text.flag(
        "tie_word_embeddings", default=True)  # fmt: skip


def layer_count(f: Fields) -> int:
    """Layers, by number or by a list of their kinds."""
    listed = f.entries("layers_block_type") if f.type == "nemotron_h" else None
    return f.layers() if listed is None else len(listed)


class Model:
    """A list of tensors that grows, and the configuration's sizes."""

    def __init__(self, root: Fields, f: Fields, dtype: str, whole: bool) -> None:
        self.root, self.f, self.dtype, self.whole = root, f, dtype, whole
        self.tensors: list[Tensor] = []
        self.all: Layers = tuple(range(layer_count(f)))
        self.hidden = self.size("hidden_size")

    def size(self, name: str, minimum: int = 1) -> int:
        """A size that the file has to name, unless its class's defaults count too."""
        name = self._called(name)
        value = self.f.number(name, minimum=minimum)
        if not self.whole and self.f.read[self.f.path + self.f.stored_name(name)] != "config":
            raise ConfigError(f"{self.f.path}{name} is not in the source of this configuration")
        return value

    def _called(self, name: str) -> str:
        """What the file calls a number that has several names: model tables have one for all architectures."""
        if self.whole or name not in EXPERTS or name in self.f.raw or self.f.stored_name(name) in self.f.raw:
            return name
        return next((other for other in EXPERTS if self.f.raw.get(other) is not None), name)

    def flag(self, name: str) -> bool:
        return name == "yes" or (bool(name) and self.f.flag(name.removeprefix("+"), default=name.startswith("+")))

    def add(self, name: str, *shape: int, layers: Layers = (), each: int = 1, dtype: str = "") -> None:
        if each and all(shape):
            self.tensors.append(tensor(name, shape, dtype or self.dtype, layers, each))

    def linear(self, name: str, rows: int, columns: int, layers: Layers, bias: bool = False, each: int = 1) -> None:
        """A weight [rows, columns] and perhaps a bias, in each of `layers`."""
        if not layers:
            return
        self.add(name + ".weight", rows, columns, layers=layers, each=each)
        if bias:
            self.add(name + ".bias", rows, layers=layers, each=each)

    def norm(self, name: str, length: int, layers: Layers | None = None, bias: bool = False) -> None:
        """A norm's weight and perhaps a bias; `layers` None: it stands outside of the layers."""
        if layers == ():
            return
        self.add(name + ".weight", length, layers=layers or ())
        if bias:
            self.add(name + ".bias", length, layers=layers or ())

    def embeddings(self, head_bias: bool = False, name: str = "model.embed_tokens", head: str = "lm_head") -> None:
        """The vocabulary's rows, and the head's where it has its own."""
        vocabulary = self.size("vocab_size")
        self.add(name + ".weight", vocabulary, self.hidden)
        if not tied(self.root, self.f):
            self.add(head + ".weight", vocabulary, self.hidden)
        if head_bias:
            self.add("lm_head.bias", vocabulary)

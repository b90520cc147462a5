"""Static scales of an FP8 KV cache: what engines divide keys and values by before they cast them to e4m3.

`kv_calibrate` chooses them, `kv_measure` says what they cost through a real cache, `kv_write` writes them into a
checkpoint, `kvctl.sources.kv_scales` reads those of one.
"""

from __future__ import annotations

from kvctl.errors import ConfigError
from kvctl.record import Record
from kvctl.spec import Attention, CrossAttention, ModelSpec
from kvctl.techniques import Technique
from kvctl.techniques.codecs.floats import Fp8
from kvctl.techniques.store import Packing, Store

LARGEST = 448.0
"""The largest number of e4m3 (OCP 8-bit floating point, revision 1.0)."""
TENSOR, HEAD = "tensor", "attn_head"
"""compressed-tensors' words: one scale a layer, or one for each KV head of it."""

WRITABLE = (None, "compressed-tensors", "fp8")
"""Methods of weights beside which kvctl writes scales that vLLM and SGLang read; None: weights that are not quantized."""
OWN_TOOL = ("modelopt", "modelopt_fp4", "modelopt_mixed", "quark")
"""Methods whose own tool writes scales with the weights. With all others engines pass over scales of the cache."""


class LayerScales(Record):
    """Of one decoder layer: one scale, or one for each KV head."""

    layer: int
    keys: tuple[float, ...]
    values: tuple[float, ...]


class Scales(Record):
    """Of all layers that keep keys and values."""

    layers: tuple[LayerScales, ...]
    strategy: str = TENSOR

    def technique(self, name: str, spec: ModelSpec) -> Technique:
        """A cache that rounds as engines do with these scales."""
        own = {one.layer: one for one in self.layers}
        plain = Store(Packing(Fp8("fp8")), Packing(Fp8("fp8")))
        stores = tuple(
            Store(Packing(Fp8("fp8", scales=own[index].keys)), Packing(Fp8("fp8", scales=own[index].values)))
            if index in own else plain
            for index in range(len(spec.layers))
        )  # fmt: skip
        return Technique(name, plain, stores=stores)


def layers_of(spec: ModelSpec) -> tuple[int, ...]:
    """The layers whose keys and values have scales, by number.

    Raises:
        ConfigError: a layer keeps something that k_scale and v_scale do not describe, or nothing has keys and values.

    """
    found = []
    for index, layer in enumerate(spec.layers):
        for state in layer.states:
            if isinstance(state, CrossAttention) or state.kind in (
                "latent_attention",
                "compressed_attention",
                "shared",
            ):
                raise ConfigError(f"{spec.id}: layer {index} keeps {state.kind.replace('_', ' ')}: "
                                  "FP8 scales are calibrated of keys and values of a layer's own",
                                  hint=None if "attention" in state.kind else "without -o, --kv measures what a format costs")  # fmt: skip
            if isinstance(state, Attention):
                if not state.value_dim:
                    raise ConfigError(
                        f"{spec.id}: layer {index} keeps keys that are its values too: no engine has scales for that"
                    )
                found.append(index)
    if not found:
        raise ConfigError(f"{spec.id} keeps no keys and values: there is nothing to scale")
    return tuple(found)

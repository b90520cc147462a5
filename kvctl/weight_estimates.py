"""Bytes of weights by their published number, where the tensors of an architecture are not known but the format is.

An estimate, and it says so: embeddings and the head stay in 16 bits, everything else is as the format has linear layers.
Norms and routers, which stay, too, are left out of that: thousandths of a model. For 4 bits that holds only where the experts of a mixture are
nearly all of it. Counted so, DeepSeek-V3's 684.5 billion come within 0.5% of the bytes of its files (tests/test_weight_estimates.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from kvctl.engines.widths import base, widths
from kvctl.errors import ConfigError
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.formats import DType
from kvctl.reports import WeightsInfo
from kvctl.spec import ModelSpec, RecurrentState
from kvctl.tensors import tensor
from kvctl.weight_formats import WeightFormat, weight_format

if TYPE_CHECKING:
    from kvctl.rank_weights import Split

_EIGHT_BITS = frozenset(("fp8", "fp8-block", "fp8-channel", "w8a8", "float-quantized", "int-quantized"))
_SOME_LAYERS = (
    "decoder_sparse_step",
    "moe_layer_freq",
    "interleave_moe_layer_step",
    "moe_layer_interval",
    "moe_every_n_layers",
)
"""What tells that some layers alone have experts, where it is not 1."""
_MOSTLY_EXPERTS = 0.9
"""Share of the parameters that routed experts need to have for an estimate of fewer bits."""


def estimated(
    spec: ModelSpec,
    dtype: DType,
    fmt: WeightFormat,
    keep: Callable[[str, int], bool] | None = None,
    ranks: Split | None = None,
) -> WeightsInfo:
    """The weights of `spec` in `fmt`; `keep` tells modules that stay in 16 bits.

    On `ranks` that each have all of attention, routed experts are shared out over all, and the rest is on each; on others the
    shares are equal, which is not written here.

    Raises:
        ConfigError: their number is not known, or nothing sound follows from it.

    """
    if any(isinstance(state, RecurrentState) for layer, _ in spec.groups for state in layer.states):
        raise ConfigError(f"what {fmt.name} leaves of its recurrent layers is not known")
    count = spec.weights.parameters if spec.weights is not None else None
    if count is None:
        from kvctl.parameters import parameters

        count = sum(one.elements * one.count for one in parameters(spec.config, whole=spec.whole))
    f = text_fields(Fields(spec.config))
    hidden, vocabulary, _ = base(spec, f)
    table = hidden * vocabulary
    tables = table if f.flag("tie_word_embeddings") else 2 * table
    if not table or tables > count:
        raise ConfigError("the sizes of its embeddings are not in the configuration")
    how = fmt
    if spec.whole and f.get("expert_dtype") == "fp4":  # DeepSeek-V4: what quantization_config says is of all else
        how = weight_format("mxfp4")
    eight = how.name in _EIGHT_BITS
    experts = _routed(spec)
    if not eight and not _MOSTLY_EXPERTS * count <= (experts or 0) < count:
        raise ConfigError(f"what {fmt.name} makes of it is not known from its number of parameters")
    rest = float(dtype.bytes) if keep is not None and keep("model.layers.N.self_attn.o_proj", 1) else _each(fmt, hidden)
    if experts is not None and experts > count - tables:
        experts = None
    spread = (experts or 0) * _each(how, hidden)
    size = spread + (count - (experts or 0) - tables) * rest + tables * dtype.bytes
    else_in = "16 bits" if rest == dtype.bytes else fmt.name
    words = (
        fmt.name if how.name in _EIGHT_BITS or how.name == else_in else f"{how.name} for its experts, {else_in} else"
    )
    info = WeightsInfo(round(size), count, f"estimated: {count:,} parameters as if stored in {words}", fmt.name)
    if ranks is None or ranks.data == 1 or experts is None:
        return info
    group = ranks.tensor * ranks.pipeline
    over = group * ranks.data if ranks.expert else group
    return info.replace(per_rank=(round(spread / over + (size - spread) / group),) * group)


def _routed(spec: ModelSpec) -> int | None:
    """Parameters of the routed experts, three matrices each; 0 for a dense model, None where that is not known."""
    try:
        wide = widths(spec)
    except ConfigError:
        return None
    f = text_fields(Fields(spec.config))
    if wide.experts > 1 and any(f.get(name) not in (None, 1) for name in _SOME_LAYERS):
        return None
    return (len(spec.layers) - wide.dense) * wide.experts * 3 * wide.hidden * wide.expert


def _each(fmt: WeightFormat, hidden: int) -> float:
    """Bytes of a parameter of a square matrix of the model's width, with its scales."""
    if fmt.pack is None:
        raise ConfigError(f"{fmt.name} packs nothing")
    packed = fmt.pack(tensor("model.layers.N.mlp.up_proj.weight", (hidden, hidden), "BF16", (0,)), hidden, hidden)
    return sum(one.total for one in packed) / hidden**2

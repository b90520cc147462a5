"""Models that vLLM does not serve, and those whose layers it stores in ways of their own.

Sources: vllm 0.8.5 to 0.33.0 model_executor/models/registry.py; 0.33.0 models/inkling/nvidia/sconv_swa_attn.py and
models/minimax_m3/common/indexer.py.
"""

from __future__ import annotations

from collections.abc import Mapping

from kvctl.engines.states import not_known
from kvctl.engines.vllm.specs import Spec, Told
from kvctl.engines.vllm.specs import specs_of as plain_specs
from kvctl.errors import ConfigError, UsageError
from kvctl.spec import Attention, ConvState, Formats, Indexer, Layer, ModelSpec, RecurrentState

_NEVER = ("recurrent_gemma", "rwkv", "rwkv5", "rwkv6", "rwkv7", "xlstm", "baichuan_m1", "deepseek_ref")
_UNTIL = {"mllama": (0, 10), "minimax": (0, 23), "minimax_text_01": (0, 23), "minimax_m1": (0, 23)}
"""The last version that had a model type, of those that no other code in vLLM runs."""
_FIRST = {"inkling_mm_model": (0, 26), "inkling_text": (0, 26), "minimax_m3_vl_text": (0, 24), "minimax_m3_vl": (0, 24)}  # fmt: skip
"""The first version that has a model type, of those below."""
INKLING = ("inkling_mm_model", "inkling_text")
MINIMAX_M3 = ("minimax_m3_vl_text", "minimax_m3_vl")
_KDA_CHECKPOINTS = {"kimi_k3": "kda", "glm5_next_text": "glm", "glm5_next": "glm"}
"""Model types whose delta layers make checkpoints, by whose rule; those of Kimi Linear, of other code, make none."""
MINIMAX_M3_BLOCK = 128
"""Tokens of a block: those of a block of its sparse attention."""


def check_served(spec: ModelSpec, version: tuple[int, int]) -> None:
    """Refuses a model that this version does not run.

    Raises:
        ConfigError: such a model.

    """
    kind = spec.model_type
    hint = "--engine ideal says what the architecture needs"
    if kind in _NEVER:
        raise ConfigError(f"{spec.id}: vLLM does not serve {kind}", hint=hint)
    if version > _UNTIL.get(kind, version):
        last = _UNTIL[kind]
        raise ConfigError(f"{spec.id}: vLLM {version[0]}.{version[1]} does not serve {kind}; {last[0]}.{last[1]} was the "
                          "last that did", hint=hint)  # fmt: skip
    if version < _FIRST.get(kind, version):
        first = _FIRST[kind]
        raise ConfigError(f"{spec.id}: vLLM {version[0]}.{version[1]} does not serve {kind}",
                          hint=f"vLLM {first[0]}.{first[1]} and later do")  # fmt: skip
    if spec.cross_input == "encoder" and version >= (0, 11):
        raise ConfigError(f"{spec.id}: vLLM serves no encoder-decoder of text since 0.11", hint=hint)


def least_batched(spec: ModelSpec, version: tuple[int, ...]) -> int:
    """Tokens that a batch has at least, without being told: those of the longest input that is not to be cut."""
    text = spec.config.get("text_config")
    whole = isinstance(text, Mapping) and text.get("use_bidirectional_attention") == "vision"
    if spec.model_type not in ("gemma4", "gemma4_unified") or not whole or version < (0, 22):
        return 0
    # A video of 32 frames: 70 positions each, and 8 around them.
    return 32 * (70 + 8)


def specs_of(
    layer: Layer, spec: ModelSpec, fmt: Formats, ranks: int, cpu: bool, drafted: int = 0, dtypes: Told | None = None
) -> list[Spec]:
    """Specs of one layer, whichever model it is of."""
    states = layer.states_in("vllm")
    if spec.model_type in INKLING:
        attention = [state for state in states if isinstance(state, Attention)]
        convolutions = [state for state in states if isinstance(state, ConvState)]
        if cpu or len(attention) != 1 or len(convolutions) != 4:
            raise not_known(spec, states[-1], "vLLM")
        return [_conv_window(attention[0], convolutions, ranks),
                *plain_specs(Layer((attention[0],)), spec, fmt, ranks, cpu)]  # fmt: skip
    if spec.model_type in MINIMAX_M3:
        keys = [state for state in states if isinstance(state, Indexer)]
        if cpu and keys:
            raise not_known(spec, keys[0], "vLLM")
        rest = Layer(tuple(state for state in states if not isinstance(state, Indexer)))
        # Keys of the index are in bf16, whatever the cache's format.
        return plain_specs(rest, spec, fmt, ranks, cpu) + [Spec("indexer", 2 * state.dim, 0) for state in keys]
    specs = plain_specs(layer, spec, fmt, ranks, cpu, drafted, dtypes)
    kind = _KDA_CHECKPOINTS.get(spec.model_type)
    if kind and any(isinstance(state, RecurrentState) and state.shape[-1] == 128 for state in states):
        return [item.replace(checkpoints=kind) if item.kind == "state" else item for item in specs]
    return specs


def _conv_window(attention: Attention, convolutions: list[ConvState], ranks: int) -> Spec:
    """Inkling's short convolutions: inputs of all four as one window, so wide a KV head as the next power of two."""
    heads, kernel = attention.kv_heads, convolutions[0].kernel
    if ranks > heads or heads % ranks:
        raise UsageError(f"--tensor-parallel-size {ranks} does not divide {heads} KV heads",
                         hint="vLLM refuses this split")  # fmt: skip
    # Keys and values of a head, and its share of the outputs of attention and of the MLP; in bf16 always.
    width = 1 << (sum(state.channels // heads for state in convolutions) - 1).bit_length()
    return Spec("window", heads // ranks * width * 2, kernel, kernel, shape=(heads // ranks, width, 0))

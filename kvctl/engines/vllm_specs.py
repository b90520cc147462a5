"""What one block of one layer is in vLLM: formats, heads on a rank, states.

Sources: vllm 0.32.0 model_executor/layers/attention, layers/mamba/mamba_utils.py, config/cache.py.
"""

from __future__ import annotations

from kvctl.engines import IDEAL
from kvctl.engines.states import not_known, plain_attention
from kvctl.errors import UsageError
from kvctl.formats import BF16, FP16, FP32, CacheFormat, DType, cache_format, plain
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    ConvState,
    Empty,
    Formats,
    Indexer,
    LatentAttention,
    Layer,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)

_FP8, _PER_HEAD = cache_format("fp8"), cache_format("int8_per_token_head")
_DS_MLA = CacheFormat("fp8_ds_mla", 576, 656, "656 bytes a token: 512 fp8, 4 fp32 scales, 64 bf16 of the rotary key")

KV_DTYPES: dict[str, CacheFormat] = {
    "float16": plain(FP16),
    "bfloat16": plain(BF16),
    **{name: _FP8.replace(name=name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")},
    "fp8_ds_mla": _DS_MLA,
    "fp8_per_token_head": cache_format("fp8_per_token_head"),
    "int8_per_token_head": _PER_HEAD,
    "int4_per_token_head": CacheFormat(
        "int4_per_token_head",
        2,
        1,
        "1 byte per 2 elements + a 4-byte scale for each token and KV head",
        _PER_HEAD.head_bytes,
    ),
    "nvfp4": cache_format("nvfp4"),
}
"""What --kv-cache-dtype takes. vLLM also has packed formats (turboquant_*, ultraquant_4bit,
nvfp4_ds_mla) that are not counted here yet."""

_UNCOUNTED = ("nvfp4_ds_mla", "turboquant_k8v4", "turboquant_4bit_nc", "turboquant_k3v4_nc", "turboquant_3bit_nc",
              "ultraquant_4bit", "nvfp4_4over6")  # fmt: skip


def kv_dtype(name: str, option: str) -> CacheFormat:
    """The cache format that vLLM's --kv-cache-dtype `name` means; unknown ones list what there is."""
    if option in ("--k-dtype", "--v-dtype"):
        raise UsageError(
            "vllm keeps keys and values in one format", hint="--kv-cache-dtype instead of --k-dtype, --v-dtype"
        )
    fmt = KV_DTYPES.get(name.lower())
    if fmt is None:
        known = name.lower() in _UNCOUNTED
        raise UsageError(
            f"{option}: {name[:40]!r} is "
            + ("a format of vLLM that kvctl does not count yet" if known else "no format that vLLM has"),
            hint="one of auto, " + ", ".join(KV_DTYPES),
        )
    return fmt


class Spec(Record):
    """One block of one layer. `limit`: window or chunk; equal specs share a group."""

    kind: str
    """full, latent, indexer, window, chunk or state."""
    token_bytes: int
    """Bytes of one token; 0 for states."""
    block: int
    limit: int = 0
    step: int = 32
    """What a CPU's window kernel wants a block to be a multiple of."""
    page: int = 0
    """Bytes of a block, padding included."""
    checkpoints: int = 0

    @property
    def grows(self) -> bool:
        return self.kind in ("full", "latent", "indexer")


def sized(spec: Spec, block: int) -> Spec:
    return spec.replace(block=block, page=block * spec.token_bytes)


def _heads(heads: int, ranks: int) -> int:
    """KV heads on one rank; vLLM repeats them once ranks outnumber them."""
    if heads % ranks and ranks % heads:
        raise UsageError(
            f"--tensor-parallel-size {ranks} neither divides {heads} KV heads nor is a multiple of them",
            hint="vLLM refuses this split",
        )
    return max(1, heads // ranks)


def _divide(count: int, ranks: int, what: str) -> int:
    if count % ranks:
        raise UsageError(
            f"--tensor-parallel-size {ranks} does not divide {count:,} {what}", hint="vLLM refuses this split"
        )
    return count // ranks


_CONFIG_STATES = ("nemotron_h", "qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text")
"""Model types whose state dtype vLLM takes from the config; others follow the model's dtype."""


def _state_bytes(
    states: list[ConvState | RecurrentState], model_type: str, fmt: Formats, ranks: int
) -> tuple[int, int]:
    """Bytes of one request's convolution and recurrent state on one rank, and Mamba 2's checkpoint blocks."""
    total, checkpoints = 0, 0
    for state in states:
        if isinstance(state, ConvState):
            channels = state.channels
            groups, width = state.groups
            if groups % ranks:
                # Heads on each rank need their group with them: groups are repeated.
                if groups != 1:
                    raise UsageError(
                        f"--tensor-parallel-size {ranks} does not divide {groups} state groups",
                        hint="vLLM refuses this split",
                    )
                channels += (ranks - 1) * width
            columns = state.columns(IDEAL.retention)
            total += _divide(channels, ranks, "channels of the convolution") * columns * fmt.model.bytes
        else:
            dtype: DType = fmt.model
            if state.name == "kda":
                dtype = FP32
            elif model_type in _CONFIG_STATES and state.dtype is not None:
                dtype = state.dtype
            total += (
                _divide(state.shape[0], ranks, "heads of the state") * (state.elements // state.shape[0]) * dtype.bytes
            )
            checkpoints = int(state.name == "ssm" and len(state.shape) == 3)
    return total, checkpoints


def _latent_row(state: LatentAttention, fmt: CacheFormat) -> int:
    """Bytes of one token's latent."""
    width = state.latent + state.rope
    if fmt.name == _DS_MLA.name and width != _DS_MLA.block:
        raise UsageError(f"--kv-cache-dtype fp8_ds_mla is for latents of 512 + 64, not of {width}")
    if fmt.name == "nvfp4":
        raise UsageError("vLLM does not keep latents in nvfp4", hint="--kv-cache-dtype fp8")
    # Two scales, as if there were values of their own.
    return fmt.row_bytes(width, 0) + 2 * fmt.head_bytes


def _attention(state: Attention, fmt: Formats, heads: int, cpu: bool) -> Spec:
    keys, values = heads * state.key_dim, heads * state.value_dim
    if cpu and fmt.key.name in KV_DTYPES and fmt.key.name not in ("float16", "bfloat16"):
        # The CPU's kernel packs nothing and stores no scales beside the rows: a byte an element.
        token = keys + values
    else:
        token = fmt.key.row_bytes(keys, heads) + fmt.value.row_bytes(values, heads)
    # Keys and values of different widths run on a kernel of their own.
    step = 32 if state.key_dim == state.value_dim else 16
    if isinstance(state, SlidingWindow):
        return Spec("window", token, 0, state.window, step)
    if isinstance(state, ChunkedAttention):
        return Spec("chunk", token, 0, state.chunk)
    return Spec("full", token, 0)


_STATES = {("conv",), ("conv", "delta"), ("conv", "kda"), ("conv", "ssm")}


def specs_of(layer: Layer, spec: ModelSpec, fmt: Formats, ranks: int, cpu: bool) -> list[Spec]:
    """Specs of one layer, block size still open (0)."""
    specs: list[Spec] = []
    states: list[ConvState | RecurrentState] = []
    for state in layer.states_in("vllm"):
        if isinstance(state, Empty):
            continue
        if isinstance(state, (ConvState, RecurrentState)):
            states.append(state)
        elif isinstance(state, LatentAttention) and state.window is None:
            specs.append(Spec("latent", _latent_row(state, fmt.key), 0))
        elif isinstance(state, Indexer) and state.stride == 1 and state.dim % 128 == 0 and specs:
            # Keys in fp8 with one fp32 scale for every 128, whatever the cache's format.
            specs.append(Spec("indexer", state.dim + state.dim // 128 * 4, 0))
        elif (attention := plain_attention(state)) is not None:
            if fmt.key.name == _DS_MLA.name:
                raise UsageError(
                    "--kv-cache-dtype fp8_ds_mla is for latent attention; this model keeps keys and values"
                )
            specs.append(_attention(attention, fmt, _heads(attention.kv_heads, ranks), cpu))
        else:
            raise not_known(spec, state, "vLLM")
    if states:
        names = tuple("conv" if isinstance(s, ConvState) else s.name for s in states)
        if names not in _STATES or (names == ("conv",) and specs):
            raise not_known(spec, states[-1], "vLLM")
        page, checkpoints = _state_bytes(states, spec.model_type, fmt, ranks)
        specs.append(Spec("state", 0, 0, page=page, checkpoints=checkpoints))
    return specs

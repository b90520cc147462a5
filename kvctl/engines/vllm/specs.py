"""What one block of one layer is in vLLM: formats, heads on a rank, states.

Sources: vllm 0.32.0 model_executor/layers/attention, layers/mamba/mamba_utils.py, config/cache.py.
"""

from __future__ import annotations

from kvctl.engines import IDEAL
from kvctl.engines.states import not_known, plain_attention
from kvctl.engines.versions import dotted
from kvctl.engines.vllm.rules import minor_of
from kvctl.errors import UsageError
from kvctl.formats import BF16, FP16, FP32, CacheFormat, DType, cache_format, plain
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    ConvState,
    CrossAttention,
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
_NVFP4_DS_MLA = CacheFormat(
    "nvfp4_ds_mla", 576, 352, "352 bytes a token: 512 fp4, their scales, 64 bf16 of the rotary key"
)


def _turbo(name: str, key_bits: int, value_bits: int) -> CacheFormat:
    """A packed format: bits an element, and 2 (keys) and 4 bytes (values) of a token's head for norm, scale and zero."""
    values = CacheFormat(name, 8, value_bits, f"values of {value_bits} bits + 4 bytes for each token and KV head", 4)
    keys = f"keys of {key_bits} bits" + ("" if key_bits == 8 else " + 2 bytes for each token and KV head")
    return CacheFormat(name, 8, key_bits, keys, 0 if key_bits == 8 else 2, values)


KV_DTYPES: dict[str, CacheFormat] = {
    "float16": plain(FP16),
    "bfloat16": plain(BF16),
    **{name: _FP8.replace(name=name) for name in ("fp8", "fp8_e4m3", "fp8_e5m2", "fp8_inc")},
    "fp8_ds_mla": _DS_MLA,
    "nvfp4_ds_mla": _NVFP4_DS_MLA,
    "turboquant_k8v4": _turbo("turboquant_k8v4", 8, 4),
    "turboquant_4bit_nc": _turbo("turboquant_4bit_nc", 4, 4),
    "turboquant_k3v4_nc": _turbo("turboquant_k3v4_nc", 3, 4),
    "turboquant_3bit_nc": _turbo("turboquant_3bit_nc", 3, 3),
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
    "nvfp4_4over6": cache_format("nvfp4").replace(name="nvfp4_4over6"),
}
"""What --kv-cache-dtype takes. vLLM also has packed formats of ROCm (octave_*, ultraquant_4bit)
that are not counted here."""

_SINCE = {
    "fp8_inc": (0, 10), "bfloat16": (0, 11), "fp8_ds_mla": (0, 12), "float16": (0, 18), "int4_per_token_head": (0, 25),
    "nvfp4_4over6": (0, 28), "nvfp4_ds_mla": (0, 30), "ultraquant_4bit": (0, 32), "octave_k3v4": (0, 33),
    "octave_k3v3": (0, 33), "octave_k3v3_compact": (0, 33),
    **{name: (0, 20) for name in KV_DTYPES if name.startswith("turboquant") or name in (
        "int8_per_token_head", "fp8_per_token_head", "nvfp4")},
}  # fmt: skip
_UNCOUNTED = ("octave_k3v4", "octave_k3v3", "octave_k3v3_compact", "ultraquant_4bit")


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that --kv-cache-dtype `name` means to a version of vLLM; unknown ones list what there is."""
    if option in ("--k-dtype", "--v-dtype"):
        raise UsageError(
            "vllm keeps keys and values in one format", hint="--kv-cache-dtype instead of --k-dtype, --v-dtype"
        )
    asked = minor_of(version)
    low = name.lower()
    has = [known for known in KV_DTYPES if _SINCE.get(known, (0, 0)) <= asked]
    if low in has:
        return KV_DTYPES[low]
    if low in _UNCOUNTED and _SINCE[low] <= asked:
        what = "a format of vLLM that kvctl does not count yet"
    else:
        what = f"not known of vLLM {dotted(asked)}" if low in _SINCE else f"no format that vLLM {dotted(asked)} has"
    raise UsageError(f"{option}: {name[:40]!r} is {what}", hint="one of auto, " + ", ".join(has))


def fp8_key(dim: int) -> int:
    """Bytes of an indexer's key: fp8 with one fp32 scale for every 128, whatever the cache's format."""
    return dim + dim // 128 * 4


def is_packed(fmt: Formats) -> bool:
    """Whether keys and values of a head lie in one packed slot."""
    return fmt.key.name.startswith("turboquant")


class Spec(Record):
    """One block of one layer. `limit`: window, chunk or encoder's positions; equal specs share a group."""

    kind: str
    """full, latent, indexer, tail, window, chunk, state, cross or compressor."""
    token_bytes: int
    """Bytes of one token; 0 for states."""
    block: int
    limit: int = 0
    step: int = 32
    """What a CPU's window kernel wants a block to be a multiple of."""
    page: int = 0
    """Bytes of a block, padding included."""
    shape: tuple[int, ...] = ()
    """Heads on this rank and their widths: layers that differ in them share no group, whatever they take."""
    stride: int = 1
    """Tokens that one entry stands for; `token_bytes` are those of an entry."""
    checkpoints: str = ""
    """ssd, delta, kda or glm: whose rule about checkpoints of the prefill holds."""

    @property
    def grows(self) -> bool:
        return self.kind in ("full", "latent", "indexer")


def sized(spec: Spec, block: int) -> Spec:
    return spec.replace(block=block, page=block // spec.stride * spec.token_bytes)


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


class Told(Record):
    """Dtypes of recurrent layers' states where options name them (--mamba-cache-dtype, --mamba-ssm-cache-dtype)."""

    conv: DType | None = None
    recurrent: DType | None = None


_NAMED = {"float32": FP32, "float16": FP16, "bfloat16": BF16}


def told(conv: str | None, recurrent: str | None) -> Told:
    """What the options say; "auto" says nothing."""
    return Told(_NAMED.get(conv or ""), _NAMED.get(recurrent or ""))


def _state_bytes(
    states: list[ConvState | RecurrentState], model_type: str, fmt: Formats, ranks: int, drafted: int, dtypes: Told
) -> int:
    """Bytes of one request's convolution and recurrent state on one rank, with room for `drafted` tokens."""
    total = 0
    usual = dtypes.conv or fmt.model
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
            columns = state.columns(IDEAL.retention) + drafted
            total += _divide(channels, ranks, "channels of the convolution") * columns * usual.bytes
        else:
            dtype: DType = usual
            if dtypes.recurrent is not None:
                dtype = dtypes.recurrent
            elif state.name == "kda":
                dtype = FP32
            elif model_type in _CONFIG_STATES and state.dtype is not None:
                dtype = state.dtype
            total += (
                _divide(state.shape[0], ranks, "heads of the state") * (state.elements // state.shape[0]) * dtype.bytes
            )
    return total


def _checkpoints(state: ConvState | RecurrentState) -> str:
    """Whose rule says whether a prefill reserves a block for a checkpoint: that of Mamba 2 or of gated delta layers."""
    if not isinstance(state, RecurrentState):
        return ""
    return "delta" if state.name == "delta" else "ssd" if state.name == "ssm" and len(state.shape) == 3 else ""


def _latent_row(state: LatentAttention, fmt: CacheFormat) -> int:
    """Bytes of one token's latent."""
    width = state.latent + state.rope
    if fmt.name.endswith("_ds_mla") and width != fmt.block:
        raise UsageError(f"--kv-cache-dtype {fmt.name} is for latents of 512 + 64, not of {width}")
    if fmt.name in ("nvfp4", "nvfp4_4over6") or fmt.name.startswith("turboquant"):
        raise UsageError(f"vLLM does not keep latents in {fmt.name}", hint="--kv-cache-dtype fp8")
    # Two scales, as if there were values of their own.
    return fmt.row_bytes(width, 0) + 2 * fmt.head_bytes


def _attention(state: Attention, fmt: Formats, heads: int, cpu: bool) -> Spec:
    keys, values = heads * state.key_dim, heads * state.value_dim
    if cpu and fmt.key.name in KV_DTYPES and fmt.key.name not in ("float16", "bfloat16"):
        # The CPU's kernel packs nothing and stores no scales beside the rows: a byte an element.
        token = keys + values
    elif fmt.key.name.startswith("turboquant"):
        # A head's slot holds key and value and has an even number of bytes.
        slot = fmt.key.row_bytes(state.key_dim) + fmt.value.row_bytes(state.value_dim)
        token = heads * (slot + slot % 2)
    else:
        token = fmt.key.row_bytes(keys, heads) + fmt.value.row_bytes(values, heads)
    shape = (heads, state.key_dim, state.value_dim)
    # Keys and values of different widths run on a kernel of their own.
    step = 32 if state.key_dim == state.value_dim else 16
    if isinstance(state, SlidingWindow):
        return Spec("window", token, 0, state.window, step, shape=shape)
    if isinstance(state, ChunkedAttention):
        return Spec("chunk", token, 0, state.chunk, shape=shape)
    return Spec("full", token, 0, shape=shape)


_STATES = {("conv",), ("conv", "delta"), ("conv", "kda"), ("conv", "ssm")}


def specs_of(
    layer: Layer, spec: ModelSpec, fmt: Formats, ranks: int, cpu: bool, drafted: int = 0, dtypes: Told | None = None
) -> list[Spec]:
    """Specs of one layer, block size still open (0); `drafted`: speculative tokens a step."""
    specs: list[Spec] = []
    states: list[ConvState | RecurrentState] = []
    for state in layer.states_in("vllm"):
        if isinstance(state, Empty):
            continue
        if isinstance(state, (ConvState, RecurrentState)):
            states.append(state)
        elif isinstance(state, LatentAttention) and state.window is None:
            specs.append(Spec("latent", _latent_row(state, fmt.key), 0))
        elif isinstance(state, Indexer) and state.dim % 128 == 0 and any(item.kind == "latent" for item in specs):
            specs.append(Spec("indexer", fp8_key(state.dim), 0, stride=state.stride))
            if state.stride > 1:
                # Keys and gates of the tokens that wait for their pool to be full.
                specs.append(Spec("tail", 0, 0, page=2 * state.dim * fmt.model.bytes * state.stride))
        elif isinstance(state, CrossAttention) and state.window is None and spec.cross_input == "audio":
            # As many positions as the encoder's budget has: that is known with the batch.
            specs.append(_attention(state, fmt, _heads(state.kv_heads, ranks), cpu).replace(kind="cross"))
        elif (attention := plain_attention(state)) is not None:
            if fmt.key.name.endswith("_ds_mla"):
                raise UsageError(
                    f"--kv-cache-dtype {fmt.key.name} is for latent attention; this model keeps keys and values"
                )
            specs.append(_attention(attention, fmt, _heads(attention.kv_heads, ranks), cpu))
        else:
            raise not_known(spec, state, "vLLM")
    if states:
        names = tuple("conv" if isinstance(s, ConvState) else s.name for s in states)
        if names not in _STATES or (names == ("conv",) and specs):
            raise not_known(spec, states[-1], "vLLM")
        page = _state_bytes(states, spec.model_type, fmt, ranks, drafted, dtypes or Told())
        specs.append(Spec("state", 0, 0, page=page, checkpoints=_checkpoints(states[-1])))
    return specs

"""What llama.cpp stores of a model's layers: which caches there are, and the rows in them.

Source: llama.cpp b11434 src/llama-model.cpp (create_memory), src/models/*.cpp (which architectures keep
windows apart), src/llama-hparams.cpp (rows and states) and conversion/ (model type to architecture).
"""

from __future__ import annotations

from kvctl.engines import IDEAL
from kvctl.engines.llama_cpp.builds import NEWEST, Rules
from kvctl.engines.states import not_known, plain_attention
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat
from kvctl.kept import kept
from kvctl.record import Record
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    ConvState,
    Empty,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    RecurrentState,
    SlidingWindow,
)


def _types(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Model types by what their architecture does with windows.
KEEPS_WINDOWS = _types(
    "afmoe cohere2 cohere2_moe cohere2_vision exaone4 exaone4_5 exaone_moe gemma2 gemma3 gemma3_text gemma3n gemma3n_text "
    "gemma4 gemma4_text gemma4_unified gemma4_unified_text gguf gpt_oss granite_swa granitemoe_swa laguna lfm2 llama4 "
    "llama4_text mellum mimo_v2_flash mimo_v2 muse_glimmer muse_glimmer_text olmo3 shieldgemma2 step3p5 step3p7 step3p7_text"
)
IGNORES_WINDOWS = _types(
    "apertus arcee bailing_moe_v2 dots1 ernie4_5 ernie4_5_moe exaone glm4 glm4_moe granite granitemoe hunyuan_v1_dense "
    "hunyuan_v1_moe internlm2 internlm3 llama llava mimo minicpm ministral3 mistral mistral3 mixtral nemotron olmo2 olmoe "
    "pixtral phi phi3 phimoe qwen2 qwen2_5_vl qwen2_audio qwen2_moe qwen2_vl qwen3 qwen3_moe qwen3_vl qwen3_vl_moe seed_oss "
    "smollm3 stablelm starcoder2 voxtral"
)
"""These store every token of windowed layers."""

_LATENTS = _types(
    "bailing_hybrid deepseek_v2 deepseek_v3 deepseek_v32 deepseek_vl_v2 glm4_moe_lite glm_moe_dsa kimi_k2 kimi_k25 kimi_k3 "
    "kimi_linear kimi_vl mistral4 sarvam_mla youtu"
)
_RECURRENT = _types(
    "bailing_hybrid bamba falcon_h1 falcon_mamba granitemoehybrid jamba kimi_k3 kimi_linear lfm2 lfm2_moe lfm2_vl mamba mamba2 "
    "minicpmv4_6 minimax_m1 minimax_text_01 nemotron_h qwen3_5 qwen3_5_moe qwen3_5_moe_text qwen3_5_text qwen3_next rwkv6"
)
_WITHOUT_ATTENTION = _types("falcon_mamba mamba mamba2 rwkv6")
_COUNTS_EMPTY = _types("deci nemotron-nas")
"""Layers without attention have empty rows in the cache of these."""
_WITH_INDEXER = _types("deepseek_v32 glm_moe_dsa minimax_m3 minimax_m3_vl minimax_m3_vl_text")
_CHUNK = 8192  # of every Llama 4, whatever its configuration says


class Cache(Record):
    """One cache of the context: rows of K and V that so many layers hold."""

    kind: str
    k_row: int
    """Bytes of one cell over all its layers."""
    v_row: int
    layers: int
    reach: int = 0
    """Window or chunk; 0 for every token."""
    ratio: int = 1
    """Tokens to a cell."""
    drafts: tuple[str, str] | None = None
    """Types of keys and values, where it is that of a draft's context."""

    @property
    def row(self) -> int:
        return self.k_row + self.v_row


class Compressor(Record):
    """What a compressor of all its layers keeps for one sequence: values and scores in float32."""

    name: str
    ratio: int
    rows: int
    width: int
    layers: int

    @property
    def bytes(self) -> int:
        return self.rows * self.width * self.layers * 2 * 4


class Storage(Record):
    """The caches in the order of llama.cpp's log, and the states of one sequence."""

    caches: tuple[Cache, ...]
    shift_bytes: int = 0
    """R in the log: inputs of convolutions."""
    state_bytes: int = 0
    """S in the log."""
    recurrent_layers: int = 0
    full_windows: bool = False
    """Whether windows of the architecture are stored as if there were none."""
    indexed: str = ""
    """What the log calls a cache with an indexer: dsa or msa."""
    snapshots: int = 0
    """Earlier states kept beside each one, for drafts that are not accepted."""
    compressors: tuple[Compressor, ...] = ()
    """Those of models that compress: their slots share no cache, even a unified one."""

    @property
    def state(self) -> int:
        """Bytes that every slot keeps, whatever the context."""
        recurrent = (self.shift_bytes + self.state_bytes) * (1 + self.snapshots)
        return recurrent + sum(tail.bytes for tail in self.compressors)


def latents(spec: ModelSpec) -> bool:
    """Whether a model has latent attention."""
    return spec.keeps(LatentAttention)


def windowed(spec: ModelSpec) -> bool:
    """Whether a model has windows that llama.cpp keeps apart."""
    return spec.model_type in KEEPS_WINDOWS and any(
        isinstance(state, (SlidingWindow, ChunkedAttention)) for layer, _ in spec.groups for state in layer.states
    )


def uneven(spec: ModelSpec) -> bool:
    """Whether keys and values of some layer have several widths."""
    found = (plain_attention(state) for layer, _ in spec.groups for state in layer.states)
    return any(state is not None and state.key_dim != state.value_dim for state in found)


@kept
def storage(spec: ModelSpec, fmt: Formats, rules: Rules, *, flash: bool) -> Storage:
    """What llama.cpp keeps of a model, with or without flash attention.

    Raises:
        ConfigError: a kind of state, or windows of an architecture, whose storage is not known.
        UsageError: types that llama.cpp refuses.

    """
    if not flash and fmt.value.block > 1:
        raise UsageError("llama.cpp needs flash attention for a quantised V cache", hint="--flash-attn on")
    if latents(spec) and rules.one_cache:
        raise ConfigError(f"{spec.id}: llama.cpp stored latents in no build this old",
                          hint="its files of that time hold expanded heads: give such a .gguf file")  # fmt: skip
    if latents(spec) and not rules.latent_values and fmt.key.name != fmt.value.name:
        raise UsageError("llama.cpp keeps latents in one type for K and V", hint="-ctk and -ctv alike")
    from kvctl.engines.llama_cpp import dsv4

    if spec.model_type in dsv4.TYPES:
        return _compressing(spec, fmt, rules)
    rows = _Rows(spec, fmt, rules, flash=flash)
    for layer in spec.layers:
        rows.add(layer)
    stored = rows.storage()
    if rules.one_cache and stored.shift_bytes + stored.state_bytes and stored.caches:
        raise ConfigError(f"{spec.id}: llama.cpp had no hybrids in builds this old", hint="--engine llama.cpp")
    return stored


def _compressing(spec: ModelSpec, fmt: Formats, rules: Rules) -> Storage:
    from kvctl.engines.llama_cpp import dsv4

    if rules != Rules():
        raise ConfigError(f"{spec.id}: kvctl knows how builds from b{NEWEST} on store compressed attention",
                          hint="--engine llama.cpp")  # fmt: skip
    if fmt.key.name != fmt.value.name:
        raise UsageError("llama.cpp keeps compressed entries in one type for K and V", hint="-ctk and -ctv alike")
    return dsv4.storage(spec, fmt.key)


class _Rows:
    """Rows of the caches so far, by kind and reach."""

    def __init__(self, spec: ModelSpec, fmt: Formats, rules: Rules, *, flash: bool) -> None:
        self.spec, self.fmt, self.rules, self.flash = spec, fmt, rules, flash
        self.held: dict[tuple[str, int], list[tuple[int, int]]] = {}
        self.shift = self.state = self.recurrent = 0
        self.full_windows = False

    def add(self, layer: Layer) -> None:
        states = [state for state in layer.states_in("llama.cpp") if not isinstance(state, Empty)]
        attention = next((found for state in states if (found := plain_attention(state)) is not None), None)
        for state in states:
            if isinstance(state, (ConvState, RecurrentState)) and self.spec.model_type in _RECURRENT:
                self._recurrent(state)
            elif isinstance(state, LatentAttention) and state.window is None and self.spec.model_type in _LATENTS:
                values = state.latent if self.rules.latent_values else 0
                self._put(LatentAttention.kind, 0, state.latent + state.rope, values)
            elif isinstance(state, Indexer) and state.stride == 1 and self.spec.model_type in _WITH_INDEXER:
                # It copies the settings of the cache beside it, with one head: values too where that has them.
                self._put(Indexer.kind, 0, state.dim, attention.value_dim if attention else 0)
            elif state is attention:
                assert attention is not None
                self._put(*self._kind(attention), attention.key_dim, attention.value_dim, attention.kv_heads)
            else:
                raise not_known(self.spec, state, "llama.cpp")
        if not states and self.spec.model_type in _COUNTS_EMPTY:
            self.held.setdefault((FullAttention.kind, 0), []).append((0, 0))
        self.recurrent += any(isinstance(state, (ConvState, RecurrentState)) for state in states)

    def _recurrent(self, state: LayerState) -> None:
        """Everything in float32; what is shifted lies with R, the rest with S."""
        if isinstance(state, ConvState):
            self.shift += state.channels * state.columns(IDEAL.retention) * 4
        elif isinstance(state, RecurrentState):
            if state.name == "shift":
                self.shift += state.elements * 4
            else:
                self.state += state.elements * 4

    def _put(self, kind: str, reach: int, key: int, value: int, heads: int = 1) -> None:
        rows = (self._row(self.fmt.key, key, heads), self._row(self.fmt.value, value, heads))
        self.held.setdefault((kind, reach), []).append(rows)

    def _row(self, fmt: CacheFormat, width: int, heads: int) -> int:
        """Bytes of a cell; ggml quantises whole blocks, of a head where flash attention reads them."""
        unit = width if self.flash else width * heads
        if unit % fmt.block:
            raise UsageError(
                f"llama.cpp cannot keep {'heads' if self.flash else 'rows'} of {unit} elements in {fmt.name}: "
                f"its blocks have {fmt.block}"
            )
        return fmt.row_bytes(heads * width)

    def _kind(self, state: Attention) -> tuple[str, int]:
        """Which cache a layer's keys and values go to."""
        if isinstance(state, FullAttention):
            return FullAttention.kind, 0
        model_type = self.spec.model_type
        few = model_type == "exaone4" and len(self.spec.layers) != 64
        if model_type in IGNORES_WINDOWS or few or self.rules.one_cache:
            self.full_windows = True
            return FullAttention.kind, 0
        if model_type not in KEEPS_WINDOWS:
            raise ConfigError(
                f"{self.spec.id}: kvctl does not know whether llama.cpp keeps this architecture's windows apart",
                hint="--engine ideal says what the architecture needs",
            )
        if isinstance(state, SlidingWindow):
            return SlidingWindow.kind, state.window
        return ChunkedAttention.kind, _CHUNK

    def storage(self) -> Storage:
        """The caches, full ones first and indexers last."""
        if not self.held and not (self.shift or self.state):
            raise ConfigError(f"{self.spec.model_type[:60]}: nothing that llama.cpp would cache")
        reaches = [reach for _, reach in self.held if reach]
        if len(reaches) > 1:
            raise ConfigError(
                f"{self.spec.model_type[:60]}: llama.cpp has one size of window a model, this has several"
            )
        if (reaches and len(self.held) == 1) or not (self.held or self.spec.model_type in _WITHOUT_ATTENTION):
            # A cache for full layers is made all the same.
            self.held[FullAttention.kind, 0] = []
        # Without flash attention V lies transposed, and every layer pays for the widest of the model.
        most = 0 if self.flash else max((value for rows in self.held.values() for _, value in rows), default=0)
        caches = []
        for (kind, reach), rows in sorted(
            self.held.items(), key=lambda item: (item[0][1] > 0, item[0][0] == "indexer")
        ):
            values = [value for _, value in rows]
            if most and kind not in (LatentAttention.kind, Indexer.kind):
                values = [most] * len(rows)
            caches.append(Cache(kind, sum(key for key, _ in rows), sum(values), len(rows), reach))
        indexed = any(cache.kind == Indexer.kind for cache in caches)
        latent = any(cache.kind == LatentAttention.kind for cache in caches)
        return Storage(
            tuple(caches),
            self.shift,
            self.state,
            self.recurrent,
            self.full_windows,
            ("dsa" if latent else "msa") if indexed else "",
        )

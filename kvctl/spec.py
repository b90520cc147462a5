"""What a model keeps for each sequence: layers, each with its kinds of state.

A model is a list of layers; a layer keeps zero or more states; a state knows how many
bytes it takes for a workload, in given formats, under the retention rules of an engine.
Everything is integer arithmetic on frozen facts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar

from kvctl.formats import CacheFormat, DType
from kvctl.record import Record

if TYPE_CHECKING:
    from fractions import Fraction
    from pathlib import Path

    from kvctl.tensors import Tensor

    Rational = int | Fraction


def fraction(numerator: int, denominator: int) -> Rational:
    """An exact quotient; a plain int where it is whole (importing fractions costs start-up)."""
    if numerator % denominator == 0:
        return numerator // denominator
    from fractions import Fraction

    return Fraction(numerator, denominator)


class Workload(Record):
    """What the cache has to hold: token positions of one sequence, and how many sequences."""

    context: int
    """Tokens in a sequence's past, prompt and output together."""
    sequences: int = 1
    encoder: int = 0
    """Encoder positions that cross attention holds."""
    beams: int = 1
    generated: int = 0
    """Tokens of the context that came one by one after the prompt, where that makes a difference."""


class Formats(Record):
    """The model's dtype, and the formats of keys (and latents) and of values."""

    model: DType
    key: CacheFormat
    value: CacheFormat


class Retention(Record):
    """How an implementation keeps windows and convolutions.

    `window_slack`: positions of a window that are not kept (the newest query brings its own).
    `conv_slack`: columns of a convolution's kernel that are not kept.
    """

    window_slack: int
    conv_slack: int

    def window(self, tokens: int, window: int) -> int:
        """Positions a window of `window` keeps of `tokens`."""
        kept = window - self.window_slack
        # Slicing the last 0 keeps everything, and that is what torch does with a window of 1.
        return min(tokens, kept) if kept > 0 else tokens


class LayerState(Record):
    """One kind of state that one layer keeps for one sequence."""

    kind: ClassVar[str]
    per_beam: ClassVar[bool] = True
    """False for what all beams of a sequence can share (cross attention)."""

    def tokens(self, work: Workload, keep: Retention) -> int:
        """Positions held (0 for states of a fixed size)."""
        raise NotImplementedError

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        """Bytes of one sequence (one beam)."""
        return self.tokens(work, keep) * self.row(fmt)

    def total(self, work: Workload, fmt: Formats, keep: Retention, copies: int) -> int:
        """Bytes of so many sequences (beams) together."""
        return copies * self.size(work, fmt, keep)

    def row(self, fmt: Formats) -> int:
        """Bytes of one position."""
        raise NotImplementedError

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        """Bytes that one more token adds at this context; exact, 0 once nothing grows."""
        one_more = Workload(work.context + 1, 1, work.encoder)
        return (self.tokens(one_more, keep) - self.tokens(work, keep)) * self.row(fmt)


class Attention(LayerState):
    """Keys [kv_heads, key_dim] and values [kv_heads, value_dim] for every position held."""

    kv_heads: int
    key_dim: int
    value_dim: int

    def row(self, fmt: Formats) -> int:
        heads = self.kv_heads
        return fmt.key.row_bytes(heads * self.key_dim, heads) + fmt.value.row_bytes(heads * self.value_dim, heads)


class FullAttention(Attention):
    """Every token so far, and `prefix` positions that a model puts before them."""

    prefix: int = 0
    kind: ClassVar[str] = "full_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context + self.prefix


class SlidingWindow(Attention):
    """The newest `window` tokens."""

    window: int
    kind: ClassVar[str] = "sliding_window"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return keep.window(work.context, self.window)


class ChunkedAttention(Attention):
    """The tokens of the current chunk: at most `chunk`."""

    chunk: int
    kind: ClassVar[str] = "chunked_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return keep.window(work.context, self.chunk)


class CrossAttention(Attention):
    """Every position of the encoder (or of the image, for vision cross layers); `window`: the newest alone."""

    window: int | None = None
    kind: ClassVar[str] = "cross_attention"
    per_beam: ClassVar[bool] = False

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.encoder if self.window is None else keep.window(work.encoder, self.window)


class LatentAttention(LayerState):
    """One compressed latent [latent] and one rotary key [rope] a token, for all heads."""

    latent: int
    rope: int
    window: int | None = None
    kind: ClassVar[str] = "latent_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context if self.window is None else keep.window(work.context, self.window)

    def row(self, fmt: Formats) -> int:
        # The latent is key and value at once: one row, in the format of keys.
        return fmt.key.row_bytes(self.latent + self.rope)


class Indexer(LayerState):
    """Keys of a sparse attention's indexer, [dim] every `stride` tokens, in the model's dtype."""

    dim: int
    stride: int = 1
    dtype: DType | None = None
    kind: ClassVar[str] = "indexer"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context // self.stride

    def row(self, fmt: Formats) -> int:
        return self.dim * (self.dtype or fmt.model).bytes

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        return fraction(self.row(fmt), self.stride)


class CompressedAttention(LayerState):
    """One entry [dim], key and value at once, for every `ratio` tokens."""

    dim: int
    ratio: int
    kind: ClassVar[str] = "compressed_attention"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context // self.ratio

    def row(self, fmt: Formats) -> int:
        return fmt.key.row_bytes(self.dim)

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        return fraction(self.row(fmt), self.ratio)


class PerToken(LayerState):
    """Bookkeeping an implementation stores with each position: `elements` of `dtype` (None: the model's)."""

    elements: int
    dtype: DType | None = None
    kind: ClassVar[str] = "bookkeeping"

    def tokens(self, work: Workload, keep: Retention) -> int:
        return work.context

    def row(self, fmt: Formats) -> int:
        return self.elements * (self.dtype or fmt.model).bytes


class ConvState(LayerState):
    """The last columns of a causal convolution's input, [channels, kernel − slack].

    `fixed_columns` names the columns of implementations that do not follow `Retention`;
    `groups` says how many groups of heads share channels and how many channels each: what a
    split over ranks repeats when there are more ranks.
    """

    channels: int
    kernel: int
    dtype: DType | None = None
    fixed_columns: int | None = None
    groups: tuple[int, int] = (0, 0)
    kind: ClassVar[str] = "conv_state"

    def columns(self, keep: Retention) -> int:
        return self.kernel - keep.conv_slack if self.fixed_columns is None else self.fixed_columns

    def tokens(self, work: Workload, keep: Retention) -> int:
        return 0

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        return self.channels * self.columns(keep) * (self.dtype or fmt.model).bytes

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        return 0


class RecurrentState(LayerState):
    """A tensor of fixed `shape` that replaces a growing cache; dtype None is the model's."""

    shape: tuple[int, ...]
    dtype: DType | None = None
    name: str = "state"
    kind: ClassVar[str] = "recurrent_state"

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    def tokens(self, work: Workload, keep: Retention) -> int:
        return 0

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        return self.elements * (self.dtype or fmt.model).bytes

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        return 0


class Empty(LayerState):
    """Nothing of its own."""

    def tokens(self, work: Workload, keep: Retention) -> int:
        return 0

    def size(self, work: Workload, fmt: Formats, keep: Retention) -> int:
        return 0

    def growth(self, work: Workload, fmt: Formats, keep: Retention) -> Rational:
        return 0


class Shared(Empty):
    """Reads the cache of another layer (`of`: its index, where the config says it)."""

    of: int | None = None
    like: tuple[LayerState, ...] = ()
    """What a layer of its kind holds that does not share, where known: engines may store it all the same."""
    kind: ClassVar[str] = "shared"


class NoState(Empty):
    """A layer without a cache: MLP, mixture of experts."""

    kind: ClassVar[str] = "none"


class Layer(Record):
    """One layer: what the architecture needs, and what an engine stores where that differs.

    `stored` holds, by engine name, the states that an engine really keeps for this layer
    when it does not follow the architecture (heads repeated before caching, buffers, …).
    """

    states: tuple[LayerState, ...]
    stored: Mapping[str, tuple[LayerState, ...]] = {}
    note: str = ""

    def states_in(self, engine: str) -> tuple[LayerState, ...]:
        """The states that `engine` keeps; "" is what the architecture needs."""
        return self.stored.get(engine, self.states) if self.stored else self.states


class Provenance(Record):
    """Where a model's facts came from."""

    source: str
    """catalogue, local, cache, hub, stdin or shape."""
    location: str
    """For people: control characters in names are spelled out."""
    revision: str | None = None
    path: str | None = None
    """Of what is on this machine, as the system knows it."""

    @property
    def place(self) -> Path:
        """The file or folder on this machine."""
        from pathlib import Path

        return Path(self.location if self.path is None else self.path)


class Weights(Record):
    """Bytes of the weights and how they are known; parameters may be unknown."""

    bytes: int | None
    parameters: int | None
    source: str
    looked_up: int | None = None
    """Bytes of embeddings that llama.cpp leaves in host memory, where the file's tensors are known."""


class ModelSpec(Record):
    """A model as kvctl sees it: layers and the facts around them; nothing here is guessed."""

    id: str
    model_type: str
    layers: tuple[Layer, ...]
    dtype: DType | str | None
    """A text names what the configuration says and kvctl does not know."""
    max_context: int | None
    provenance: Provenance
    weights: Weights | None = None
    overrides: Mapping[str, Any] = {}
    notes: Sequence[str] = ()
    naive: Naive | None = None
    takes_media: bool = True
    default_encoder: int | None = None
    """Encoder positions of a full input (audio, image), where the config names them."""
    prediction_modules: int | None = None
    """Modules for multi-token prediction that the config names; they are no layers of the model itself."""
    scan_chunk: int | None = None
    """Tokens that a recurrent layer's kernel scans at once, where the config names it."""
    attention_heads: int | None = None
    """Query heads, where the config names them."""
    hidden_size: int | None = None
    """Width of a token's embedding, from the config or its class."""
    vocab_size: int | None = None
    from_class: tuple[str, ...] = ()
    """Which of these two the file leaves to the defaults of its class."""
    kv_format: str | None = None
    """Cache format that the checkpoint was quantised for (fp8, nvfp4); engines may follow it."""
    config: Mapping[str, Any] = {}
    """The configuration itself, what-ifs put in: parameters are counted from it."""
    whole: bool = True
    """Whether that is the model's own file, so that what it leaves out is its class's default."""
    tensors: tuple[Tensor, ...] | None = None
    """Of the checkpoint, where its headers were read (kvctl.sources.tensors)."""
    cross_input: str = ""
    """What cross attention looks at: "encoder", "image", "audio", "external" (an encoder that
    is not part of this model), or "" without any."""

    def keeps(self, *kinds: type, engine: str = "") -> bool:
        """Whether any layer keeps a state of these kinds, by the architecture or as an engine has it."""
        return any(isinstance(state, kinds) for layer, _ in self.groups for state in layer.states_in(engine))

    @cached_property
    def groups(self) -> tuple[tuple[Layer, int], ...]:
        """Distinct layers with their counts, in order of first appearance.

        Families build one object for all equal layers, so identity is enough.
        """
        counts: dict[int, int] = {}
        first: dict[int, Layer] = {}
        for layer in self.layers:
            key = id(layer)
            if key in counts:
                counts[key] += 1
            else:
                counts[key], first[key] = 1, layer
        return tuple((first[key], count) for key, count in counts.items())


class Naive(Record):
    """The numbers a one-line calculator would multiply: 2 × layers × KV heads × head dim."""

    layers: int
    kv_heads: int
    head_dim: int

    def size(self, work: Workload, fmt: Formats) -> int:
        """Bytes by the usual formula."""
        row = self.kv_heads * self.head_dim
        per_token = fmt.key.row_bytes(row, self.kv_heads) + fmt.value.row_bytes(row, self.kv_heads)
        return self.layers * per_token * work.context * work.sequences

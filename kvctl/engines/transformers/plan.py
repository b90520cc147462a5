"""The caches of transformers' generate() that are named by `cache_implementation`.

Source: transformers 5.24 cache_utils.py and generation/utils.py; optimum-quanto 0.2.7 and hqq
0.2.8 for what a quantised tensor takes.

The dynamic cache allocates as it goes and has no plan, but over several ranks each holds its part. A static one has its full length
from the first token (--ctx is its max_cache_len); an offloaded one keeps two layers on the
accelerator at a time; a quantised one packs the prompt and, from time to time, what was
generated since. Position counters (a few bytes a layer) are not counted.
"""

from __future__ import annotations

from collections.abc import Callable

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines import TRANSFORMERS
from kvctl.engines.states import not_known
from kvctl.engines.transformers.cuts import heads_are_cut
from kvctl.engines.transformers.quantized import Packing, Shape, packing
from kvctl.errors import ConfigError, UsageError
from kvctl.formats import CacheFormat, cache_format
from kvctl.record import Record
from kvctl.search import last
from kvctl.spec import (
    Attention,
    ChunkedAttention,
    ConvState,
    CrossAttention,
    Empty,
    Formats,
    FullAttention,
    Indexer,
    LatentAttention,
    Layer,
    LayerState,
    ModelSpec,
    PerToken,
    RecurrentState,
    SlidingWindow,
    Workload,
)
from kvctl.units import plural

CACHES = ("dynamic", "static", "offloaded", "offloaded_static", "quantized", "paged")

_TAKES = {
    "cache_backend": ("quantized",), "nbits": ("quantized",), "q_group_size": ("quantized",),
    "residual_length": ("quantized",), "axis_key": ("quantized",), "axis_value": ("quantized",),
    "generated": ("quantized",), "block_size": ("paged",), "max_batched": ("paged",), "num_blocks": ("paged",),
    "max_sequences": ("paged",), "max_blocks_per_request": ("paged",), "async_batching": ("paged",),
    "offload": ("paged",), "kv_budget": CACHES[1:], "tensor_parallel": CACHES,
}  # fmt: skip
"""Which caches look at which setting."""

_SHARED = ("block_size", "max_batched", "kv_budget", "tensor_parallel", "num_blocks", "max_sequences", "offload")
_OWN_SETTINGS = [name for name in _TAKES if name not in _SHARED]
"""Those that no other engine has: they need a cache that looks at them; the others may be meant for another engine."""

_OWN_CACHES = ("minimax", "reformer", "rwkv", "xlnet", "xlstm")
"""Model types that bring a cache of their own, whatever cache_implementation says."""

_LOOPED = ("dory", "inkling2_loop", "inkling2_loop_text")
"""Model types that run through some layers several times."""


def kv_dtype(name: str, option: str, version: str | None = None) -> CacheFormat:
    """The cache format that `name` means."""
    return cache_format(name, option=option)


def check_version(version: str) -> None:
    """One set of rules so far: that of 5.24."""
    if version.removeprefix("v") not in ("5.24", "5.24.0"):
        raise UsageError(f"--engine: kvctl knows one version of transformers, 5.24, not {version[:40]!r}",
                         hint="--engine transformers")  # fmt: skip


class _Piece(Record):
    """What one layer keeps of one kind, for the whole batch."""

    kind: str
    positions: int
    bytes: int


Layout = Callable[[Layer, int], list[_Piece]]
"""What a layer keeps of a context of so many tokens."""


def plan(
    spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
) -> Allocation | None:
    """What the named cache takes for a batch of `sequences`; None for the dynamic one on one rank.

    Raises:
        ConfigError: a kind of state that the cache does not take, or whose storage is not known.
        UsageError: settings that transformers refuses.

    """
    ranks = serving.tensor_parallel or 1
    if (
        serving.cache_implementation is None
        and ranks == 1
        and not any(getattr(serving, setting) is not None for setting in _OWN_SETTINGS)
    ):
        return None
    name = serving.cache_implementation or "dynamic"
    # Without a cache named, what the others share may be meant for another engine.
    told = serving if serving.cache_implementation is not None else serving.replace(**dict.fromkeys(_SHARED))
    _check(name, told)
    if name == "dynamic" and ranks == 1:
        return None
    if context < 1:
        raise UsageError(f"--ctx 0: the {name} cache needs at least one token")
    if spec.model_type in _OWN_CACHES and name != "dynamic":
        raise ConfigError(f"{spec.model_type} brings a cache of its own: transformers ignores cache_implementation")
    if name == "paged":
        from kvctl.engines.transformers import paged

        return paged.plan(spec, context, sequences, fmt, serving)
    batch = _Batch(spec, sequences, fmt, serving.encoder, ranks, heads_are_cut(spec, ranks))
    if name == "dynamic":
        return _allocation(
            batch, serving, context, batch.dynamic, _rank_reasons(batch), _everything(batch, batch.dynamic)
        )
    if name == "quantized":
        packed = packing(serving, context)
        tensors = batch.tensors()
        for each in tensors:
            packed.check(each, context, sequences)
        widest = sequences * max(heads * width + more * wide for (heads, width), (more, wide) in tensors)
        layout = batch.quantized(packed)
        reasons = packed.reasons(context, widest, fmt)
        return _allocation(batch, serving, context, layout, reasons, _everything(batch, layout))
    if name == "static":
        reasons = ["every layer has its full length from the first token: max_cache_len, which generate() makes "
                   "the prompt and all new tokens less one"]  # fmt: skip
        return _allocation(batch, serving, context, batch.static, reasons, _everything(batch, batch.static))
    return _offloaded(batch, serving, context, static=name == "offloaded_static")


def _check(name: str, serving: Serving) -> None:
    if name not in CACHES:
        raise UsageError(
            f"--cache-implementation: {name[:40]!r} is no cache of transformers that kvctl knows",
            hint="one of " + ", ".join(CACHES),
        )
    for setting, takers in _TAKES.items():
        if getattr(serving, setting) is not None and name not in takers:
            from kvctl.engines.flags import spelling_of

            raise UsageError(
                f"{spelling_of(setting, 'transformers')} has no effect on transformers' {name} cache",
                hint="--cache-implementation " + " or ".join(takers),
            )
    if serving.tensor_parallel is not None and name == "quantized":
        raise UsageError("kvctl does not know transformers' quantized cache under tensor parallelism")


class _Batch(Record):
    """What is asked for: so many sequences of a model, on so many ranks."""

    spec: ModelSpec
    sequences: int
    fmt: Formats
    encoder: int
    ranks: int
    cut: bool = False
    """Whether each rank holds its own KV heads."""

    def static(self, layer: Layer, context: int) -> list[_Piece]:
        """A layer of StaticCache: as many positions as it may ever hold."""
        work = Workload(0, 1, self.encoder)
        out = []
        for state in layer.states_in("transformers"):
            if isinstance(state, Empty):
                continue
            if isinstance(state, (ConvState, RecurrentState)):
                held, size = 0, state.size(work, self.fmt, TRANSFORMERS.retention)
            else:
                held = self._reach(state, context)
                size = held * self._split(state).row(self.fmt)
            out.append(_Piece(state.kind, held, size * self.sequences))
        return out

    def dynamic(self, layer: Layer, context: int) -> list[_Piece]:
        """A layer of DynamicCache: the positions held so far."""
        work, keep = Workload(context, 1, self.encoder), TRANSFORMERS.retention
        return [
            _Piece(state.kind, state.tokens(work, keep), self._split(state).total(work, self.fmt, keep, self.sequences))
            for state in layer.states_in("transformers")
            if not isinstance(state, Empty)
        ]

    def _reach(self, state: LayerState, context: int) -> int:
        """Positions of a static layer: its window, though never more than the cache's length."""
        if isinstance(state, FullAttention):
            return context
        if isinstance(state, SlidingWindow):
            return min(state.window, context)
        if isinstance(state, ChunkedAttention):
            return min(state.chunk, context)
        if isinstance(state, CrossAttention) and not (self.encoder and self.spec.cross_input == "image"):
            return self.encoder if state.window is None else min(state.window, self.encoder)
        if isinstance(state, LatentAttention):
            return context if state.window is None else min(state.window, context)
        # Bookkeeping grows with the tokens, up to this.
        if isinstance(state, PerToken) or (isinstance(state, Indexer) and state.stride == 1):
            return context
        raise not_known(self.spec, state, "transformers' static cache")

    def _split(self, state: LayerState) -> LayerState:
        """One rank's part: KV heads are divided where the plan says so, and every rank holds the whole of all else."""
        if not self.cut or not isinstance(state, (FullAttention, SlidingWindow, ChunkedAttention)):
            return state
        return state.replace(kv_heads=split_heads(state, self.ranks))

    def tensors(self) -> list[tuple[Shape, Shape]]:
        """What the layers of a quantised cache hold, distinct ones once."""
        out = []
        for layer, _ in self.spec.groups:
            for state in layer.states_in("transformers"):
                rows = _rows(state)
                if rows is None:
                    raise ConfigError(
                        f"{self.spec.id}: transformers' quantized cache takes full attention only, "
                        f"not {state.kind.replace('_', ' ')}"
                    )
                out.append(rows)
        return out

    def quantized(self, packed: Packing) -> Layout:
        """A layer of QuantizedCache."""

        def pieces(layer: Layer, context: int) -> list[_Piece]:
            states = [(state, _rows(state)) for state in layer.states_in("transformers")]
            return [
                _Piece(state.kind, context, packed.size(rows, context, self.sequences, self.fmt))
                for state, rows in states
                if rows is not None
            ]

        return pieces


def _rows(state: LayerState) -> tuple[Shape, Shape] | None:
    """Heads and widths of the two tensors that a full-attention layer caches; None for any other state."""
    if isinstance(state, FullAttention) and not state.prefix and state.value_dim:
        return (state.kv_heads, state.key_dim), (state.kv_heads, state.value_dim)
    if isinstance(state, LatentAttention) and state.window is None:
        return (1, state.latent), (1, state.rope)
    return None


def _rank_reasons(batch: _Batch) -> list[str]:
    """Who holds what."""
    if batch.cut:
        return [f"KV heads are divided over {batch.ranks} ranks; all else of the cache lies whole on each"]
    return [f"each of {batch.ranks} ranks holds the whole cache: transformers' plan for {batch.spec.model_type} does not "
            "divide what is cached"]  # fmt: skip


def split_heads(state: Attention, ranks: int) -> int:
    """KV heads on a rank."""
    if state.kv_heads % ranks:
        raise UsageError(
            f"--tensor-parallel-size {ranks} does not divide the {state.kv_heads} KV heads",
            hint="transformers refuses this split; vLLM repeats heads over ranks",
        )
    return state.kv_heads // ranks


def _allocation(
    batch: _Batch, serving: Serving, context: int, layout: Layout, reasons: list[str], takes: Callable[[int], int]
) -> Allocation:
    """The answer for layers that are so laid out; `takes` says how much of them a context has on the accelerator."""
    reserved = takes(context)
    if not reserved:
        raise ConfigError(f"{batch.spec.model_type[:60]}: nothing that transformers would cache")
    budget = serving.kv_budget
    warnings = []
    if budget is not None and reserved > budget:
        warnings.append(f"the cache takes {reserved:,} bytes, more than the budget of {budget:,}")
    rows: dict[tuple[str, int], list[int]] = {}
    for layer, count in batch.spec.groups:
        for piece in layout(layer, context):
            row = rows.setdefault((piece.kind, piece.positions), [0, 0])
            row[0] += count
            row[1] += count * piece.bytes
    # There are no blocks: a group's row is its tensors, of the whole batch.
    return Allocation(
        device=serving.device,
        tensor_parallel_size=batch.ranks,
        block_size=0,
        bytes_per_block=0,
        blocks_per_request=0,
        reserved_bytes=reserved,
        kv_budget_bytes=budget,
        num_blocks=None,
        capacity_tokens=_longest(takes, batch.spec.max_context or 2**24, budget) if budget is not None else None,
        reported_capacity=None,
        max_concurrency=None,
        per_rank=tuple(RankRow(rank, 0, reserved) for rank in range(batch.ranks)),
        groups=tuple(GroupRow(kind, n, tokens, size, 1) for (kind, tokens), (n, size) in rows.items()),
        log=(),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
    )


def _longest(takes: Callable[[int], int], high: int, budget: int) -> int | None:
    """The longest context that fits the budget; None where the length makes no difference."""
    if takes(high) == takes(1):
        return None
    return last(lambda context: takes(context) <= budget, 0, high + 1)


def _everything(batch: _Batch, layout: Layout) -> Callable[[int], int]:
    """Bytes of all layers, by context."""
    return lambda context: sum(
        count * piece.bytes for layer, count in batch.spec.groups for piece in layout(layer, context)
    )


# -- offloaded ------------------------------------------------------------------------------------


def _offloaded(batch: _Batch, serving: Serving, context: int, *, static: bool) -> Allocation:
    """Layers wait in host memory; the one at work and the one that comes next are on the accelerator."""
    if batch.spec.model_type in _LOOPED:
        raise ConfigError(f"{batch.spec.id}: kvctl does not know in which order transformers offloads looped layers")
    layout = batch.static if static else batch.dynamic
    goes = {id(layer): _goes(batch.spec, layer, static) for layer, _ in batch.spec.groups}
    if static and True not in goes.values() and any(
        isinstance(state, Attention) for layer, _ in batch.spec.groups for state in layer.states_in("transformers")
    ):  # fmt: skip
        raise ConfigError(f"{batch.spec.id}: transformers cannot offload a static cache in which every layer has a window",
                          hint="--cache-implementation offloaded")  # fmt: skip

    def parts(context: int) -> tuple[int, list[int]]:
        """Bytes that stay, and bytes of each layer that goes."""
        sizes = {id(layer): sum(piece.bytes for piece in layout(layer, context)) for layer, _ in batch.spec.groups}
        stays = sum(sizes[id(layer)] for layer in batch.spec.layers if not goes[id(layer)])
        return stays, [sizes[id(layer)] for layer in batch.spec.layers if goes[id(layer)]]

    def takes(context: int) -> int:
        stays, moving = parts(context)
        if len(moving) < 2:
            return stays + sum(moving)
        # The next layer has not got the newest token yet; after the last one comes the first, which has.
        coming = moving if static else parts(context - 1)[1]
        return stays + max(a + b for a, b in zip(moving, [*coming[1:], moving[0]], strict=True))

    stays, moving = parts(context)
    reasons = [f"{sum(moving):,} bytes of {plural(len(moving), 'layer')} wait in host memory; two layers at a time, "
               f"{takes(context) - stays:,} bytes, are on the accelerator"]  # fmt: skip
    if stays:
        reasons.append(f"{stays:,} bytes of windows and recurrent states stay there")
    if moving and not static:
        reasons.append(f"a step joins a layer's old and new tensors: up to {max(moving):,} bytes more while it does")
    return _allocation(batch, serving, context, layout, reasons, takes)


def _goes(spec: ModelSpec, layer: Layer, static: bool) -> bool:
    """Whether a layer goes to host memory after its turn: attention does, but for windows of the static cache."""
    states = [state for state in layer.states_in("transformers") if not isinstance(state, Empty)]
    linear = [isinstance(state, (ConvState, RecurrentState)) for state in states]
    windows = any(isinstance(state, ChunkedAttention) or getattr(state, "window", None) for state in states)
    for state in states:
        known = isinstance(state, (Attention, LatentAttention, ConvState, RecurrentState))
        # A window beside a recurrent state would leave its keys behind; cross attention is read without coming back.
        if not known or isinstance(state, CrossAttention) or (windows and any(linear)):
            raise not_known(spec, state, "transformers' offloaded cache")
    return bool(states) and not all(linear) and not (static and windows)

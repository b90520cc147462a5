"""transformers' paged cache: generate_batch() and `transformers serve --continuous-batching`.

Source: transformers 5.24 generation/continuous_batching/{cache,initialization,offloading_manager}.py
and cache_allocators/.

A page holds `page_size` tokens of one layer; a block is a page of every layer of one kind of
attention; a sector is the smallest number of bytes that blocks of every kind divide. Requests
draw blocks, kinds draw sectors. Two more sectors, never given out, take what padding reads and
writes. Beside the cache the memory has to hold the tensors of a batch, what a step reads back
from the cache, and the masks that attention other than flash needs.
"""

from __future__ import annotations

from math import ceil, lcm

from kvctl.allocation import Allocation, GroupRow, RankRow, Serving
from kvctl.engines.transformers.plan import split_heads
from kvctl.errors import ConfigError, UsageError
from kvctl.record import Record
from kvctl.search import last
from kvctl.spec import Attention, Formats, FullAttention, ModelSpec, SlidingWindow
from kvctl.units import GIB, MIB, plural

_TRASH = 2
"""Sectors that are never given out."""

_DO_NOT_RUN = (
    "bart", "bert", "bert-generation", "big_bird", "bigbird_pegasus", "biogpt", "blip-2", "bloom", "blt",
    "camembert", "ctrl", "data2vec-text", "dory", "electra", "ernie", "falcon", "gpt_neo", "gpt_neox",
    "gpt_neox_japanese", "hrm_text", "idefics", "marian", "mbart", "megatron-bert", "molmo2", "mpt",
    "musicgen_decoder", "musicgen_melody_decoder", "mvp", "nemotron", "opt", "paligemma", "pegasus", "plbart",
    "prophetnet", "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "stablelm", "trocr",
    "vibevoice", "whisper", "xglm", "xlm", "xlm-roberta", "xlm-roberta-xl", "xmod",
)  # fmt: skip
"""Model types whose classes ask for what generate_batch() has not, of all that were tried with it."""


class _Kind(Record):
    """Layers of one kind of attention."""

    name: str
    layers: int
    window: int | None
    block_bytes: int

    def blocks(self, tokens: int, page: int) -> int:
        """Blocks of a request: a window is a ring of its own length."""
        return -(-(tokens if self.window is None else min(tokens, self.window)) // page)


class _Layout(Record):
    """The pool's geometry on one rank."""

    kinds: tuple[_Kind, ...]
    page: int
    kv_heads: int
    head_dim: int
    model_block: int
    """Bytes of a page of every layer; the unit of num_blocks."""

    @property
    def sector(self) -> int:
        return lcm(*(kind.block_bytes for kind in self.kinds), 128)

    @property
    def tokens_in_sector(self) -> int:
        """Of the kind that puts most of them there."""
        return max(self.sector // kind.block_bytes for kind in self.kinds) * self.page

    def sectors(self, requests: int, tokens: int) -> int:
        """Sectors that so many requests draw."""
        return sum(
            -(-requests * kind.blocks(tokens, self.page) // (self.sector // kind.block_bytes)) for kind in self.kinds
        )

    def requests(self, sectors: int, tokens: int) -> int:
        """Requests of so many tokens that the sectors hold: most share one with others."""
        most = sectors * max(self.sector // kind.block_bytes for kind in self.kinds)
        return last(lambda requests: self.sectors(requests, tokens) <= sectors, 0, most + 1)

    def request_bytes(self, tokens: int) -> int:
        """Blocks of one request among many, which leave no part of a sector unused."""
        return sum(kind.blocks(tokens, self.page) * kind.block_bytes for kind in self.kinds)


def plan(spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving) -> Allocation:
    """The pool for requests of `context` tokens.

    Raises:
        ConfigError: layers that the paged cache does not take.
        UsageError: a page size or a split that transformers refuses.

    """
    if spec.model_type in _DO_NOT_RUN:
        raise ConfigError(f"{spec.id}: {spec.model_type} does not run with transformers' paged cache")
    laid = _layout(spec, fmt, serving)
    batched = serving.max_batched or 8192
    budget = serving.kv_budget
    reasons = [
        f"pages of {laid.page:,} tokens; a sector of {laid.sector:,} bytes holds "
        + " or ".join(f"{plural(laid.sector // kind.block_bytes, 'block')} of {plural(kind.layers, f'{kind.name} layer')}"
                      for kind in laid.kinds),
        "two more sectors are set aside for padding",
    ]  # fmt: skip
    warnings: list[str] = []
    needed = laid.sectors(sequences, context)
    per_request = laid.sectors(1, context)
    sectors = None
    if serving.num_blocks is not None:
        sectors = max(1, -(-serving.num_blocks * laid.model_block // laid.sector))
    if budget is not None:
        beside = _Beside(spec, laid, fmt, serving, batched)
        sectors = beside.sectors(budget) if sectors is None else sectors
        if beside.footprint(sectors) > budget or sectors < 1:
            warnings.append(f"transformers would not start: {budget:,} bytes do not hold the pool and a batch of "
                            f"{batched:,} tokens")  # fmt: skip
            sectors = 0
        else:
            rest = beside.footprint(sectors) - (sectors + _TRASH) * laid.sector
            reasons.append(
                f"{rest:,} bytes are kept for a batch of {batched:,} tokens of {serving.max_sequences or 1024:,} requests at "
                "most, their logits, and what a step reads back"
            )
        warnings += beside.assumed()
    if serving.offload is not None:
        swap = serving.offload // laid.sector
        reasons.append(f"host memory takes preempted requests: {plural(swap, 'sector')}, {swap * laid.sector:,} bytes")
    pool = sectors * laid.sector if sectors is not None else None
    each = laid.request_bytes(context)
    if sectors is not None and sectors < per_request and sectors:
        warnings.append(f"one request of {context:,} tokens needs {per_request:,} sectors, and there are {sectors:,}")
    elif sectors is not None and sectors < needed and sectors:
        warnings.append(f"{plural(sequences, 'request')} of this length need {needed:,} sectors, and there are "
                        f"{sectors:,}: some would wait")  # fmt: skip
    ranks = serving.tensor_parallel or 1
    return Allocation(
        device=serving.device,
        tensor_parallel_size=ranks,
        block_size=laid.page,
        bytes_per_block=laid.sector,
        blocks_per_request=per_request,
        reserved_bytes=(needed + _TRASH) * laid.sector,
        kv_budget_bytes=budget,
        num_blocks=sectors,
        capacity_tokens=pool * context // each if pool is not None else None,
        reported_capacity=None,
        max_concurrency=pool / each if pool is not None else None,
        per_rank=tuple(RankRow(rank, laid.sector, (needed + _TRASH) * laid.sector) for rank in range(ranks)),
        groups=tuple(
            GroupRow(f"{kind.name}_attention" if kind.window is None else "sliding_window", kind.layers, laid.page,
                     kind.block_bytes, kind.blocks(context, laid.page))
            for kind in laid.kinds
        ),
        log=_log(laid, serving, batched, sectors) if sectors else (),
        reasons=tuple(reasons),
        warnings=tuple(warnings),
        longest_sequence=context,
        held=laid.requests(sectors, context) if sectors is not None else None,
    )  # fmt: skip


def _log(laid: _Layout, serving: Serving, batched: int, sectors: int) -> tuple[str, ...]:
    """What it prints at INFO level."""
    lines = []
    if serving.kv_budget is not None:
        lines.append(f"Memory available for cache allocation: {serving.kv_budget // MIB} MB")
    lines.append(
        f"Paged cache initialized: self.max_batch_tokens = {batched}, self.num_sectors = {sectors}, "
        f"mb_per_sector = {laid.sector // MIB}"
    )
    if serving.offload is not None and serving.offload // laid.sector:
        swap = serving.offload // laid.sector
        lines.append(f"CPU swap pool initialized: {swap} sectors ({swap * laid.sector / GIB:.2f} GiB pinned)")
    return tuple(lines)


def _layout(spec: ModelSpec, fmt: Formats, serving: Serving) -> _Layout:
    """One shape for all layers, and at most two kinds: all tokens, or a window."""
    page = serving.block_size or 256
    if page < 4:
        raise UsageError(f"a page of {page} tokens: transformers' paged cache needs at least 4")
    counts: dict[int | None, int] = {}
    shapes: dict[tuple[int, int], Attention] = {}
    for layer, count in spec.groups:
        states = layer.states_in("transformers")
        state = states[0]
        full = isinstance(state, FullAttention) and not state.prefix
        if len(states) > 1 or not (full or isinstance(state, SlidingWindow)):
            odd = next((s for s in states if not isinstance(s, (FullAttention, SlidingWindow))), state)
            raise ConfigError(
                f"{spec.id}: transformers' paged cache takes full and sliding attention only, "
                f"not {odd.kind.replace('_', ' ')}"
            )
        assert isinstance(state, Attention)
        if state.key_dim != state.value_dim:
            raise ConfigError(f"{spec.id}: transformers' paged cache has keys and values of one width only")
        window = state.window if isinstance(state, SlidingWindow) else None
        counts[window] = counts.get(window, 0) + count
        shapes[state.kv_heads, state.key_dim] = state
    if len(shapes) > 1 or len(counts) > 2 or (len(counts) == 2 and None not in counts):
        raise ConfigError(f"{spec.id}: transformers' paged cache has one shape and one window for all layers")
    ranks = serving.tensor_parallel or 1
    ((_, dim), state), = shapes.items()  # fmt: skip
    heads = split_heads(state, ranks)
    one = 2 * heads * dim * fmt.model.bytes * page
    kinds = tuple(
        _Kind("full" if window is None else "sliding", count, window, one * count) for window, count in counts.items()
    )
    return _Layout(kinds, page, heads, dim, one * len(spec.layers))


class _Beside(Record):
    """What the memory has to hold beside the sectors."""

    spec: ModelSpec
    laid: _Layout
    fmt: Formats
    serving: Serving
    batched: int

    @property
    def flash(self) -> bool:
        given = self.serving.flash_attention
        return self.serving.device != "cpu" if given is None else given

    def assumed(self) -> list[str]:
        """What was taken for granted."""
        out = []
        if self.serving.flash_attention is None and self.flash:
            out.append(
                "flash attention, which transformers switches to where it is installed; without it masks take more"
            )
        for name in self.spec.from_class:
            out.append(f"{name} {getattr(self.spec, name):,} is the default of its class: the configuration names none")
        return out

    @property
    def pairs(self) -> int:
        """Sets of inputs and outputs: two where batches overlap, which needs graphs and no mask."""
        given = self.serving.async_batching
        return 2 if (self.flash and self.serving.device != "cpu" if given is None else given) else 1

    @property
    def windows(self) -> bool:
        return any(kind.window is not None for kind in self.laid.kinds)

    @property
    def read_heads(self) -> int:
        """Heads of the keys and values that a step reads back: flash takes them as they are."""
        kv = self.laid.kv_heads
        return 2 * kv if self.flash else 2 * self._dims()[2] + kv

    def _dims(self) -> tuple[int, int, int]:
        """Hidden size, vocabulary, and query heads of a rank."""
        spec = self.spec
        if spec.hidden_size is None or spec.vocab_size is None or spec.attention_heads is None:
            missing = [name for name, value in (("hidden_size", spec.hidden_size), ("vocab_size", spec.vocab_size),
                                                ("num_attention_heads", spec.attention_heads)) if value is None]  # fmt: skip
            raise ConfigError(
                f"{spec.id}: {' and '.join(missing)} {'are' if len(missing) > 1 else 'is'} not known, and what "
                "transformers keeps for a batch depends on it",
                hint="name the number of blocks instead of a budget",
            )
        return spec.hidden_size, spec.vocab_size, spec.attention_heads // (self.serving.tensor_parallel or 1)

    def fixed(self) -> int:
        """The sectors set aside, and a row of float32 logits for every request of a batch."""
        hidden, vocabulary, _ = self._dims()
        rows = self.serving.max_sequences or 1024
        return _TRASH * self.laid.sector + rows * (hidden * self.fmt.model.bytes + vocabulary * 4)

    def batch_token(self) -> int:
        """A token of a batch: hidden state, query, new and re-read keys and values, and its part of the inputs."""
        hidden, _, queries = self._dims()
        dim, kinds = self.laid.head_dim, len(self.laid.kinds)
        attention = hidden + (queries + 2 * self.laid.kv_heads + self.read_heads) * dim
        # The fast decode path has a block table; windows rule it out, and so does attention other than flash.
        blocks = self.serving.max_blocks_per_request
        blocks = (
            (32 if blocks is None else blocks)
            if self.flash and not self.windows and self.serving.device != "cpu"
            else 0
        )
        # Seven rows of int32 in, one out, the block table, and two int64 indices a kind.
        return attention * self.fmt.model.bytes + self.pairs * (7 * 4 + 4 + kinds * (blocks * 4 + 8 + 8))

    def sector(self) -> int:
        """A sector, what a step reads back from it, and the indices for that."""
        read = self.read_heads * self.laid.head_dim * self.fmt.model.bytes
        return self.laid.sector + self.laid.tokens_in_sector * (read + self.pairs * len(self.laid.kinds) * 8)

    def masks(self, sectors: int) -> int:
        """Attention other than flash has a mask of the batch over all it can read, and one more for windows."""
        if self.flash:
            return 0
        readable = sectors * self.laid.tokens_in_sector + self.batched
        return self.pairs * (2 if self.windows else 1) * self.fmt.model.bytes * self.batched * readable

    def footprint(self, sectors: int) -> int:
        """Everything, for so many sectors."""
        return self.fixed() + self.batched * self.batch_token() + sectors * self.sector() + self.masks(sectors)

    def sectors(self, budget: int) -> int:
        """Sectors that a budget leaves room for; masks are paid for last, by giving some of them back."""
        count = (budget - self.fixed() - self.batched * self.batch_token()) // self.sector()
        masks = self.masks(count)
        return count - ceil(masks / (self.sector() + self.masks(count + 1) - masks))

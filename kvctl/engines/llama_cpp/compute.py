"""llama.cpp's compute buffer: the graph of a physical batch, laid out as ggml's allocator lays it out.

Source: llama.cpp b11434 src/llama-graph.cpp (build_qkv, build_attn, build_ffn, build_moe_ffn), src/models/*.cpp,
src/llama-context.cpp (sched_reserve: the largest batch over a full cache). Everything but the cache is float32.
"""

from __future__ import annotations

from functools import lru_cache

from kvctl.engines.llama_cpp.graph import Graph, Tensor
from kvctl.record import Record


class Style(Record):
    """How an architecture's layers differ from Llama's, as far as memory goes."""

    head_norm: bool = False
    """Queries and keys are normed head by head."""
    full_norm: bool = False
    """Or over all heads, before they are divided."""
    fused: bool = False
    """Queries, keys and values come out of one product."""
    gated: bool = True
    parallel: bool = False
    """The feed-forward part reads what attention read."""
    rope: bool = True
    layer_norm: bool = False
    """Norms subtract the mean: they never write over what they read."""
    norm_first: bool = True
    """Whether attention and the feed-forward part read normed states, and not the residual itself."""
    capped: bool = False
    """Scores go through a soft cap without flash attention."""


class Shape(Record):
    """Widths in elements of one token's row."""

    layers: int
    hidden: int
    heads: int
    kv_heads: int
    key: int
    value: int
    vocabulary: int
    feed: int
    expert: int = 0
    experts: int = 0
    used: int = 0
    shared: int = 0
    dense: int = 0
    """First layers that have no experts."""
    windowed: tuple[bool, ...] = ()
    """Which layers attend to a window; empty: none."""
    style: Style = Style()


class Batch(Record):
    """What the buffer has to hold."""

    tokens: int
    outputs: int
    """Tokens whose logits are wanted."""
    cells: int
    window_cells: int
    flash: bool
    gpu: bool
    """Whether embeddings are looked up elsewhere, and copied here with the other inputs."""
    head: bool = True
    """Whether this device makes the logits."""
    copies: int = 1
    """Of all inputs, so that devices work on several batches at a time."""
    age: int = 3
    """Of the build: 3 from b9842 on; 2, masks come in float32 and are cast; 1, embeddings have no input of their own;
    0, gates and their activation write over each other, and nothing says where cells are."""


@lru_cache(maxsize=1024)
def compute_buffer(shape: Shape, batch: Batch) -> int:
    """Bytes of the compute buffer of one device that runs all layers and perhaps the head."""
    if not shape.windowed and shape.layers > shape.dense:
        # Equal layers lay out the same memory again and again, often in turns: a few of each kind show all there is.
        dense, rest = min(shape.dense, 4 + shape.dense % 2), shape.layers - shape.dense
        shape = shape.replace(dense=dense, layers=dense + min(rest, 8 + rest % 2))
    return _Builder(shape, batch).graph.peak(128 if batch.gpu else 32)


class _Builder:
    """The graph of a model, in llama.cpp's order."""

    def __init__(self, shape: Shape, batch: Batch) -> None:
        self.shape, self.batch, self.graph = shape, batch, Graph()
        s, t = shape, batch.tokens
        outside = Tensor(0)
        self.outside = outside
        """Weights and cache: they lie elsewhere."""
        if batch.gpu:
            x = self._input(s.hidden * t * 4, (s.hidden, t))
        else:
            x = Tensor(s.hidden * t * 4, (outside, Tensor(4 * t)), shape=(s.hidden, t))
            self.graph.expand(x)
            if batch.age > 1:
                self.graph.expand(Tensor(s.hidden * t * 4))  # embeddings that come instead of tokens
        self.positions = self._input(4 * t)
        self.caches = [self._cache(batch.cells), self._cache(batch.window_cells)]
        self.picked = self._input(4 * batch.outputs)
        for layer in range(s.layers):
            x = self._layer(x, layer)
        if batch.head:
            normed = self._norm(x)
            normed.kept = True
            x = self._product(s.vocabulary, normed)
        self.graph.expand(x)

    def _input(self, size: int, shape: tuple[int, ...] = ()) -> Tensor:
        """What comes from elsewhere; with several copies none is ever written over."""
        several = self.batch.copies > 1
        for _ in range(self.batch.copies - 1):
            self.graph.expand(Tensor(size))
        return Tensor(size, kept=several, shape=shape)

    def _cache(self, cells: int) -> tuple[Tensor, Tensor, Tensor]:
        """Where keys and values go, and the mask."""
        s, b = self.shape, self.batch
        keys = b.tokens if b.age else 0
        values = keys if b.flash else keys * s.kv_heads * s.value
        cast = b.flash and b.age < 3
        mask = self._input(cells * b.tokens * (2 if b.flash and not cast else 4))
        if cast:
            mask = Tensor(cells * b.tokens * 2, (mask,))
        return self._input(8 * keys), self._input(8 * values), mask

    # -- operations ------------------------------------------------------------------------

    def _product(self, rows: int, x: Tensor) -> Tensor:
        return Tensor(rows * x.shape[-1] * 4, (self.outside, x), shape=(rows, x.shape[-1]))

    def _onto(self, x: Tensor, *others: Tensor) -> Tensor:
        """An operation that may write over its first argument."""
        return Tensor(x.size, (x, *others), inplace=True, shape=x.shape)

    def _norm(self, x: Tensor) -> Tensor:
        plain = Tensor(x.size, (x,), inplace=not self.shape.style.layer_norm, shape=x.shape)
        return self._onto(plain, self.outside)

    @staticmethod
    def _view(x: Tensor, *shape: int) -> Tensor:
        return Tensor(x.size, (x,), root=x.root or x, shape=shape)

    # -- layers ----------------------------------------------------------------------------

    def _layer(self, x: Tensor, layer: int) -> Tensor:
        s = self.shape
        residual = x
        normed = self._norm(x) if s.style.norm_first else x
        attended = self._attention(normed, layer)
        before = normed
        if self.batch.head and layer == s.layers - 1:
            outputs = (s.hidden, self.batch.outputs)
            size = s.hidden * self.batch.outputs * 4
            attended = Tensor(size, (attended, self.picked), shape=outputs)
            residual = Tensor(size, (residual, self.picked), shape=outputs)
            if s.style.parallel:
                before = Tensor(size, (normed, self.picked), shape=outputs)
        if s.style.parallel:
            return self._onto(self._onto(self._feed(before, layer), attended), residual)
        inner = self._onto(attended, residual)
        return self._onto(self._feed(self._norm(inner) if s.style.norm_first else inner, layer), inner)

    def _heads(self, normed: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, divided into heads."""
        s, t = self.shape, self.batch.tokens
        widths = (s.heads * s.key, s.kv_heads * s.key, s.kv_heads * s.value)
        shapes = ((s.key, s.heads, t), (s.key, s.kv_heads, t), (s.value, s.kv_heads, t))
        if s.style.fused:
            all_ = self._product(sum(widths), normed)
            parts = [
                Tensor(width * t * 4, (all_,), root=all_, shape=shape)
                for width, shape in zip(widths, shapes, strict=True)
            ]
        else:
            rows = [self._product(width, normed) for width in widths]
            if s.style.full_norm:
                rows[:2] = [self._norm(row) for row in rows[:2]]
            parts = [self._view(row, *shape) for row, shape in zip(rows, shapes, strict=True)]
        q, k, v = parts
        if s.style.head_norm:
            q, k = (self._onto(Tensor(x.size, (x,), inplace=True, shape=x.shape), self.outside) for x in (q, k))
        if s.style.rope:
            q, k = (self._onto(x, self.positions) for x in (q, k))
        return q, k, v

    def _attention(self, normed: Tensor, layer: int) -> Tensor:
        s, t, g = self.shape, self.batch.tokens, self.graph
        windowed = bool(s.windowed) and s.windowed[layer]
        key_at, value_at, mask = self.caches[windowed]
        cells = self.batch.window_cells if windowed else self.batch.cells
        q, k, v = self._heads(normed)
        for x in (q, v, k):
            g.expand(x)
        for x, at in ((k, key_at), (v, value_at)):
            g.expand(Tensor(0, (self._view(x), at, self.outside)))
        queries = self._view(self._view(q))
        width = s.heads * s.value
        if self.batch.flash:
            mixed = Tensor(width * t * 4, (queries, self.outside, self.outside, mask))
            out = self._view(mixed, width, t)
        else:
            scores = Tensor(cells * t * s.heads * 4, (self.outside, queries), shape=(cells, t, s.heads))
            if s.style.capped:
                scores = self._onto(self._onto(self._onto(scores)))
            mixed = Tensor(width * t * 4, (self.outside, self._onto(scores, mask)))
            out = Tensor(width * t * 4, (self._view(mixed),), shape=(width, t))
        g.expand(out)
        return self._product(s.hidden, out)

    def _feed(self, x: Tensor, layer: int) -> Tensor:
        s = self.shape
        if not s.used or layer < s.dense:
            return self._dense(x, s.feed)
        mixed = self._experts(x)
        return self._onto(mixed, self._dense(x, s.shared)) if s.shared else mixed

    def _dense(self, x: Tensor, width: int) -> Tensor:
        up = self._product(width, x)
        if self.shape.style.gated:
            up = self._gated(self._product(width, x), up)
        else:
            up = self._onto(up)
        return self._product(self.shape.hidden, up)

    def _gated(self, gate: Tensor, up: Tensor) -> Tensor:
        if not self.batch.age:
            return self._onto(self._onto(gate), up)
        return Tensor(up.size, (gate, up), shape=up.shape)

    def _experts(self, x: Tensor) -> Tensor:
        s, g, t = self.shape, self.graph, x.shape[-1]
        probabilities = self._onto(self._product(s.experts, x))
        order = Tensor(s.experts * t * 4, (probabilities,))
        chosen = self._view(order)
        weights = Tensor(s.used * t * 4, (self._view(probabilities), chosen), shape=(1, s.used, t))
        flat = self._view(weights, s.used, t)
        total = self._onto(Tensor(t * 4, (flat,), shape=(1, t)))
        weights = self._view(Tensor(s.used * t * 4, (flat, total), shape=(s.used, t)), 1, s.used, t)
        g.expand(weights)
        rows = self._view(x)

        def routed(width: int, source: Tensor) -> Tensor:
            return Tensor(width * s.used * t * 4, (self.outside, source, chosen), shape=(width, s.used, t))

        up = routed(s.expert, rows)
        inner = self._gated(routed(s.expert, rows), up) if s.style.gated else self._onto(up)
        down = self._onto(routed(s.hidden, inner), weights)
        g.expand(down)
        views = [Tensor(s.hidden * t * 4, (down,), root=down, shape=(s.hidden, t)) for _ in range(s.used)]
        for view in views:
            g.expand(view)
        out = views[0]
        for view in views[1:]:
            out = Tensor(out.size, (out, view), inplace=True, shape=out.shape)
            g.expand(out)
        return out if s.used > 1 else Tensor(out.size, (out,), shape=out.shape)

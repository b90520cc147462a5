"""The cache of a technique: a layer of transformers' cache that stores and evicts. Imported where torch and transformers are."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import (
    CacheLayerMixin,
    DynamicLayer,
    LinearAttentionAndFullAttentionLayer,
    LinearAttentionCacheLayerMixin,
    LinearAttentionLayer,
)

from kvctl.errors import ConfigError
from kvctl.techniques import attention
from kvctl.techniques.direct import Stored, without_autocast
from kvctl.techniques.keep import Place
from kvctl.techniques.paging.cache import PagedLayer, Pages
from kvctl.techniques.policy import Policy, Seen
from kvctl.techniques.rope import Rope

if TYPE_CHECKING:
    from torch import Tensor

    from kvctl.techniques import Technique
    from kvctl.techniques.keep import Keep
    from kvctl.techniques.store import Packing, Store


class Rows:
    """Keys, or values, of the tokens held: first ones as they are, packed ones, newest ones as they are.

    Tensors are [batch, heads, tokens, …].
    """

    def __init__(self, packing: Packing) -> None:
        self._packing = packing
        self._kernel = packing.codec.kernel() if packing.codec is not None else None
        self._group = packing.codec.tokens if packing.codec is not None else 1
        self.first: Tensor | None = None
        self.parts: tuple[Tensor, ...] = ()
        self.newest: Tensor | None = None

    @property
    def packed(self) -> int:
        """Tokens that are packed."""
        return int(self.parts[0].shape[2]) * self._group if self.parts else 0

    def __len__(self) -> int:
        return sum(int(part.shape[2]) for part in (self.first, self.newest) if part is not None) + self.packed

    def append(self, rows: Tensor) -> None:
        """More tokens; what is old enough is packed."""
        self.newest = rows if self.newest is None else torch.cat([self.newest, rows], dim=2)
        packing = self._packing
        if self._kernel is None:
            return
        sinks = 0 if self.first is None else self.first.shape[2]
        if sinks < packing.sinks:
            more = min(packing.sinks - sinks, self.newest.shape[2])
            moved = self.newest[:, :, :more]
            self.first = moved.clone() if self.first is None else torch.cat([self.first, moved], dim=2)
            self.newest = self.newest[:, :, more:]
        due = packing.packed(len(self)) - self.packed
        if due > 0:
            old = self.newest[:, :, :due]
            if packing.rotated:
                old = rotated(old)
            made = self._kernel.encode(old)
            self.parts = (
                tuple(torch.cat(pair, dim=2) for pair in zip(self.parts, made, strict=True)) if self.parts else made
            )
            # A view would hold what was packed.
            self.newest = self.newest[:, :, due:].clone()

    def read(self) -> Tensor:
        """All of them [batch, heads, tokens, dim], unpacked."""
        assert self.newest is not None
        around = self.first, self.newest
        if not self.parts or not self.packed:
            return joined([part for part in around if part is not None])
        assert self._kernel is not None
        # Packed rows are many, and copying them to join others costs more than unpacking them: some are unpacked twice, to make
        # room for what lies around them.
        before, after = (0 if part is None else int(part.shape[2]) for part in around)
        ahead, behind = -(-before // self._group), -(-after // self._group)
        enough = max(ahead, behind) <= self.parts[0].shape[2]
        parts = tuple(with_room(part, ahead, behind) for part in self.parts) if enough else self.parts
        rows: Tensor = self._kernel.decode(parts, self.newest.dtype, self.newest.shape[-1])
        if self._packing.rotated:
            rows = rotated(rows)
        if not enough:
            return joined([part for part in (self.first, rows, self.newest) if part is not None])
        start = ahead * self._group - before
        rows = rows[:, :, start : start + len(self)]
        if before:
            rows[:, :, :before] = self.first
        if after:
            rows[:, :, rows.shape[2] - after :] = self.newest
        return rows

    def pieces(self) -> Iterator[tuple[Tensor, bool]]:
        """First, packed and newest ones, one after the other [batch * heads, tokens, dim] in fp32, and whether they were packed."""
        assert self.newest is not None
        if self.first is not None:
            yield self.first.float().flatten(0, 1), False
        if self.packed:
            assert self._kernel is not None
            yield self._kernel.decode(self.parts, torch.float32, self.newest.shape[-1]).flatten(0, 1), True
        yield self.newest.float().flatten(0, 1), False

    @property
    def batch(self) -> int:
        """Sequences."""
        assert self.newest is not None
        return int(self.newest.shape[0])

    @property
    def heads(self) -> int:
        """Heads that have rows of their own."""
        assert self.newest is not None
        return int(self.newest.shape[1])

    @property
    def rotated(self) -> bool:
        """Whether packed ones are turned by a Hadamard matrix."""
        return self._packing.rotated

    def gather(self, places: Tensor) -> None:
        """Only the tokens at `places` [batch, heads, kept] are left; the first and the newest are among them."""
        assert self.newest is not None
        first = 0 if self.first is None else self.first.shape[2]
        newest = self.newest.shape[2]
        if not self.parts and not first:
            self.newest = _taken(self.newest, places)
            return
        middle = places[:, :, first : places.shape[2] - newest] - first
        self.parts = tuple(_taken(part, middle) for part in self.parts)

    def cut(self, gone: slice) -> None:
        """Tokens of a range of places go, the same for all heads."""
        assert self.newest is not None
        first = 0 if self.first is None else self.first.shape[2]
        if not self.parts and not first:
            self.newest = _without(self.newest, gone)
            return
        inside = slice(gone.start - first, gone.stop - first)
        self.parts = tuple(_without(part, inside) for part in self.parts)

    def reorder(self, beams: Tensor) -> None:
        """Sequences change places: codes and scales move together, and nothing is packed anew."""
        self.first = None if self.first is None else self.first.index_select(0, beams)
        self.newest = None if self.newest is None else self.newest.index_select(0, beams)
        self.parts = tuple(part.index_select(0, beams) for part in self.parts)


def joined(pieces: list[Tensor]) -> Tensor:
    """Pieces [batch, heads, tokens, dim] in a row; one alone is not copied."""
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=2)


def with_room(part: Tensor, ahead: int, behind: int) -> Tensor:
    """A part with its first groups before it and its last ones behind it once more."""
    pieces = [part]
    if ahead:
        pieces.insert(0, part[:, :, :ahead])
    if behind:
        pieces.append(part[:, :, -behind:])
    return joined(pieces)


def _taken(rows: Tensor, places: Tensor) -> Tensor:
    index = places.reshape(*places.shape, *[1] * (rows.dim() - 3))
    return rows.gather(2, index.expand(*places.shape, *rows.shape[3:]))


def _without(rows: Tensor, gone: slice) -> Tensor:
    return torch.cat([rows[:, :, : gone.start], rows[:, :, gone.stop :]], dim=2)


def rotated(rows: Tensor) -> Tensor:
    """Rows turned by a Hadamard matrix, which is its own inverse."""
    from kvctl.techniques.codecs.hadamard import rotate

    turned: Tensor = rotate(rows)
    return turned


class TechniqueLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of full attention. What it hands out is what it stored: every token attends to the compressed state."""

    is_sliding = False
    is_croppable = False

    def __init__(
        self, store: Store, keep: Keep | None, place: Place, model: Any = None, rope: Rope | None = None
    ) -> None:
        super().__init__()
        self._store, self._keep, self._place = store, keep, place
        self._rope = rope
        self._model = model if keep is not None else None
        self._served = id(model)
        self._start()

    def _start(self) -> None:
        self.key_rows, self.value_rows = Rows(self._store.keys), Rows(self._store.values)
        self.policy: Policy | None = self._keep.policy(self._place, self._model) if self._keep is not None else None
        self.seen = self.generated = 0
        self.valid: Tensor | None = None
        self.is_initialized = False

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens [batch, heads, new, dim]; all that are held, as they are stored."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        with without_autocast(key_states.device.type):
            return self._update(key_states, value_states)

    def _update(self, key_states: Tensor, value_states: Tensor) -> tuple[Tensor, Tensor]:
        new = key_states.shape[2]
        if self._rope is not None:
            key_states = self._rope.turned(key_states, -self._positions(self.seen, new))
        self.key_rows.append(key_states)
        self.value_rows.append(value_states)
        self.seen += new
        self.generated = self.generated + 1 if new == 1 and self.seen > 1 else 0
        if new == 1 and self._direct:
            return Stored.of(self.key_rows), Stored.of(self.value_rows)
        keys, values = self.key_rows.read(), self.value_rows.read()
        if self._rope is not None:
            keys = self._rope.turned(keys, self._positions(0, self.seen))
        if self.policy is not None:
            keys = self.policy.turn(keys, self.seen - keys.shape[2])
            attention.expect(self)
        return keys, values

    @property
    def _direct(self) -> bool:
        """Whether attention may go over rows as they are stored: nothing else needs them, and a CPU is none the worse for it."""
        packed = self.key_rows.packed or self.value_rows.packed
        able = self._keep is None and self._rope is None and self.device.type == "cpu"
        return bool(packed) and able and attention.serves(self._served)

    def _positions(self, first: int, count: int) -> Tensor:
        return torch.arange(first, first + count, device=self.device)[None]

    def mask(self, query: Tensor, given: Tensor | None) -> Tensor | None:
        """What the queries may see of all that is held, as torch's attention takes it."""
        new, held = query.shape[2], len(self.key_rows)
        real = attention.visible(given, new)
        if self.valid is None and real is not None:
            batch, heads = query.shape[0], self.key_rows.heads
            self.valid = torch.ones(batch, heads, held - new, dtype=torch.bool, device=self.device)
        if self.valid is not None:
            arrived = self.valid.new_ones(query.shape[0], new) if real is None else real
            self.valid = torch.cat([self.valid, arrived[:, None].expand(-1, self.valid.shape[1], -1)], dim=2)
        if self.valid is None:
            if new in (1, held):
                return None  # all, or causal from the first on, which torch has a faster way for
            return torch.ones(new, held, dtype=torch.bool, device=self.device).tril(held - new)[None, None]
        causal = torch.ones(new, held, dtype=torch.bool, device=self.device).tril(held - new)
        mask = causal & self.valid[:, :, None]
        # A token of padding sees itself: a row without anything has no softmax.
        mask |= torch.eye(held, dtype=torch.bool, device=self.device)[held - new :]
        return mask.repeat_interleave(query.shape[1] // mask.shape[1], dim=1)

    def attended(self, query: Tensor, key: Tensor, value: Tensor, scaling: float) -> None:
        """After the attention of a pass: let go of what is too much."""
        policy, keep = self.policy, self._keep
        assert policy is not None
        assert keep is not None
        seen = Seen(query, key, value, self.valid, scaling, self.seen - query.shape[2])
        policy.see(seen)
        held = len(self.key_rows)
        target = keep.kept(self.seen, self.generated, self._place)
        if held <= target:
            return
        stay = policy.choose(held, target, seen)
        if isinstance(stay, slice):
            self.key_rows.cut(stay)
            self.value_rows.cut(stay)
            self.valid = None if self.valid is None else _without(self.valid, stay)
        elif stay is not None:
            self.key_rows.gather(stay)
            self.value_rows.gather(stay)
            self.valid = None if self.valid is None else self.valid.gather(2, stay)
            policy.gather(stay)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Of a mask that transformers makes; with an eviction only its part for new tokens is looked at."""
        held = len(self.key_rows) if self.is_initialized else 0
        return held + query_length, self.seen - held

    def get_seq_length(self) -> int:
        """Tokens seen: positions go on from there, whatever was let go."""
        return self.seen

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """For another sequence: nothing of this one is left."""
        self._start()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: what is packed, or was let go, does not come back.

        Raises:
            ConfigError: always, but where nothing is to go.

        """
        if tokens_to_remove:
            raise ConfigError(
                "a cache of a technique cannot be cropped", hint="generate without assistants and prompt lookup"
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Each sequence so many times."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.key_rows.batch, device=self.device).repeat_interleave(repeats))

    def batch_select_indices(self, indices: Tensor) -> None:
        """These sequences alone, by number or by a mask."""
        if self.is_initialized:
            self.reorder_cache(torch.arange(self.key_rows.batch, device=self.device)[indices])

    def __deepcopy__(self, memo: dict[int, Any]) -> TechniqueLayer:
        """The model that an eviction looks at is no part of the cache."""
        for module in [] if self._model is None else self._model.modules():
            memo[id(module)] = module
        out = type(self).__new__(type(self))
        memo[id(self)] = out
        out.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return out

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences change places."""
        if not self.is_initialized:
            return
        beams = beam_idx.to(self.device)
        self.key_rows.reorder(beams)
        self.value_rows.reorder(beams)
        self.valid = None if self.valid is None else self.valid.index_select(0, beams)
        if self.policy is not None:
            self.policy.reorder(beams)


class _WithStates(LinearAttentionLayer):  # type: ignore[misc]
    """Recurrent states and convolutions beside the keys and values of the class that follows in the order of bases."""

    supports_early_init = False
    is_croppable = False

    def __init__(self, number_of_states: int, *args: Any, **kwargs: Any) -> None:
        super(LinearAttentionCacheLayerMixin, self).__init__(*args, **kwargs)
        LinearAttentionCacheLayerMixin.__init__(self, number_of_states)

    def lazy_initialization(self, *args: Any, **kwargs: Any) -> None:
        """Of keys and values, which come by place, or of a state, which comes by name."""
        if args:
            super(LinearAttentionCacheLayerMixin, self).lazy_initialization(*args)
        else:
            super().lazy_initialization(**kwargs)

    def reset(self) -> None:
        super().reset()
        super(LinearAttentionCacheLayerMixin, self).reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        super().reorder_cache(beam_idx)
        super(LinearAttentionCacheLayerMixin, self).reorder_cache(beam_idx)

    def crop(self, tokens_to_remove: int) -> None:
        super(LinearAttentionCacheLayerMixin, self).crop(tokens_to_remove)


class TechniqueLayerWithStates(_WithStates, TechniqueLayer):
    """Of layers that run attention and a recurrence side by side."""


class PagedLayerWithStates(_WithStates, PagedLayer):
    """The same, of a paged cache."""


def equipped(cache: Any, model: Any, technique: Technique, indexes: Collection[int], pages: Pages | None = None) -> Any:
    """`cache` with the layers at `indexes`, which hold keys and values of full attention, as `technique` has them; of a
    paged one, `pages` instead of a pool that grows.

    Raises:
        ConfigError: one of them is of a kind that cannot be put in another's place.

    """
    layers = getattr(cache, "self_attention_cache", cache).layers
    if max(indexes, default=-1) >= len(layers):
        raise ConfigError(f"{technique.name}: {type(model).__name__} makes its cache layer by layer, in a way that kvctl does not know",
                          hint="kvctl size MODEL --technique … predicts it")  # fmt: skip
    rope = Rope(model, technique.name) if technique.store.unrotated else None
    if technique.paging is not None and pages is None:
        pages = Pages(technique.paging.block)
    first = min(indexes, default=0)
    for index in indexes:
        now = layers[index]
        states: tuple[int, ...] = ()
        if type(now) is LinearAttentionAndFullAttentionLayer:
            states = (now.number_of_states,)
        elif type(now) is not DynamicLayer:
            raise ConfigError(f"{technique.name}: layer {index} of {type(model).__name__} keeps a {type(now).__name__}",
                              hint="techniques work on layers that keep keys and values of full attention")  # fmt: skip
        if pages is not None:
            paged: Any = PagedLayerWithStates if states else PagedLayer
            layers[index] = paged(*states, pages, leads=index == first)
            continue
        kind: Any = TechniqueLayerWithStates if states else TechniqueLayer
        layers[index] = kind(*states, technique.store_at(index), technique.keep, Place(index, len(layers)), model, rope)
    return cache

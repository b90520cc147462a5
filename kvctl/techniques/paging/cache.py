"""A layer of transformers' cache whose keys and values lie in blocks. Imported where torch and transformers are."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from transformers.cache_utils import CacheLayerMixin

from kvctl.errors import ConfigError
from kvctl.techniques.paging.blocks import Blocks
from kvctl.techniques.paging.pool import Pool
from kvctl.techniques.paging.radix import Radix
from kvctl.techniques.paging.table import Table

if TYPE_CHECKING:
    from torch import Tensor


class Pages:
    """What all layers of a paged cache share: the blocks of all sequences, and which sequences a pass is about.

    `count` blocks, or as many as are needed; with `index` prompts are remembered and found again.
    """

    def __init__(self, size: int, count: int | None = None, *, index: bool = False) -> None:
        self.size = size
        self.blocks = Blocks(count)
        self.table = Table(self.blocks, size)
        self.radix: Radix | None = None
        if index:
            self.radix = Radix(self.blocks, size)
            self.blocks.reclaim = self.radix.evict
        self.at_work: tuple[int, ...] = ()
        self.rows: Tensor | None = None
        """The block table of those at work, int32 [sequences, 1 + blocks]: tokens that a sequence has, and its blocks."""
        self.copies: list[tuple[int, int]] = []
        """Blocks that every layer copies before it writes the tokens of the pass at hand."""

    @property
    def length(self) -> int:
        """Tokens of each sequence at work."""
        return self.table.length(self.at_work[0]) if self.at_work else 0

    def use(self, sequences: Sequence[int], device: Any = None) -> None:
        """The passes to come are about these, all of one length.

        Raises:
            ValueError: they have different lengths.

        """
        if len({self.table.length(one) for one in sequences}) > 1:
            raise ValueError("sequences of different lengths in one batch")
        self.at_work, self.copies = tuple(sequences), []
        self._lay(device)

    def begin(self, tokens: Sequence[int]) -> int:
        """A sequence for a prompt, at work alone; how many of its tokens are there already."""
        found = self.radix.find(tokens) if self.radix is not None else []
        self.use([self.table.begin(found)])
        return len(found) * self.size

    def remember(self, tokens: Sequence[int]) -> None:
        """The prompt of the one sequence at work is computed: others may find it."""
        if self.radix is not None:
            (sequence,) = self.at_work
            self.radix.insert(tokens, self.table.row(sequence))

    def extend(self, batch: int, new: int, device: Any) -> None:
        """A pass brings `new` tokens to each of `batch` sequences."""
        if not self.at_work:
            self.at_work = tuple(self.table.begin() for _ in range(batch))
        if batch != len(self.at_work):
            raise ConfigError(f"a batch of {batch}, and a paged cache of {len(self.at_work)} sequences")
        self.copies = [pair for one in self.at_work for pair in self.table.extend(one, new)]
        self._lay(device)

    def slots(self, new: int) -> Tensor:
        """Where the newest tokens lie [sequences, new]."""
        assert self.rows is not None
        length = self.length
        places = torch.arange(length - new, length, device=self.rows.device)
        return self.rows[:, 1 + places // self.size].long() * self.size + places % self.size

    def reorder(self, beams: Sequence[int], device: Any) -> None:
        """Sequences go on from others: they share blocks, and copy them when they write."""
        old = self.at_work
        self.use([self.table.fork(old[beam]) for beam in beams], device)
        for one in old:
            self.table.release(one)

    def reset(self) -> None:
        """Nothing is left."""
        if self.radix is not None:
            self.radix.clear()
        for one in self.table.sequences:
            self.table.release(one)
        self.at_work, self.rows, self.copies = (), None, []

    def _lay(self, device: Any) -> None:
        rows = [[self.table.length(one), *self.table.row(one)] for one in self.at_work]
        self.rows = torch.tensor(rows, dtype=torch.int32, device=device)


class PagedLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer of full attention; the layer that comes first in a pass (`leads`) makes room in the table for all."""

    is_sliding = False
    is_croppable = False

    def __init__(self, pages: Pages, *, leads: bool) -> None:
        super().__init__()
        self.pages, self._leads = pages, leads
        self.pool = Pool(pages.size)

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        self.device = key_states.device
        self.is_initialized = True

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Take in new tokens [batch, heads, new, dim]; all tokens of these sequences, gathered from their blocks."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        pages, new = self.pages, key_states.shape[2]
        if self._leads:
            pages.extend(key_states.shape[0], new, self.device)
        self.pool.grow(pages.blocks.count, key_states, value_states)
        self.pool.copy(pages.copies)
        self.pool.write(pages.slots(new).to(self.device), key_states, value_states)
        assert pages.rows is not None
        return self.pool.read(pages.rows[:, 1:].to(self.device), pages.length)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.pages.length + query_length, 0

    def get_seq_length(self) -> int:
        """Tokens of each sequence at work; prefixes that were found count."""
        return self.pages.length

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        """For other sequences: nothing of these is left."""
        self.pool = Pool(self.pages.size)
        self.is_initialized = False
        if self._leads:
            self.pages.reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Sequences change places."""
        if self._leads and self.is_initialized:
            self.pages.reorder(beam_idx.tolist(), self.device)

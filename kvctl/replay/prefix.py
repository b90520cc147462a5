"""Paged allocation whose full prompt blocks are shared between requests and kept after them.

Rules, those of vLLM's prefix cache: only full blocks are shared; a prompt's blocks can be found from its admission
on; at least the last token of a request is computed, so that a prompt that is there in full has its last block
computed once more: in place, or into a copy of its own while somebody else holds that block; blocks that are empty
are taken before any is evicted.

Where a hash of the trace stands for more tokens than a block has (512 and 16, say), equal hashes mean that all blocks
under them are equal, those before them being so. Where blocks are larger, or lie across the tokens of two hashes, a
block is shared if all hashes that it touches are equal. A hash for the last few tokens of a prompt stands for these
only, and blocks with tokens beyond the last hash are not shared. Outputs carry no hashes in a trace: their blocks are freed
at the end, and a follow-up that repeats an answer finds only the prompt before it.
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.replay.areas import add_paged, blocks_at
from kvctl.replay.paged import Paged, spared
from kvctl.replay.request import Request
from kvctl.replay.setup import Setup
from kvctl.replay.simulator import Running
from kvctl.replay.tree import Keys, Tree


class PrefixSharing(Paged):
    """`held` counts shared blocks once; `cached` are those of the tree that nobody holds."""

    name = "prefix"

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        self._hash_tokens = 0
        self._tree = Tree(1)
        self._whole = True
        """Whether a hash stands for whole blocks."""

    def _keys(self, request: Request) -> tuple[Keys, int]:
        """Names of the units of the prompt, and the full blocks that have one."""
        per_hash, block, ids = request.hash_tokens, self.block, request.hash_ids
        if per_hash != self._hash_tokens:
            if self._hash_tokens:
                raise UsageError(f"hashes of {self._hash_tokens} and of {per_hash} tokens in one trace")
            self._hash_tokens = per_hash
            self._tree = Tree(per_hash // block if per_hash % block == 0 else 1)
            self._whole = per_hash % block == 0
        full = min(len(ids) * per_hash, request.input_length) // block
        if self._whole:
            units = -(-full * block // per_hash)
            return (ids if units == len(ids) else ids[:units]), full
        # The hashes that a block is the first to touch; what the blocks before it touch is known to be equal.
        keys = [ids[-(-at * block // per_hash) : -(-(at + 1) * block // per_hash)] for at in range(full)]
        return tuple(keys), full

    def admit(self, entry: Running) -> int:
        request, done, block = entry.request, entry.done, self.block
        keys, full = self._keys(request) if request.hash_ids else ((), 0)
        tree = self._tree
        if self.gone:
            tree.evict(self.gone)
            self.gone = 0
        known = entry.length + entry.count * done
        limit = min(full, (known - 1) // block)
        found = tree.match(keys, limit)
        hit = found[2]
        copied = 0
        if hit == limit < full:
            whole = tree.match(keys, full)
            if whole[2] == full:
                if (whole[1] or whole[0]).holders:
                    copied = 1
                else:
                    found = whole
        there, kept = found[2], full - copied
        entry.taken = taken = blocks_at(request, done, block)
        need = taken - there
        free = need if self.capacity is None else self.capacity - self.held
        # Blocks that nobody holds count too; to count them is worth it only where they could be too many.
        if need + there > free:
            need += tree.unheld(found) if need <= free else 0
            if need > free and self.capacity is not None:
                self.need = need
                return -1
        need = taken - there
        node, gained = tree.hold(found)
        need += gained
        if kept > there:
            node = tree.add(node, keys, kept)
        entry.place, entry.kept = (node, copied), kept
        entry.final = blocks_at(request, entry.steps, block) - kept
        new = gained + kept - there
        self.cached -= gained
        self.shared += new
        self.held += need
        self.bound += new + entry.final
        self.stored += (new - kept - copied) * block + known
        self.saved += kept - new
        if entry.count > 1:
            self.saved += spared(entry, done, block)
        if self.cached:
            self._make_room()
        return hit * block

    def release(self, entry: Running, done: int, last: int) -> None:
        block, kept = self.block, entry.kept
        node, copied = entry.place
        lost = self._tree.release(node)
        own = entry.final if done == entry.steps else blocks_at(entry.request, done, block) - kept
        self.cached += lost
        self.shared -= lost
        self.held -= lost + own
        self.bound -= lost + entry.final
        self.stored -= (lost - kept - copied) * block + entry.length + entry.count * done
        self.saved -= kept - lost
        if entry.count > 1:
            self.saved -= spared(entry, done, block)
        add_paged(self.areas, entry, last, self.now - entry.since, block, copied)

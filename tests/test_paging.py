"""The bookkeeping of a paged cache, without torch: blocks, their table, and the index of prefixes.

The reference is slow and obvious: what every block holds, token by token, is written down as it is written; prefixes that
can be found are a dictionary of tuples; holders are counted anew each time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence

import pytest
from conftest import Outcome
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from kvctl.errors import KvctlError
from kvctl.formats import FP32, plain
from kvctl.spec import Formats, Retention, Workload
from kvctl.techniques import parse
from kvctl.techniques.keep import Place
from kvctl.techniques.paging import Paging
from kvctl.techniques.paging.blocks import Blocks
from kvctl.techniques.paging.radix import Radix
from kvctl.techniques.paging.table import Table
from kvctl.techniques.states import Compressed
from kvctl.techniques.store import Store

TOKENS = st.lists(st.integers(0, 2), max_size=14).map(tuple)
"""Few words, so that prompts share beginnings."""


class Requests(RuleBasedStateMachine):
    """Requests come, find what is there, grow, fork and end, in a pool that is too small at times."""

    @initialize(size=st.integers(1, 4), count=st.sampled_from([None, 6, 12, 40]))
    def start(self, size: int, count: int | None) -> None:
        self.size = size
        self.blocks = Blocks(count)
        self.table = Table(self.blocks, size)
        self.radix = Radix(self.blocks, size)
        self.blocks.reclaim = self.radix.evict
        self.written: dict[tuple[int, int], int] = {}
        """(block, place in it): the token that was written there last."""
        self.texts: dict[int, tuple[int, ...]] = {}
        self.known: dict[tuple[int, ...], int] = {}
        """Prefix in whole blocks: the block of its last tokens, as it was put in first."""

    def _write(self, sequence: int, tokens: Sequence[int]) -> bool:
        before = self.table.length(sequence), list(self.table.row(sequence))
        held = self.blocks.held
        read = {block for node in self.radix._nodes() for block in node.blocks if self.blocks.holders(block) > 1}
        try:
            copies = self.table.extend(sequence, len(tokens))
        except KvctlError:
            assert (self.table.length(sequence), list(self.table.row(sequence))) == before
            assert self.blocks.held <= held  # the index may have let go of some: of all that only it held
            assert all(self.blocks.holders(block) > 1 for node in self.radix._nodes() for block in node.blocks)
            return False
        assert read <= {block for node in self.radix._nodes() for block in node.blocks}
        for old, new in copies:
            for place in range(self.size):
                if (old, place) in self.written:
                    self.written[new, place] = self.written[old, place]
        row, start = self.table.row(sequence), before[0]
        for at, token in enumerate(tokens, start):
            block = row[at // self.size]
            assert self.blocks.holders(block) == 1, "written where others read"
            self.written[block, at % self.size] = token
        self.texts[sequence] += tuple(tokens)
        return True

    @rule(prompt=TOKENS)
    def come(self, prompt: tuple[int, ...]) -> None:
        self._forget_evicted()
        found = self.radix.find(prompt)
        longest = 0
        while (end := (longest + 1) * self.size) < len(prompt) and prompt[:end] in self.known:
            longest += 1
        assert found == [self.known[prompt[: (at + 1) * self.size]] for at in range(longest)]
        sequence = self.table.begin(found)
        hit = longest * self.size
        self.texts[sequence] = prompt[:hit]
        if not self._write(sequence, prompt[hit:]):
            self.table.release(sequence)
            del self.texts[sequence]
            return
        self._forget_evicted()
        whole = len(prompt) // self.size
        new = [at for at in range(whole) if prompt[: (at + 1) * self.size] not in self.known]
        assert self.radix.insert(prompt, self.table.row(sequence)) == len(new)
        for at in new:
            self.known[prompt[: (at + 1) * self.size]] = self.table.row(sequence)[at]

    @precondition(lambda self: self.texts)
    @rule(data=st.data(), tokens=TOKENS)
    def grow(self, data: st.DataObject, tokens: tuple[int, ...]) -> None:
        self._write(data.draw(st.sampled_from(sorted(self.texts))), tokens)

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        held = self.blocks.held
        self.texts[self.table.fork(sequence)] = self.texts[sequence]
        assert self.blocks.held == held  # nothing is copied before something is written

    @precondition(lambda self: self.texts)
    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(sorted(self.texts)))
        self.table.release(sequence)
        del self.texts[sequence]

    def _forget_evicted(self) -> None:
        """What the index let go is no longer known; it may only be what nobody else held, from the ends of branches."""
        there = {block for node in self.radix._nodes() for block in node.blocks}
        gone = {text for text, block in self.known.items() if block not in there}
        for text in gone:
            longer = [other for other in self.known if other[: len(text)] == text and other not in gone]
            assert not longer, "a prefix went before what continues it"
            del self.known[text]

    @invariant()
    def everything_is_where_it_belongs(self) -> None:
        if not hasattr(self, "blocks"):
            return
        holders = Counter[int]()
        for sequence, text in self.texts.items():
            row = self.table.row(sequence)
            assert (self.table.length(sequence), len(row)) == (len(text), -(-len(text) // self.size))
            assert tuple(self.written[row[at // self.size], at % self.size] for at in range(len(text))) == text
            holders.update(row)
        for node in self.radix._nodes():
            holders.update(node.blocks)
        assert {block: self.blocks.holders(block) for block in range(self.blocks.count)} == {
            block: holders[block] for block in range(self.blocks.count)
        }
        assert self.blocks.held == len(holders)
        self._forget_evicted()
        assert len(self.radix) == len(self.known)

    def teardown(self) -> None:
        if not hasattr(self, "blocks"):
            return
        for sequence in self.texts:
            self.table.release(sequence)
        self.radix.clear()
        assert self.blocks.held == 0


Requests.TestCase.settings = settings(max_examples=150, stateful_step_count=30, deadline=None)
TestRequests = Requests.TestCase


def test_the_least_recently_used_prompt_goes_first() -> None:
    """Blocks of one token; four in all. Two prompts of two, the first of them asked for again, then a third."""
    blocks = Blocks(4)
    table, radix = Table(blocks, 1), Radix(blocks, 1)
    blocks.reclaim = radix.evict
    for prompt in ((1, 2), (3, 4)):
        sequence = table.begin()
        table.extend(sequence, 2)
        radix.insert(prompt, table.row(sequence))
        table.release(sequence)
    assert len(radix.find((1, 2, 0))) == 2
    sequence = table.begin()
    table.extend(sequence, 1)
    assert radix.find((3, 4, 0)) == [2]  # of the older one, its end went; and now it is the newer one
    table.extend(sequence, 1)
    assert [len(radix.find(prompt)) for prompt in ((1, 2, 0), (3, 4, 0))] == [1, 1]
    assert radix.evicted == 2


def test_what_a_running_request_reads_is_not_let_go() -> None:
    blocks = Blocks(2)
    table, radix = Table(blocks, 2), Radix(blocks, 2)
    blocks.reclaim = radix.evict
    sequence = table.begin()
    table.extend(sequence, 4)
    radix.insert((5, 6, 7, 8), table.row(sequence))
    with pytest.raises(KvctlError, match="the pool has 2 blocks, 1 are needed and 0 are free"):
        table.extend(table.begin(), 1)
    table.release(sequence)
    table.extend(table.begin(), 3)
    assert len(radix) == 0


def test_a_fork_copies_the_last_block_of_all_but_one() -> None:
    """Four sequences of 21 tokens in blocks of 16: the first block stays shared; of the second, in part full, the fourth to
    write has the last holder's own. 1 + 4 blocks instead of 8."""
    blocks = Blocks()
    table = Table(blocks, 16)
    first = table.begin()
    table.extend(first, 21)
    all_four = [first, *(table.fork(first) for _ in range(3))]
    assert blocks.held == 2
    copies = [pair for one in all_four for pair in table.extend(one, 1)]
    assert (len(copies), table.copied, blocks.held) == (3, 3, 5)
    assert [table.extend(one, 1) for one in all_four] == [[]] * 4
    # Full blocks are never copied.
    whole = table.begin()
    table.extend(whole, 32)
    other = table.fork(whole)
    assert table.extend(other, 1) == table.extend(whole, 1) == []


def test_a_free_block_cannot_be_shared_or_freed() -> None:
    blocks = Blocks(1)
    for call in (blocks.hold, blocks.drop):
        with pytest.raises(ValueError, match="is free"):
            call([0])


@given(st.integers(1, 64), st.integers(0, 3000), st.integers(1, 8), st.integers(1, 128))
def test_bytes_by_counting(block: int, tokens: int, heads: int, dim: int) -> None:
    """Blocks are opened one by one, as tokens come."""
    opened = sum(at % block == 0 for at in range(tokens))
    paging = parse(f"paged:block={block}").paging
    assert paging == Paging(block)
    layer = Compressed(heads, dim, dim, 0, Store(), None, Place(), paging)
    formats, work = Formats(FP32, plain(FP32), plain(FP32)), Workload(tokens)
    held = opened * block * heads * dim * 2 * 4
    assert layer.size(work, formats, Retention(0, 0)) == held
    table = 4 * (1 + opened) if tokens else 0
    assert layer.replace(table=True).size(work, formats, Retention(0, 0)) == held + table


def test_the_table_is_counted_once(kvctl: Callable[..., Outcome]) -> None:
    """SmolLM2-135M, 100 tokens: 7 blocks of 16 in each of 30 layers of 3 heads of 64, and 8 numbers of the table for all."""
    document = kvctl("size", "SmolLM2-135M", "--ctx", "100", "--technique", "paged", "--dtype", "fp32", "--json").json
    (result,) = document["results"]
    assert result["kv_bytes"] == 30 * 2 * 3 * 64 * 4 * 7 * 16 + 4 * 8

"""The replay of traffic: against a slow reference, by hand, and as invariants."""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.errors import SourceError, UsageError
from kvctl.replay import POLICIES, PRESETS, Request, Setup, preset, replay
from kvctl.replay.areas import blocks_at
from kvctl.replay.contiguous import Contiguous
from kvctl.replay.prefix import PrefixSharing
from kvctl.replay.simulator import Running, Simulator
from kvctl.replay.spill import SpillQueue
from kvctl.replay.tree import Node
from tests.replay_reference import simulate

SECOND = 1_000_000

# Ten requests: blocks of 4 tokens, 8 blocks, sequences of 16 tokens at most, one second an iteration, and every prefill
# takes one. A request of L tokens and `o` of output admitted at t stores L at t, L + 1 at t + 1, …, L + o - 1 in its
# last iteration, and has ended at t + o.
TEN = (
    Request(0, 5, 3, (1, 2), hash_tokens=4),
    Request(0, 5, 3, (1, 3), hash_tokens=4),
    Request(10 * SECOND, 6, 4, (4, 5), sequences=2, hash_tokens=4),
    Request(20 * SECOND, 4, 2, (1,), max_output=4, hash_tokens=4),
    Request(20 * SECOND, 4, 4, (1,), hash_tokens=4),
    Request(22 * SECOND, 4, 2, (), hash_tokens=4),
    Request(30 * SECOND, 11, 5, (10, 11, 12), hash_tokens=4),
    Request(30 * SECOND, 11, 5, (20, 21, 22), hash_tokens=4),
    Request(30 * SECOND, 5, 3, (30, 31), hash_tokens=4),
    Request(30 * SECOND, 14, 4, (40, 41, 42, 43), hash_tokens=4),  # 18 tokens: rejected by all
)
TEN_SETUP = Setup(block_size=4, capacity_blocks=8, bytes_per_block=100, max_length=16, tpot=SECOND, prefill_rate=1000)

BY_HAND = {
    # Slots of each request (16, the fourth 4 + 4), and of those over its time: stored, copied, never used, reserved.
    #  1   t 0-2    48: 5+6+7 = 18,  -,         9 × 3 = 27, 2+1+0 = 3
    #  2   t 0-2    48: the same
    #  3   t 10-13 128: 6+8+10+12 = 36, 6 × 4 = 24, 2 × 7 × 4 = 56, 2 × (3+2+1) = 12
    #  4   t 20-21  16: 4+5 = 9,     -,         3 × 2 = 6,  1         at slots 0-7
    #  5   t 20-23  64: 4+…+7 = 22,  -,         9 × 4 = 36, 3+2+1 = 6 at slots 8-23
    #  6   t 24-25  32: 9,           -,         11 × 2 = 22, 1
    #      came at 22, when 16 slots were free, 0-7 and 24-31: no 16 in one piece for 2 iterations
    #  7   t 30-34  80: 11+…+15 = 65, -,        1 × 5 = 5,  4+3+2+1 = 10
    #  8   t 30-34  80: the same; now all 32 slots are taken
    #  9   t 35-37  48: as 1; waited for 5
    # sums          544: 260,         24,        211,        49
    "contiguous": {
        "finished": 9, "rejected": 1, "iterations": 38, "makespan_us": 38 * SECOND,
        "slot_area": 544, "stored_area": 260, "copied_area": 24, "internal_area": 211, "reserved_area": 49, "external_area": 32,
        "peak_slots": 32, "stored_at_peak": 30, "peak_stored_tokens": 30,  # at t 34: twice 15
        "peak_held_blocks": 8, "peak_held_bytes": 800, "mean_held_blocks": 3, "mean_held_bytes": 357,  # 544 / (38 × 4) = 3.57
        "mean_stored_tokens": 6, "mean_saved_blocks": 0, "peak_saved_blocks": 0,
        "queried_tokens": 55, "hit_tokens": 0, "peak_cached_blocks": 0, "evicted_blocks": 0, "preemptions": 0, "recomputed_tokens": 0,
        "peak_running": 2, "running_area": 31, "peak_queue": 1, "waiting_area": 7,
    },
    # Blocks × 4 over time: stored, copied, never used, reserved.
    #  1   2+2+2          24: 18, -, 3, 2+1+0 = 3
    #  2                  24: the same
    #  3   2+3+3+5        52: 36, 2 × 3 = 6 (the last prompt block is copied once at t 11), 2 × 3 = 6, 2+2 = 4
    #      apart these would be 4+4+4+6 blocks: 2+1+1+1 = 5 saved
    #  4   1+2            12: 9,  -, 3, 0
    #  5   1+2+2+2        28: 22, -, 3, 2+1 = 3
    #  6   1+2 (t 22-23)  12: 9,  -, 3, 0
    #  7   3+3+4+4+4      72: 65, -, 3, 1+2+1 = 4
    #  8                  72: the same
    #  9   2+2            16: 5+6 = 11, -, 2, 3; at t 32 both above take a block, 10 of 8: preempted, with 7 tokens
    #      2 (t 35)        8: 7, -, 1, 0; its 7 tokens are computed again, of which the last was all it lacked
    # sums               320: 260, 6, 30, 24
    "paged": {
        "finished": 9, "rejected": 1, "iterations": 36, "makespan_us": 36 * SECOND,
        "slot_area": 320, "stored_area": 260, "copied_area": 6, "internal_area": 30, "reserved_area": 24, "external_area": 0,
        "peak_slots": 32, "stored_at_peak": 30, "peak_stored_tokens": 30,
        "peak_held_blocks": 8, "peak_held_bytes": 800, "mean_held_blocks": 2, "mean_held_bytes": 222,  # 320 / (36 × 4) = 2.22
        "mean_stored_tokens": 7, "mean_saved_blocks": 0, "peak_saved_blocks": 2,
        "queried_tokens": 55, "hit_tokens": 0, "peak_cached_blocks": 0, "evicted_blocks": 0, "preemptions": 1, "recomputed_tokens": 7,
        "peak_running": 3, "running_area": 31, "peak_queue": 1, "waiting_area": 3,
    },
    #  1, 2  share block "1": 4 tokens found. Three blocks, 3 × 3 × 4 = 36: 4 × 3 + 2 × (1+2+3) = 24, -, 6, 6
    #  3     as above; its block "4" stays
    #  4     block "1" is there, but the last token must be computed: in place. 12: 9, -, 3, 0
    #  5     the same, but 4 holds it: a copy. 28: 0+1+2+3 = 6, 4 × 4 = 16, 3, 3
    #  6-9   as above. At t 30 the 8 blocks need the room of "1" and "4"; at t 32 that of block "30" of request 9.
    #        At t 35 the four full blocks of 7 and 8 are left, at t 36 that of 9 too: 5 cached.
    # sums    36 + 52 + 12 + 28 + 12 + 144 + 24 = 308: 24+36+9+6+9+130+18 = 232, 6+16 = 22, 6+6+3+3+3+6+3 = 30,
    #         6+4+0+3+0+8+3 = 24; saved 1 × 3 + 5 = 8 blocks × iterations
    "prefix": {
        "finished": 9, "rejected": 1, "iterations": 36, "makespan_us": 36 * SECOND,
        "slot_area": 308, "stored_area": 232, "copied_area": 22, "internal_area": 30, "reserved_area": 24, "external_area": 0,
        "peak_slots": 32, "stored_at_peak": 30, "peak_stored_tokens": 30,
        "peak_held_blocks": 8, "peak_held_bytes": 800, "mean_held_blocks": 2, "mean_held_bytes": 213,  # 308 / (36 × 4) = 2.14
        "mean_stored_tokens": 6, "mean_saved_blocks": 0, "peak_saved_blocks": 2,
        "queried_tokens": 55, "hit_tokens": 4, "peak_cached_blocks": 5, "evicted_blocks": 3, "preemptions": 1, "recomputed_tokens": 7,
        "peak_running": 3, "running_area": 31, "peak_queue": 1, "waiting_area": 3,
    },
}  # fmt: skip


def test_ten_requests_by_hand() -> None:
    result = replay(iter(TEN), TEN_SETUP)
    assert result.requests == 10
    for found in result.policies:
        expected = {"policy": found.policy, "requests": 10} | BY_HAND[found.policy]
        assert {name: getattr(found, name) for name in found._fields} == expected
    contiguous, paged, prefix = result.policies
    assert (contiguous.utilization, paged.utilization) == (260 / 544, 260 / 320)
    assert prefix.hit_rate == 4 / 55
    assert contiguous.external_fragmentation == 32 / 576
    assert result.to_dict()["policies"][1]["internal_fragmentation"] == 30 / 320


def test_figure_3_of_the_pagedattention_paper() -> None:
    # Kwon et al. 2023, figure 3: request A has a prompt of 7 tokens and generates 4, the last of which, <eos>, is not
    # stored. Of 2,048 slots reserved 2,038 are never used (internal fragmentation); while its first output token is
    # written 2 are reserved for later ones.
    setup = Setup(16, None, 1, 2048, tpot=SECOND, prefill_rate=1000)
    found = replay([Request(0, 7, 4)], setup, policies=["contiguous"]).policies[0]
    assert found.iterations == 4
    assert found.internal_area == 2038 * 4
    assert found.reserved_area == 3 + 2 + 1 + 0
    paged = replay([Request(0, 7, 4)], Setup(4, None, 1, 2048, tpot=SECOND, prefill_rate=1000)).policies[1]
    # Figure 6: the same in blocks of 4; blocks are 2 until 8 tokens, and then 3.
    assert paged.slot_area == (2 + 2 + 3 + 3) * 4


@st.composite
def traces(draw: st.DrawFn) -> list[Request]:
    """Few tokens, little memory, much in common."""
    hash_tokens = draw(st.sampled_from((1, 2, 3, 4, 6, 8)))
    time, out = 0, []
    for _ in range(draw(st.integers(1, 14))):
        time += draw(st.sampled_from((0, 0, SECOND // 2, SECOND, 3 * SECOND, 9 * SECOND)))
        length = draw(st.integers(1, 20))
        hashes = draw(st.sampled_from((-(-length // hash_tokens), length // hash_tokens, 0)))
        ids = tuple(draw(st.lists(st.sampled_from((0, 0, 0, 1)), min_size=hashes, max_size=hashes)))
        out.append(
            Request(
                time, length, draw(st.integers(0, 14)), ids, draw(st.sampled_from((1, 1, 1, 2, 3))),
                draw(st.sampled_from((None, 4, 20))), hash_tokens,
            )
        )  # fmt: skip
    return out


@st.composite
def setups(draw: st.DrawFn) -> Setup:
    return Setup(
        block_size=draw(st.integers(1, 6)),
        capacity_blocks=draw(st.sampled_from((None, 3, 5, 8, 12, 20, 40))),
        bytes_per_block=6,
        max_length=draw(st.sampled_from((12, 24, 40))),
        max_sequences=draw(st.sampled_from((None, None, 2, 4))),
        concurrency=draw(st.sampled_from((None, None, 1, 3))),
        tpot=SECOND,
        prefill_rate=draw(st.sampled_from((1, 3, 7, 100))),
        reserve=draw(st.sampled_from(("max", "pow2", "exact"))),
    )


def same_as_reference(policy: str, trace: list[Request], setup: Setup) -> None:
    expected = simulate(trace, setup, policy)
    found = replay(trace, setup, policies=[policy]).policies[0]
    saved = expected.pop("saved_area")
    assert found.mean_saved_blocks == saved // max(expected["iterations"], 1)
    assert {name: getattr(found, name) for name in expected} == expected


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=200, deadline=None)
@given(trace=traces(), setup=setups())
def test_equals_stepping_token_by_token(policy: str, trace: list[Request], setup: Setup) -> None:
    same_as_reference(policy, trace, setup)


@pytest.mark.slow
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=2000, deadline=None)
@given(trace=traces(), setup=setups())
def test_equals_stepping_token_by_token_at_length(policy: str, trace: list[Request], setup: Setup) -> None:
    same_as_reference(policy, trace, setup)


def stored_by(entry: Running, now: int) -> int:
    """Output tokens of each sequence."""
    return entry.done + (now - entry.start + 1 if entry.begun else 0)


def conserved(run: Simulator) -> None:
    """Held is what the running requests hold, and held, cached and free are all there is."""
    if isinstance(run, Contiguous):
        taken = sorted((start, start + e.kept) for e in run.running for start in e.place)
        holes = sorted(zip(run._space._starts, run._space._sizes, strict=True))
        assert sum(end - start for start, end in taken) == run.held
        pieces = sorted(taken + [(start, start + size) for start, size in holes])
        assert all(one[1] == two[0] for one, two in itertools.pairwise(pieces))
        assert all(one[0] + one[1] < two[0] for one, two in itertools.pairwise(holes)), "not joined"
        if run.capacity is not None:
            assert (pieces[0][0], pieces[-1][1]) == (0, run.capacity)
            assert run.held + sum(size for _, size in holes) == run.capacity
    else:
        own = sum(blocks_at(e.request, stored_by(e, run.now), run.block) - e.kept for e in run.running)
        assert run.held == own + run.shared
        if run.capacity is not None:
            assert 0 <= run.held + run.cached <= run.capacity
    tokens = sum(e.length + e.count * stored_by(e, run.now) for e in run.running)
    if isinstance(run, PrefixSharing):
        held = unheld = 0
        nodes = list(run._tree.root.children.values())
        while nodes:
            node = nodes.pop()
            assert node.start < node.end
            assert node.parent is not None
            assert node.parent.end == node.start
            holders = sum(any(node is above for above in line(e.place[0])) for e in run.running)
            assert node.holders == holders
            size = node.end - node.start
            held, unheld = (held + size, unheld) if holders else (held, unheld + size)
            nodes += node.children.values()
        assert held == run.shared
        assert unheld - run.gone == run.cached >= 0
        tokens += (run.shared - sum(e.kept + e.place[1] for e in run.running)) * run.block
    else:
        assert run.cached == 0
    assert run.stored == tokens
    assert run.stored <= run.held * (1 if isinstance(run, Contiguous) else run.block)


def line(node: Node | None) -> Iterator[Node]:
    while node is not None:
        yield node
        node = node.parent


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=200, deadline=None)
@given(trace=traces(), setup=setups())
def test_conserves_memory_at_every_step(policy: str, trace: list[Request], setup: Setup) -> None:
    class Watched(POLICIES[policy]):  # type: ignore[misc, valid-type]
        def _turn(self, time: int) -> None:
            super()._turn(time)
            conserved(self)

        def _pass(self, until: int | None) -> bool:
            full: bool = super()._pass(until)
            conserved(self)
            return full

    run = Watched(setup)
    for request in trace:
        run.offer(request)
    run.drain()
    assert run.held == run.stored == run.bound == run.saved == run.in_flight == run.sequences == 0
    assert run.finished + run.rejected == len(trace)


def test_unlimited_prefix_cache_finds_all_that_came_before() -> None:
    # 8 prompts of 100 blocks, each with 50 blocks of the first: 7 × 50 blocks of 16 are found.
    shared = tuple(range(50))
    trace = [Request(i, 1600, 2, shared + tuple(range(1000 * i, 1000 * i + 50)), hash_tokens=16) for i in range(1, 9)]
    found = replay(trace, Setup(16, None, 1, 4096)).policies[2]
    assert (found.queried_tokens, found.hit_tokens) == (8 * 1600, 7 * 800)
    # In Mooncake's 512-token hashes the same 800 tokens are one hash of 512, and nothing of the next.
    trace = [Request(i, 1600, 2, (0, 100 * i, 100 * i + 1, 100 * i + 2)) for i in range(1, 9)]
    assert replay(trace, Setup(16, None, 1, 4096)).policies[2].hit_tokens == 7 * 512
    # Blocks of 1,056 tokens (hybrids) need three hashes to agree.
    trace = [Request(i, 1600, 2, (0, 1, 2, 100 * i)) for i in range(1, 9)]
    assert replay(trace, Setup(1056, None, 1, 4096)).policies[2].hit_tokens == 7 * 1056
    trace = [Request(i, 1600, 2, (0, 1, 100 * i, 100 * i + 1)) for i in range(1, 9)]
    assert replay(trace, Setup(1056, None, 1, 4096)).policies[2].hit_tokens == 0


def test_closed_loop_ignores_times() -> None:
    trace = [Request(None, 32, 4) for _ in range(20)]
    found = replay(trace, Setup(16, None, 1, 64, concurrency=5)).policies
    assert {row.peak_running for row in found} == {5}
    with pytest.raises(UsageError, match="arrival"):
        replay(trace, Setup(16, None, 1, 64))


@pytest.mark.parametrize(
    "wrong",
    [
        {"block_size": 0},
        {"block_size": 2**30},
        {"capacity_blocks": -1},
        {"max_length": None},
        {"tpot": 1.5},
        {"reserve": "all"},
    ],
)
def test_setup_is_checked(wrong: dict[str, Any]) -> None:
    setup = Setup(block_size=16, capacity_blocks=4, bytes_per_block=1, max_length=64).replace(**wrong)
    with pytest.raises(UsageError, match=next(iter(wrong))):
        replay([Request(0, 1, 1)], setup)


def test_no_requests_is_an_error() -> None:
    with pytest.raises(SourceError, match="no requests"):
        replay([], TEN_SETUP)


def test_progress_and_notes() -> None:
    seen: list[int] = []
    result = replay(preset("chat", 3000, 5.0), Setup(16, 4000, 1, 32_768), progress=seen.append)
    assert seen[-1] == 3000
    assert seen == sorted(seen)
    assert result.assumed == ("tpot", "prefill_rate")
    assert not result.notes
    assert "no prefix" in replay([Request(0, 5, 5)], TEN_SETUP).notes[0]


@pytest.mark.parametrize("keep", [4, 10])
def test_spilling_keeps_the_order(keep: int) -> None:
    queue, expected = SpillQueue(keep), []
    for step in range(300):
        queue.append((Request(step, 1, 1, (step,)), step, 0))
        expected.append(step)
        if step % 7 in (0, 3):
            assert queue.first()[1] == expected[0]
            request, at, _ = queue.popleft()
            assert (request, at) == (Request(expected[0], 1, 1, (expected[0],)), expected.pop(0))
        assert queue.count == len(expected)
    assert [queue.popleft()[1] for _ in range(queue.count)] == expected


# What the sources of the presets publish: median or mean of prompts and outputs, and tokens found in an endless cache.
PUBLISHED = {
    "chat": ("median", 1020, "median", 129, 0.62),  # Splitwise; 62% in the chatbot trace of arXiv 2506.02634
    "rag": ("median", 3175, "median", 192, None),  # medians of the nine rows that RAGPulse's page shows
    "agent": ("mean", 8596, "mean", 182, 0.59),  # Mooncake, FAST 2025, table 2
    "code": ("median", 1500, "median", 13, None),  # Splitwise
}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_published_lengths(name: str) -> None:
    import statistics

    which_in, prompt, which_out, output, found = PUBLISHED[name]
    trace = list(preset(name, 10_000, 5.0))
    assert getattr(statistics, which_in)(r.input_length for r in trace) == pytest.approx(prompt, rel=0.1)
    assert getattr(statistics, which_out)(r.output_length for r in trace) == pytest.approx(output, rel=0.1)
    assert trace[-1].arrival == pytest.approx(10_000 / 5 * SECOND, rel=0.05)
    assert all(len(r.hash_ids) == r.input_length // r.hash_tokens for r in trace)
    if found is not None:
        endless = replay(trace, Setup(16, None, 1, 131_072), policies=["prefix"]).policies[0]
        assert endless.hit_rate == pytest.approx(found, abs=0.06)


def test_presets_repeat() -> None:
    assert list(preset("agent", 50, 1.0, seed=3)) == list(preset("agent", 50, 1.0, seed=3))
    assert list(preset("agent", 50, 1.0, seed=3)) != list(preset("agent", 50, 1.0, seed=4))


@pytest.mark.parametrize("wrong", [("poem", 1, 1.0), ("chat", 0, 1.0), ("chat", 1, 0.0), ("chat", 1, float("nan"))])
def test_presets_are_checked(wrong: tuple[str, int, float]) -> None:
    with pytest.raises(UsageError):
        preset(*wrong)


MEMORY = """
import resource, sys
from kvctl.replay import Setup, preset, replay
count = int(sys.argv[1])
# Twice what the engine can do, so that the queue grows to half the trace.
replay(preset("chat", count, 40.0), Setup(16, 2000, 1, 32_768))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_trace() -> None:
    def peak(count: int) -> int:
        run = subprocess.run([sys.executable, "-c", MEMORY, str(count)], capture_output=True, text=True, check=True)
        return int(run.stdout)

    assert peak(100_000) < 1.3 * peak(10_000)

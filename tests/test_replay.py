"""The replay of traffic: against a slow reference, by hand, and as invariants."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvctl.replay import Request, Setup, replay
from kvctl.replay.run import POLICIES
from tests.replay_reference import simulate

SECOND = 1_000_000


@st.composite
def traces(draw):
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
def setups(draw):
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


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=1500, deadline=None)
@given(trace=traces(), setup=setups())
def test_equals_stepping_token_by_token(policy, trace, setup):
    expected = simulate(trace, setup, policy)
    found = replay(trace, setup, policies=[policy]).policies[0]
    saved = expected.pop("saved_area")
    assert found.mean_saved_blocks == saved // max(expected["iterations"], 1)
    assert {name: getattr(found, name) for name in expected} == expected

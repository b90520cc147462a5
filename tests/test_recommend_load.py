"""What traces and workloads say of a load: against hand counts, an LRU list played block by block, and the replay's simulator."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvctl.errors import UsageError
from kvctl.hardware import read_gpus
from kvctl.model import build_spec
from kvctl.recommend import load as loads
from kvctl.recommend.answers import recommend
from kvctl.recommend.load import Heard, Shared, heard
from kvctl.recommend.request import Ask, ask
from kvctl.replay import Request, Setup, preset, replay
from kvctl.sources import catalogue

MODEL = build_spec(catalogue.find("Qwen/Qwen3-8B"))


def request(*ids: int, tokens: int | None = None, answer: int = 10, at: int | None = None) -> Request:
    """Of 64 tokens a hash."""
    return Request(at, len(ids) * 64 if tokens is None else tokens, answer, ids, hash_tokens=64)


def heard_of(*requests: Request) -> Heard:
    return heard("a trace", requests)


# -- how much is found ---------------------------------------------------------------------------


def test_what_two_prompts_have_in_common_is_found_once() -> None:
    # 200 + 200 tokens, of which the second finds two runs of 64: 128 of 400. A cache of two runs keeps them: the end of
    # the first prompt is forgotten before its beginning.
    reuse = heard_of(request(1, 2, 3, tokens=200), request(1, 2, 9, tokens=200)).load(None).reuse
    assert (reuse.share(None), reuse.share(128), reuse.share(127)) == (0.32, 0.32, 0.0)
    assert reuse.gap() == 1.0


def test_the_last_token_of_a_prompt_is_computed() -> None:
    # 128 tokens that are all there: 127 could be used, seven blocks of 16 of them are whole.
    assert heard_of(request(1, 2), request(1, 2)).load(None).reuse.share(None) == 112 / 256


def test_equal_hashes_after_others_are_other_tokens() -> None:
    assert heard_of(request(1, 2), request(2, 1), request(3, 2)).load(None).reuse.share(None) == 0.0


def test_what_comes_between_has_to_fit_too() -> None:
    # Between the two requests for 1 and 2 three runs of another prompt: 5 × 64 tokens.
    reuse = heard_of(request(1, 2, tokens=150), request(5, 6, 7), request(1, 2, 3)).load(None).reuse
    assert reuse.share(319) == 0.0
    assert reuse.share(320) == 128 / (150 + 192 + 192)
    assert reuse.gap() == 2.0


def test_requests_dealt_to_two_caches() -> None:
    turns = [request(1, 2, 3), request(1, 2, 3, 4), request(7, 8), request(7, 8, 9)]
    together = heard_of(*turns).load(None).reuse
    # One cache: 192 of the second prompt and 128 of the fourth. Two, in turn: the second of each pair goes elsewhere.
    assert together.share(None) == (192 + 128) / (192 + 256 + 128 + 192)
    assert together.share(None, 2) == 0.0
    crossed = heard_of(turns[0], turns[2], turns[1], turns[3]).load(None).reuse
    assert crossed.share(None, 2) == crossed.share(None)


def test_without_hashes_nothing_is_found_and_that_is_said() -> None:
    load = heard_of(Request(None, 500, 10), Request(None, 500, 10)).load(None)
    assert load.reuse.share(None) == 0.0
    assert load.reuse.gap() is None
    assert "says nothing of what prompts have in common" in load.notes[0]


@pytest.mark.parametrize("name", ["chat", "rag", "agent", "code"])
def test_the_replay_finds_the_same(name: str) -> None:
    """`kvctl.replay` plays requests in blocks of 16 with arrivals, answers and running requests."""
    requests = list(preset(name, 1500, 2.0))
    reuse = heard(name, requests).load(None).reuse
    for room, within in ((None, 0.0005), (400_000, 0.01)):
        # So quick that few run at once, and what runs is not what takes the room.
        setup = Setup(16, None if room is None else room // 16, 1, 10**7, prefill_rate=10**6, tpot=1000)
        (played,) = replay(requests, setup, policies=("prefix",)).policies
        assert reuse.share(room) == pytest.approx(played.hit_rate, abs=within)


_PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=25)


def _lru(prompts: list[list[int]], room: int) -> float:
    """Runs of one token block each in a list, the one that goes first in front; a prompt's end goes before its beginning."""
    cache: list[tuple[int, ...]] = []
    hits = 0
    for ids in prompts:
        path = [tuple(ids[: end + 1]) for end in range(len(ids))]
        there = 0
        while there < len(path) and path[there] in cache:
            there += 1
        hits += min(there * 64, (len(ids) * 64 - 1) // 16 * 16)
        cache = [one for one in cache if one not in path] + path[::-1]
        cache = cache[max(len(cache) - room, 0) :]
    return hits / sum(len(ids) * 64 for ids in prompts)


@given(_PROMPTS, st.integers(1, 40))
def test_a_cache_that_forgets_what_was_used_longest_ago(prompts: list[list[int]], room: int) -> None:
    reuse = heard_of(*(request(*ids) for ids in prompts)).load(None).reuse
    assert reuse.share(None) == pytest.approx(_lru(prompts, 1000))
    # A run counts as found where all of it is: never more than block by block, and more room never finds less.
    assert reuse.share(room * 64) <= _lru(prompts, room) + 1e-12
    assert reuse.share(room * 64) <= reuse.share((room + 1) * 64)


def test_a_shared_beginning() -> None:
    # 1,000 tokens have 62 whole blocks of 16.
    assert Shared(1000, 4000).share(0) == 992 / 4000
    assert Shared(64, 64).share(None) == 48 / 64
    assert asked(prompt=4000, answer=100, shared=1000).reuse is not None
    with pytest.raises(UsageError, match="prompts have 4,000 tokens"):
        asked(prompt=4000, answer=100, shared=4001)


# -- how long, how often -------------------------------------------------------------------------


def asked(gpus: str = "H100", **more: Any) -> Ask:
    return ask(MODEL, read_gpus(gpus), **more)


def test_lengths_and_rate_of_a_trace() -> None:
    # Three requests in four seconds are half a request a second; means rounded up.
    turns = heard_of(
        request(1, answer=10, at=0), request(1, 2, answer=20, at=1_000_000), request(9, answer=60, at=4_000_000)
    )
    found = asked(heard=turns)
    assert (found.prompt, found.answer, found.context, found.rate, found.concurrency) == (86, 30, 148, 0.5, None)
    assert asked(heard=turns, concurrency=3).rate is None
    assert asked(heard=turns, rate=9.0).rate == 9.0
    assert asked(heard=turns, context=1000).context == 1000
    assert any("0.5 requests a second" in note for note in found.notes)


def test_requests_that_are_too_long_are_left_out() -> None:
    found = asked(heard=heard_of(request(1, tokens=60), request(*range(90))), context=4096)
    assert (found.prompt, found.answer) == (60, 10)
    assert any("1 of 2 requests have more than 4,096 tokens" in note for note in found.notes)
    with pytest.raises(UsageError, match="no request of a trace fits in 50 tokens"):
        asked(heard=heard_of(request(1)), context=50)


def test_large_traces_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loads, "MOST_REQUESTS", 3)
    shown: list[int] = []
    found = heard("t", iter([request(1)] * 10), shown.append)
    assert len(found.rows) == 3
    assert "the first 3 requests" in found.notes[0]
    monkeypatch.setattr(loads, "MOST_REQUESTS", 100)
    assert len(heard("t", [request(1)] * 3).rows) == 3


def test_a_trace_and_lengths_contradict_each_other() -> None:
    with pytest.raises(UsageError, match="lengths of its own"):
        asked(heard=heard_of(request(1)), prompt=100)


# -- what follows --------------------------------------------------------------------------------


def test_what_is_found_is_not_computed_again() -> None:
    plain = recommend(asked(prompt=8000, answer=100, concurrency=4), advise=False).answers[0].judged
    found = recommend(asked(prompt=8000, answer=100, concurrency=4, shared=6000), advise=False).answers[0].judged
    assert plain.found is None
    assert found.found == 6000 / 8000
    assert plain.speed is not None
    assert found.speed is not None
    assert found.speed.ttft.mid < 0.5 * plain.speed.ttft.mid
    assert "75% of 8,000 prompt tokens are found" in found.speed.assumption
    assert "none is found" in plain.speed.assumption


def test_nothing_is_counted_on_with_recurrent_layers() -> None:
    spec = build_spec(catalogue.find("Qwen/Qwen3-Next-80B-A3B-Instruct"))
    one = recommend(ask(spec, read_gpus("4xH100"), prompt=8000, answer=100, concurrency=4, shared=6000), advise=False)
    assert [answer.judged.found for answer in one.answers] == [0.0] * len(one.answers)
    assert one.answers


def test_advice_is_told_what_comes_again() -> None:
    prompts = [request(*range(40 * k, 40 * k + 40), at=k * 1_000_000) for k in (*range(5), *range(5))]
    turns = [one.replace(arrival=at * 1_000_000) for at, one in enumerate(prompts)]
    found = recommend(asked(heard=heard_of(*turns)))
    advice = {one.technique: one for one in found.advice}
    prefix = advice["prefix or radix caching"]
    # The second half of the prompts is found, but for a block of 16 of 2,560 tokens: 49.7%.
    assert prefix.verdict == "yes"
    assert "the trace finds 49.7% of the prompt tokens" in prefix.because
    # Each comes again after five requests, one a second.
    assert "prefixes come again after 5" in advice["CPU offload of the cache"].because


def test_from_the_command_line(tmp_path: Path, kvctl: Callable[..., Any]) -> None:
    path = tmp_path / "trace.jsonl"
    rows = [
        {"timestamp": 1000 * at, "input_length": 1024, "output_length": 50, "hash_ids": [7, 10 + at]}
        for at in range(20)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("recommend", "Qwen3-8B", "--gpu", "H100", "--engine", "vllm")
    done = kvctl(*command, "--trace", str(path), "--json")
    data = json.loads(done.out)
    # 19 of 20 prompts find one run of 512 of their 1,024 tokens.
    assert data["answers"][0]["prompt_share_found"] == pytest.approx(19 * 512 / (20 * 1024))
    assert (data["asked"]["prompt_tokens"], data["asked"]["output_tokens"], data["asked"]["rate"]) == (1024, 50, 1.0)
    assert kvctl(*command, "--workload", "chat", "--json").out == kvctl(*command, "--workload", "chat", "--json").out
    for options, words in (
        (("--trace", str(path), "--workload", "chat"), "two kinds of traffic"),
        (("--workload", "poetry"), "unknown 'poetry'"),
        (("--tokenizer", "x"), "about a replay"),
        (("--workload", "chat", "--input-tokens", "100"), "lengths of its own"),
        (("--shared-prefix", "0"), "--shared-prefix"),
    ):
        refused = kvctl(*command, *options)
        assert refused.code == 2
        assert words in refused.err

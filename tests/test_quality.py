"""Quality of a technique: hand calculations, a slow reference in double precision, and simulated coverage."""

from __future__ import annotations

import json
import math
import random
from typing import Any

import pytest

from kvctl.errors import KvctlError
from kvctl.measure.quality import Scores, interval, pareto, quality, separates
from kvctl.measure.statistics import t_tails


def made(*rows: tuple[int, float, float, float, bool]) -> Scores:
    scores = Scores()
    for row in rows:
        scores.add(*row)
    return scores


def test_a_quality_by_hand() -> None:
    # Ten windows of one token: clusters are tokens. Probabilities 1/4 and 1/4 or 1/8: half the tokens lose log 2.
    scores = made(*((w, -math.log(4), -math.log(8 if w % 2 else 4), 0.1 * w, w != 3) for w in range(10)))
    found = quality(scores)
    assert (found.tokens, found.windows, found.clusters, found.by) == (10, 10, 10, "windows")
    assert found.plain_perplexity == pytest.approx(4)
    assert found.perplexity == pytest.approx(4 * math.sqrt(2))
    change = found.perplexity_change
    assert change.value == pytest.approx(100 * (math.sqrt(2) - 1))
    # Every loss is log(2) / 2 away from its mean: variance 10 / 9 of that squared; slope √2 at the mean.
    assert change.error == pytest.approx(100 * math.sqrt(2) * math.log(2) / 2 * math.sqrt(1 / 9))
    assert change.of_tokens == pytest.approx(change.error)
    assert found.kl.value == pytest.approx(0.45)
    # Squares of 0.45, 0.35, … 0.05 twice: 2 · 0.4125; over 9, over 10.
    assert found.kl.error == pytest.approx(math.sqrt(0.825 / 9 / 10))
    assert found.kl_p99 == pytest.approx(0.891)  # at place 8.91 of 0.0, 0.1, … 0.9
    assert found.top1.value == pytest.approx(0.9)
    assert found.top1.error == pytest.approx(math.sqrt(0.9 * 0.1 / 9))
    assert json.loads(json.dumps(found.to_dict()))["perplexity_change_percent"]["standard_error"] == change.error


def test_tokens_of_a_window_count_as_one() -> None:
    """Copies of one token in each of ten windows know no more than one token each."""
    values = (0.1, 0.3, 0.2, 0.5, 0.1, 0.0, 0.2, 0.4, 0.1, 0.6)
    single = quality(made(*((w, -1, -1 - x, x, x < 0.5) for w, x in enumerate(values))))
    many = quality(made(*((w, -1, -1 - x, x, x < 0.5) for _ in range(7) for w, x in enumerate(values))))
    for one, other in (
        (single.kl, many.kl),
        (single.top1, many.top1),
        (single.perplexity_change, many.perplexity_change),
    ):
        assert other.value == pytest.approx(one.value)
        assert other.error == pytest.approx(one.error)
        assert other.of_tokens is not None
        assert one.error is not None
        assert other.of_tokens < 0.5 * one.error
    assert (single.windows, many.windows, many.tokens) == (10, 10, 70)


def test_few_windows_are_cut_into_blocks() -> None:
    def counted(windows: int, tokens: int) -> tuple[int, str]:
        found = quality(made(*((w, -1.0, -1.0, 0.0, True) for w in range(windows) for _ in range(tokens))))
        return found.clusters, found.by

    assert counted(6, 255) == (24, "blocks")  # four of 63 or 64 in each
    assert counted(1, 640) == (20, "blocks")
    assert counted(1, 100) == (6, "blocks")  # sixteen at least
    assert counted(9, 40) == (18, "blocks")
    assert counted(1, 5) == (1, "blocks")
    assert counted(10, 5) == (10, "windows")


def test_blocks_are_consecutive_tokens_of_a_window_by_hand() -> None:
    # Two windows that come in turns, 32 tokens each: blocks of 16. Sums of what is above or below the mean 0.5:
    # 0, 0 in the first window (0 and 1 in turns), -8 and +8 in the second (sixteen 0, sixteen 1).
    rows = []
    for i in range(32):
        rows += [(7, -1.0, -1.0, float(i % 2), True), (8, -1.0, -1.0, float(i >= 16), True)]
    found = quality(made(*rows))
    assert found.clusters == 4
    assert found.kl.error == pytest.approx(math.sqrt(2 * 64 * 4 / 3) / 64)


def test_one_cluster_has_no_error() -> None:
    found = quality(made((0, -1.0, -2.0, 0.5, False), (0, -1.0, -1.5, 0.5, True)))
    assert found.perplexity_change.error is None
    assert found.perplexity_change.of_tokens is not None
    assert interval(found.kl, found.clusters) is None
    alone = quality(made((0, -1.0, -2.0, 0.5, False)))
    assert alone.kl.of_tokens is None
    with pytest.raises(ValueError, match="no tokens"):
        quality(Scores())


def test_agreement_of_all_is_not_certainty() -> None:
    found = quality(made(*((w, -1.0, -1.0, 0.0, True) for w in range(300))))
    assert found.top1.value == 1
    assert found.top1.error == pytest.approx(3 / 300 / 1.96)  # the rule of three
    assert found.kl.value == found.perplexity_change.value == found.perplexity_change.error == 0


# -- telling two apart -----------------------------------------------------------------------


def test_equal_scores_are_not_apart() -> None:
    scores = made(*((w, -1.0, -1.1, 0.01 * w, True) for w in range(20)))
    found = separates(scores, scores)
    assert (found.kl.value, found.kl.chance, found.log_prob.chance, found.apart) == (0, 1, 1, False)
    assert json.loads(json.dumps(found.to_dict()))["apart"] is False


def test_what_differs_by_the_same_everywhere_is_apart() -> None:
    one, other = (made(*((w, -1.0, -1.0 - x, 0.25 * w + x, True) for w in range(20))) for x in (0, 0.5))
    found = separates(one, other)
    assert found.kl.value == -0.5
    assert found.kl.chance == 0
    assert found.apart


def test_a_difference_by_hand() -> None:
    # Differences 1 and 2 in turns, over ten windows: mean 1.5, error √(0.25 · 10 / 9 / 10) = 1/6; t = 9.
    one = made(*((w, -1.0, -1.0, 3.0 + w + w % 2, True) for w in range(10)))
    other = made(*((w, -1.0, -1.0, 2.0 + w, True) for w in range(10)))
    found = separates(one, other)
    assert found.kl.value == pytest.approx(1.5)
    assert found.kl.error == pytest.approx(1 / 6)
    assert found.kl.chance == pytest.approx(t_tails(9, 9))
    with pytest.raises(ValueError, match="same tokens"):
        separates(one, made((0, -1.0, -1.0, 0.0, True)))


# NIST/SEMATECH e-Handbook 1.3.6.7.2: one tail of 0.1, 0.05, 0.025, 0.01, 0.005, 0.001 for ten degrees of freedom.
@pytest.mark.parametrize(
    ("t", "tail"), [(1.372, 0.1), (1.812, 0.05), (2.228, 0.025), (2.764, 0.01), (3.169, 0.005), (4.144, 0.001)]
)
def test_tails_are_the_published_table(t: float, tail: float) -> None:
    assert t_tails(t, 10) == pytest.approx(2 * tail, rel=2e-3)


def test_tails_of_one_degree_of_freedom_are_the_arc_tangent() -> None:
    assert t_tails(0, 3) == 1
    for t in (0.01, 1, 30):
        assert t_tails(t, 1) == pytest.approx(1 - 2 / math.pi * math.atan(t))


# -- simulated texts ---------------------------------------------------------------------------

LOSS, KL, AGREE = 0.03, 0.02, 0.9


def text(rng: random.Random, windows: int, tokens: int, window_effect: float, harm: float = 1.0) -> Scores:
    """Losses, divergences and agreement whose neighbours are alike (autoregressive), windows too if asked for.

    The true means are LOSS · harm, KL · harm and AGREE.
    """
    scores = Scores()
    for window in range(windows):
        level = window_effect * rng.gauss(0, 1)
        now = rng.gauss(0, 1)
        for _ in range(tokens):
            now = 0.7 * now + math.sqrt(1 - 0.49) * rng.gauss(0, 1)
            hidden = (now + level) / math.hypot(1, window_effect)  # standard normal
            plain = -3 + rng.gauss(0, 1)
            kl = KL * harm * math.exp(0.8 * hidden - 0.32)
            scores.add(window, plain, plain - harm * (LOSS + 0.2 * hidden), kl, hidden < 1.2815516)
    return scores


@pytest.mark.parametrize(
    ("windows", "tokens", "window_effect", "least"),
    [(40, 60, 0.5, 0.92), (12, 100, 0.5, 0.88), (6, 200, 0, 0.91), (1, 800, 0, 0.91)],
)
def test_nominal_95_percent_cover_nearly_95_percent(
    windows: int, tokens: int, window_effect: float, least: float
) -> None:
    """And errors as if tokens were independent cover far less: 0.7 between neighbours makes errors 2.4 times as large."""
    rng = random.Random(11)
    trials, inside, apart_tokens = 1000, [0, 0, 0], 0
    for _ in range(trials):
        found = quality(text(rng, windows, tokens, window_effect))
        for i, (estimate, true) in enumerate(
            ((found.perplexity_change, 100 * math.expm1(LOSS)), (found.kl, KL), (found.top1, AGREE))
        ):
            around = interval(estimate, found.clusters)
            assert around is not None
            inside[i] += around[0] <= true <= around[1]
        assert found.kl.of_tokens is not None
        apart_tokens += abs(found.kl.value - KL) <= 1.96 * found.kl.of_tokens
    # 1,000 trials: the standard error of a share of 95% is 0.7%. Skewed means (kl, and a
    # share near one) of a dozen unlike windows cover less: t supposes the clusters' sums to be normal.
    assert all(least <= share / trials <= 0.985 for share in inside), [share / trials for share in inside]
    assert apart_tokens / trials < 0.75


def test_two_that_do_not_differ_are_told_apart_in_less_than_one_of_twenty() -> None:
    rng = random.Random(5)
    trials, wrong, right = 300, 0, 0
    for _ in range(trials):
        one, other = (text(rng, 12, 60, 0) for _ in range(2))
        wrong += separates(one, other).apart
        right += separates(one, text(rng, 12, 60, 0, harm=3)).apart
    assert wrong / trials <= 0.08
    assert right / trials > 0.9


# -- the frontier -------------------------------------------------------------------------------


def test_pareto_by_hand() -> None:
    rows = [(100, 0.0), (50, 0.1), (60, 0.1), (50, 0.1), (25, 5.0), (25, 4.0), (30, 4.0), (100, 0.0), (120, 0.0)]
    assert pareto(rows) == (True, True, False, True, False, True, False, True, False)
    assert pareto([]) == ()
    assert pareto([(1, math.inf)]) == (True,)
    with pytest.raises(ValueError, match="not a number"):
        pareto([(1, math.nan)])


def test_pareto_is_the_definition() -> None:
    rng = random.Random(2)
    for _ in range(200):
        rows = [(rng.randrange(6), float(rng.randrange(6))) for _ in range(rng.randrange(12))]
        beaten = [any(a <= x and b <= y and (a < x or b < y) for a, b in rows) for x, y in rows]
        assert pareto(rows) == tuple(not lost for lost in beaten)


# -- from logits ----------------------------------------------------------------------------------


def slow(plain: list[float], technique: list[float], true: int) -> tuple[float, float, float, bool]:
    """Log-probabilities, divergence and agreement by their definitions."""
    logs = []
    for row in (plain, technique):
        top = max(row)
        total = math.log(math.fsum(math.exp(x - top) for x in row)) + top
        logs.append([x - total for x in row])
    p, q = logs
    kl = math.fsum(math.exp(a) * (a - b) for a, b in zip(p, q, strict=True) if a > -math.inf)
    return p[true], q[true], kl, p.index(max(p)) == q.index(max(q))


def tally() -> tuple[Any, Any]:
    return pytest.importorskip("torch"), pytest.importorskip("kvctl.measure.tally").Tally("int4")


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16", "float64"])
@pytest.mark.parametrize("noise", [1.0, 1e-4])
def test_scores_are_the_definition(dtype: str, noise: float, monkeypatch: pytest.MonkeyPatch) -> None:
    torch, found = tally()
    monkeypatch.setattr("kvctl.measure.tally._ELEMENTS", 3 * 211)  # three rows at a time
    generator = torch.Generator().manual_seed(1)
    plain = (8 * torch.randn(2, 7, 211, generator=generator)).to(getattr(torch, dtype))
    technique = plain.double() + noise * torch.randn(2, 7, 211, generator=generator)
    technique = technique.to(torch.float32 if noise < 1 else plain.dtype)
    true = torch.randint(0, 211, (2, 7), generator=generator)
    found.add(plain, technique, true, [4, 5])
    scores = found.scores
    assert list(scores.window) == [4] * 7 + [5] * 7
    for place in range(14):
        b, t = divmod(place, 7)
        p, q, kl, agrees = slow(plain[b, t].double().tolist(), technique[b, t].double().tolist(), int(true[b, t]))
        assert scores.plain[place] == pytest.approx(p, rel=1e-12)
        assert scores.technique[place] == pytest.approx(q, rel=1e-12)
        assert scores.kl[place] == pytest.approx(kl, rel=1e-6, abs=1e-15)
        assert bool(scores.agrees[place]) is agrees


@pytest.mark.engine
def test_the_same_logits_differ_in_nothing() -> None:
    torch, found = tally()
    logits = 1e4 * torch.randn(1, 9, 100, generator=torch.Generator().manual_seed(0))
    found.add(logits, logits.clone(), torch.zeros(1, 9, dtype=torch.long), 0)
    assert set(found.scores.kl) == {0.0}
    assert found.quality.perplexity_change.value == 0
    assert found.quality.top1.value == 1
    assert found.quality.perplexity == math.inf  # exp(10,000)


def test_what_no_number_can_be_is_infinite_and_null_in_json() -> None:
    found = quality(made(*((w, -1.0, -1000.0 - w, 999.0, False) for w in range(10))))
    assert (found.perplexity, found.perplexity_change.value) == (math.inf, math.inf)
    said = json.loads(json.dumps(found.to_dict(), allow_nan=False))
    assert said["perplexity"] is said["perplexity_change_percent"]["value"] is None
    assert said["kl_nats"]["value"] == 999


@pytest.mark.engine
def test_padding_does_not_count_and_masked_words_are_no_trouble() -> None:
    torch, found = tally()
    plain, technique = (
        torch.tensor([[[1.0, 2.0, -math.inf], [0.0, 0.0, 0.0], [math.nan] * 3]]) + shift for shift in (0, 1)
    )
    found.add(plain, technique, torch.tensor([[0, 1, -100]]), 3)
    assert len(found.scores) == 2
    assert found.scores.plain[0] == pytest.approx(-math.log(1 + math.e))
    assert list(found.scores.kl) == pytest.approx([0, 0], abs=1e-15)
    found.add(plain[:, :0], technique[:, :0], torch.empty(1, 0, dtype=torch.long), 3)
    assert len(found.scores) == 2


@pytest.mark.engine
@pytest.mark.parametrize(("value", "seen"), [(math.nan, "NaN"), (math.inf, "infinite")])
def test_logits_that_are_no_numbers_are_named(value: float, seen: str) -> None:
    torch, found = tally()
    good = torch.zeros(1, 4, 5)
    bad = good.clone()
    bad[0, 2, 3] = value
    true = torch.zeros(1, 4, dtype=torch.long)
    with pytest.raises(KvctlError, match=f"^int4: the logits of token 2 of window 0 are {seen}"):
        found.add(good, bad, true, 0)
    with pytest.raises(KvctlError, match=f"^the plain cache: the logits of token 2 of window 0 are {seen}"):
        tally()[1].add(bad, good, true, 0)
    bad[0, 2, 3] = -math.inf
    with pytest.raises(KvctlError, match="probability is zero"):
        tally()[1].add(good, bad, true, 0)
    with pytest.raises(ValueError, match="logits"):
        tally()[1].add(good, good[:, :3], true, 0)

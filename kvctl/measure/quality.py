"""What a technique costs in quality: its next-token distributions against the plain cache's, on the same tokens.

Everything is paired per token: the text's own difficulty, which is far larger than what a technique does, cancels.
Tokens of one text are not independent, though: what a cache got wrong bears on many tokens after it. Standard errors
therefore go by clusters. With ten windows or more a cluster is a window, whose tokens may depend on one another in any
way. With fewer there would be too few to tell a spread from, and a cluster is a block of consecutive tokens of one
window, as long as leaves twenty of them, and at least sixteen tokens: errors then hold for texts like these windows.
The error as if all tokens were independent stands beside it (`of_tokens`): it is what many papers print, and too small.
"""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from typing import Any

from kvctl.measure.statistics import quantile, t_quantile, t_tails
from kvctl.record import Record

_ENOUGH_WINDOWS = 10
_BLOCKS = 20
_SHORTEST_BLOCK = 16
_SURE = 0.05


class Scores:
    """What was measured of each token, in the order in which its window has them."""

    def __init__(self) -> None:
        self.window = array("q")
        """Which window (sequence) the token belongs to."""
        self.plain = array("d")
        """Natural logarithm of the probability that the plain cache gave the true token."""
        self.technique = array("d")
        """The same with the technique."""
        self.kl = array("d")
        """Kullback-Leibler divergence in nats of the technique's distribution from the plain one."""
        self.agrees = array("b")
        """1 where both find the same token likeliest."""

    def __len__(self) -> int:
        return len(self.window)

    def add(self, window: int, plain: float, technique: float, kl: float, agrees: bool) -> None:
        """One more token."""
        self.window.append(window)
        self.plain.append(plain)
        self.technique.append(technique)
        self.kl.append(kl)
        self.agrees.append(agrees)


def _finite(value: float | None) -> float | None:
    """JSON has no infinity."""
    return value if value is not None and math.isfinite(value) else None


class Estimate(Record):
    """A mean over tokens and its standard errors; None where there are too few tokens to say."""

    value: float
    error: float | None
    """Over clusters of tokens."""
    of_tokens: float | None
    """As if every token were independent of the others."""

    def scaled(self, value: float, factor: float) -> Estimate:
        """Of a function of the mean: its value, and its slope there."""
        errors = (None if error is None else factor * error for error in (self.error, self.of_tokens))
        return Estimate(value, *errors)

    def to_dict(self) -> dict[str, float | None]:
        return {
            "value": _finite(self.value),
            "standard_error": _finite(self.error),
            "standard_error_of_tokens": _finite(self.of_tokens),
        }


class Quality(Record):
    """A technique against the plain cache."""

    tokens: int
    windows: int
    clusters: int
    by: str
    """What clusters are: "windows" or "blocks" of consecutive tokens."""
    plain_perplexity: float
    perplexity: float
    perplexity_change: Estimate
    """Percent of the plain cache's."""
    kl: Estimate
    """Mean divergence in nats."""
    kl_p99: float
    """What 99 of 100 tokens do not exceed."""
    top1: Estimate
    """Share of tokens for which both find the same token likeliest."""

    def to_dict(self) -> dict[str, Any]:
        return {
            "tokens": self.tokens,
            "windows": self.windows,
            "clusters": self.clusters,
            "clusters_are": self.by,
            "plain_perplexity": _finite(self.plain_perplexity),
            "perplexity": _finite(self.perplexity),
            "perplexity_change_percent": self.perplexity_change.to_dict(),
            "kl_nats": self.kl.to_dict(),
            "kl_p99_nats": self.kl_p99,
            "top1_agreement": self.top1.to_dict(),
        }


class Difference(Record):
    """One technique's mean minus another's, over the same tokens."""

    value: float
    error: float | None
    chance: float | None
    """How likely at least so large a difference is between two that do not differ; None where that cannot be said."""

    def to_dict(self) -> dict[str, float | None]:
        return {"value": self.value, "standard_error": self.error, "p": self.chance}


class Separation(Record):
    """Whether two techniques can be told apart."""

    kl: Difference
    """Divergence from the plain cache, in nats a token."""
    log_prob: Difference
    """Log-probability of the true token, in nats."""
    clusters: int
    by: str

    @property
    def apart(self) -> bool:
        """With 95% confidence: one of two tests may be wrong, so each has half of the five percent (Bonferroni)."""
        chances = [found.chance for found in (self.kl, self.log_prob) if found.chance is not None]
        return bool(chances) and min(chances) < _SURE / 2

    def to_dict(self) -> dict[str, Any]:
        return {
            "apart": self.apart,
            "kl_nats": self.kl.to_dict(),
            "log_prob_nats": self.log_prob.to_dict(),
            "clusters": self.clusters,
            "clusters_are": self.by,
        }


def quality(scores: Scores) -> Quality:
    """What the scores say.

    Raises:
        ValueError: there are none.

    """
    if not len(scores):
        raise ValueError("quality of no tokens")
    clusters, by = _clusters(scores.window)
    lost = [plain - technique for plain, technique in zip(scores.plain, scores.technique, strict=True)]
    loss = _mean(lost, clusters)
    growth = _exp(loss.value)
    return Quality(
        tokens=len(scores),
        windows=len(set(scores.window)),
        clusters=len(clusters),
        by=by,
        plain_perplexity=_exp(-math.fsum(scores.plain) / len(scores)),
        perplexity=_exp(-math.fsum(scores.technique) / len(scores)),
        # The logarithm of the ratio is the mean loss; near it the ratio changes `growth` times as much (delta method).
        perplexity_change=loss.scaled(100 * (math.expm1(loss.value) if loss.value < 1 else growth - 1), 100 * growth),
        kl=_mean(scores.kl, clusters),
        kl_p99=quantile(scores.kl, 0.99),
        top1=_share(scores.agrees, clusters),
    )


def separates(a: Scores, b: Scores) -> Separation:
    """Whether technique `a` can be told from technique `b` on the tokens that both were measured on.

    Raises:
        ValueError: the two were measured on other tokens.

    """
    if a.window != b.window or not len(a):
        raise ValueError("two techniques are compared on the same tokens")
    clusters, by = _clusters(a.window)
    return Separation(
        kl=_difference(a.kl, b.kl, clusters),
        log_prob=_difference(a.technique, b.technique, clusters),
        clusters=len(clusters),
        by=by,
    )


def _exp(x: float) -> float:
    """Infinite where it is beyond what a number can be: of a broken technique."""
    return math.exp(x) if x < 709 else math.inf


def pareto(rows: Sequence[tuple[int, float]]) -> tuple[bool, ...]:
    """Which of (bytes, loss) no other row beats: in one of them smaller, in the other no larger.

    Rows that are equal in both stand or fall together.

    Raises:
        ValueError: a loss is not a number.

    """
    if any(math.isnan(loss) for _, loss in rows):
        raise ValueError("a loss that is not a number")
    kept: set[tuple[int, float]] = set()
    least = math.inf
    for size, loss in sorted(set(rows)):
        if not kept or loss < least:
            kept.add((size, loss))
            least = loss
    return tuple(row in kept for row in rows)


def _clusters(windows: Sequence[int]) -> tuple[list[list[int]], str]:
    """Places of the tokens of each cluster, and what clusters are."""
    places: dict[int, list[int]] = {}
    for place, window in enumerate(windows):
        places.setdefault(window, []).append(place)
    if len(places) >= _ENOUGH_WINDOWS:
        return list(places.values()), "windows"
    wanted = math.ceil(_BLOCKS / len(places))
    return [block for window in places.values() for block in _blocks(window, wanted)], "blocks"


def _blocks(window: list[int], wanted: int) -> Iterable[list[int]]:
    """A window in so many blocks of nearly one length, or in fewer that are long enough."""
    count = max(1, min(wanted, len(window) // _SHORTEST_BLOCK))
    edges = [len(window) * i // count for i in range(count + 1)]
    return (window[start:end] for start, end in itertools.pairwise(edges))


def _mean(values: Sequence[float], clusters: Sequence[Sequence[int]]) -> Estimate:
    """The mean of all; its error from how far clusters' sums are from what their sizes say (a ratio estimator)."""
    count = len(values)
    mean = math.fsum(values) / count
    far = (math.fsum(values[place] for place in cluster) - len(cluster) * mean for cluster in clusters)
    own = (value - mean for value in values)
    return Estimate(mean, _error(far, len(clusters), count), _error(own, count, count))


def _error(far: Iterable[float], groups: int, count: int) -> float | None:
    if groups < 2:
        return None
    return math.sqrt(math.fsum(x * x for x in far) * groups / (groups - 1)) / count


def _share(agrees: Sequence[int], clusters: Sequence[Sequence[int]]) -> Estimate:
    """A share of tokens. Where all agree, or none, the spread says nothing, and the error is what the rule of three
    gives: no event in n trials leaves up to 3 / n of them possible at 95%, which is 1.96 errors.
    """
    found = _mean(agrees, clusters)
    if found.value not in (0, 1):
        return found
    return Estimate(found.value, 3 / 1.96 / len(agrees), 3 / 1.96 / len(agrees))


def _difference(a: Sequence[float], b: Sequence[float], clusters: Sequence[Sequence[int]]) -> Difference:
    found = _mean([one - other for one, other in zip(a, b, strict=True)], clusters)
    if found.error is None:
        return Difference(found.value, None, None)
    if not found.error:
        return Difference(found.value, 0.0, 0.0 if found.value else 1.0)
    return Difference(found.value, found.error, t_tails(abs(found.value) / found.error, len(clusters) - 1))


def interval(estimate: Estimate, clusters: int) -> tuple[float, float] | None:
    """Where the mean lies with 95% confidence."""
    if estimate.error is None or clusters < 2:
        return None
    half = t_quantile(clusters - 1) * estimate.error
    return estimate.value - half, estimate.value + half

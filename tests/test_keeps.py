"""Evictions: which tokens stay, against slow references written from the papers' definitions in plain Python floats.

Layers of the cache are driven with random queries and keys; the first element of every value is the token's place in its text,
so what is held can be read from the cache. References know one sequence, hold lists, and compute every probability.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction
from functools import cache
from itertools import pairwise
from typing import Any

import pytest

from kvctl.errors import UsageError
from kvctl.techniques import parse
from kvctl.techniques.keep import Keep, Place

DIM = 8
Held = list[list[int]]
"""Of each KV head, the places of the tokens held, in order."""
Probabilities = list[list[list[dict[int, float]]]]
"""[KV head][query head of the group][query]: place of a key to probability."""


class Text:
    """Random queries and keys of one sequence, and what a reference needs of them."""

    def __init__(self, tokens: int, query_heads: int, kv_heads: int, seed: int) -> None:
        import torch

        made = torch.Generator().manual_seed(seed)
        self.tokens, self.group = tokens, query_heads // kv_heads
        self.queries = torch.randn(query_heads, tokens, DIM, generator=made) * 2
        self.keys = torch.randn(kv_heads, tokens, DIM, generator=made)
        self.values = torch.randn(kv_heads, tokens, DIM, generator=made)
        self.values[:, :, 0] = torch.arange(tokens)
        self.q, self.k = self.queries.double().tolist(), self.keys.double().tolist()

    def attention(self, held: Held, first: int, new: int) -> Probabilities:
        """Every query of the new tokens over every key held that is not after it."""
        out: Probabilities = []
        for head, places in enumerate(held):
            group = []
            for member in range(self.group):
                rows = []
                for query in range(first, first + new):
                    q = self.q[head * self.group + member][query]
                    dots = {
                        p: math.exp(sum(a * b for a, b in zip(q, self.k[head][p], strict=True)) / math.sqrt(DIM))
                        for p in places
                        if p <= query
                    }
                    total = sum(dots.values())
                    rows.append({p: dot / total for p, dot in dots.items()})
                group.append(rows)
            out.append(group)
        return out


class Rule:
    """A reference: told of every pass; says which of a head's tokens stay."""

    sinks = 0

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        raise NotImplementedError

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        raise NotImplementedError


def top(scores: dict[int, float], count: int) -> set[int]:
    """The `count` places of the highest scores; of equals the newer."""
    return set(sorted(scores, key=lambda place: (scores[place], place), reverse=True)[: max(count, 0)])


def reference(text: Text, chunks: Sequence[int], rule: Rule, target: Callable[[int, int], int]) -> list[Held]:
    """What is held after each pass; `target` is the number to keep of so many seen and generated."""
    held: Held = [[] for _ in text.k]
    first = generated = 0
    out = []
    for new in chunks:
        generated = generated + 1 if new == 1 and first else 0
        for places in held:
            places.extend(range(first, first + new))
        rule.see(text, held, text.attention(held, first, new), first, new)
        first += new
        most = target(first, generated)
        held = [
            sorted(rule.stay(head, places, most)) if len(places) > most else list(places)
            for head, places in enumerate(held)
        ]
        out.append([list(places) for places in held])
    return out


def layer_of(technique: str, place: Place | None = None) -> Any:
    from kvctl.techniques.caches import TechniqueLayer

    made = parse(technique)
    return TechniqueLayer(made.store, made.keep, place or Place(), rotary() if "expected" in technique else None)


@cache
def rotary() -> Any:
    """A model whose rotary embedding is of heads of such a size, with theta 10000."""
    import transformers

    config = transformers.LlamaConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2,
                                      head_dim=DIM, vocab_size=16)  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def driven(
    layer: Any, texts: Sequence[Text], chunks: Sequence[int], dtype: str = "float32", pads: Sequence[int] = ()
) -> list[list[Held]]:
    """Of each sequence, what the layer holds after each pass; the first pass begins with so many of padding."""
    import torch

    from kvctl.techniques import attention

    kind = getattr(torch, dtype)
    pads = pads or [0] * len(texts)

    def rows(part: str) -> Any:
        # What lies in padding is large: it would be chosen if it could be.
        whole = []
        for text, more in zip(texts, pads, strict=True):
            tensor = getattr(text, part)
            whole.append(torch.cat([torch.full((tensor.shape[0], more, DIM), -9.0), tensor], 1))
        return torch.stack(whole).to(kind)

    queries, keys, values = rows("queries"), rows("keys"), rows("values")
    real = torch.stack([torch.arange(queries.shape[2]) >= more for more in pads])
    out: list[list[Held]] = [[] for _ in texts]
    at = 0
    for new in chunks:
        part = slice(at, at + new)
        at += new
        held_keys, held_values = layer.update(keys[:, :, part], values[:, :, part])
        attention.forget()
        given = real[:, None, None, :at].expand(-1, 1, new, -1) if any(pads) else None
        layer.mask(queries[:, :, part], given)
        layer.attended(queries[:, :, part], held_keys, held_values, DIM**-0.5)
        now = layer.value_rows.read()[..., 0].round().long()
        for sequence, one in enumerate(now.tolist()):
            out[sequence].append([[place for place in head if place >= 0] for head in one])
    return out


# -- references ------------------------------------------------------------------------------------------


class SlowH2O(Rule):
    """Every probability that a query gave a token adds to its sum; the newest half and the largest sums stay."""

    def __init__(self, recent: int | None = None, largest: bool = False, sinks: int = 0) -> None:
        self.recent, self.largest, self.sinks = recent, largest, sinks
        self.sums: dict[tuple[int, int], float] = {}

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        for head, group in enumerate(probabilities):
            for query in range(new):
                for place in group[0][query]:
                    each = [member[query][place] for member in group]
                    before = self.sums.get((head, place), 0.0)
                    self.sums[head, place] = before + (max(each) if self.largest else sum(each))

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        recent = max(target // 2, 1) if self.recent is None else self.recent
        always = {place for place in places if place < self.sinks} | set(places[-recent:])
        others = {place: self.sums[head, place] for place in places if place not in always}
        return always | top(others, target - len(always))


class SlowTOVA(Rule):
    """The newest query's probabilities, averaged over the heads of the layer or of the group."""

    def __init__(self, together: bool = True, sinks: int = 0) -> None:
        self.together, self.sinks = together, sinks

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        self.newest = [[member[-1] for member in group] for group in probabilities]

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        members = [member for group in self.newest for member in group] if self.together else self.newest[head]
        always = {place for place in places if place < self.sinks} | {places[-1]}
        means = {p: sum(one[p] for one in members) / len(members) for p in places if p not in always}
        return always | top(means, target - len(always))


class SlowScissorHands(Rule):
    """Every step of every head is remembered; looked back on is the history, and of earlier passes what was counted for the next drop."""

    def __init__(self, buffer: int, drop: int, history: int, recent: int, sinks: int = 0) -> None:
        self.buffer, self.drop, self.history, self.recent, self.sinks = buffer, drop, history, recent, sinks
        self.steps: dict[tuple[int, int], list[dict[int, float]]] = {}
        self.since: dict[int, int] = {}

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        for head, group in enumerate(probabilities):
            for query in range(new):
                # The first token's step is step 1: it has seen one token.
                self.steps[head, first + query + 1] = [member[query] for member in group]
        self.first, self.now = first, first + new

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        start = self.now - self.history
        if self.now - self.first < self.history:
            # Fewer queries than the history: steps before count from when the drop that was to come looked back on them.
            drops = (self.buffer + 1 + index * self.drop for index in range(100))
            start = next(when for when in drops if when > self.first) - self.history
            # A pass that lets tokens go is looked back on with its own queries, but nothing before it.
            start = max(start, self.since.get(head, 0))
        counts = dict.fromkeys(places, 0)
        for step in range(max(start, 0) + 1, self.now + 1):
            for member in self.steps[head, step]:
                for place in places:
                    counts[place] += place in member and member[place] < 1 / step
        self.since[head] = self.first
        always = {place for place in places if place < self.sinks} | set(places[-self.recent :])
        return always | top({p: -counts[p] for p in places if p not in always}, target - len(always))


class SlowKeyNorm(Rule):
    """Short keys stay, and the newest."""

    def __init__(self, sinks: int = 0) -> None:
        self.sinks = sinks

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        self.text = text

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        always = {place for place in places if place < self.sinks} | {places[-1]}
        norms = {p: -math.hypot(*self.text.k[head][p]) for p in places if p not in always}
        return always | top(norms, target - len(always))


class SlowSnapKV(Rule):
    """The last queries' probabilities over what lies before them, averaged or maximized over neighbours, then over the group."""

    def __init__(self, window: int, kernel: int = 5, largest: bool = False, sinks: int = 0) -> None:
        self.window, self.kernel, self.largest, self.sinks = window, kernel, largest, sinks

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        self.probabilities, self.looking = probabilities, min(self.window, new)

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        before, half = places[: len(places) - self.looking], self.kernel // 2
        scores = dict.fromkeys(places, 0.0)
        for member in self.probabilities[head]:
            given = [sum(row[p] for row in member[-self.looking :]) for p in before]
            for index, place in enumerate(before):
                near = given[max(index - half, 0) : index + half + 1]
                scores[place] += max(near) if self.largest else sum(near) / self.kernel
        always = {place for place in places if place < self.sinks} | set(places[-self.window :])
        return always | top({p: scores[p] for p in places if p not in always}, target - len(always))


class SlowExpectedAttention(Rule):
    """Normal queries with mean and covariance of the pass's, turned by the average of the rotations to come (theta 10000)."""

    def __init__(self, future: int, sinks: int = 4) -> None:
        self.future, self.sinks = future, sinks

    @staticmethod
    def turn(row: list[float], position: int) -> list[float]:
        half, out = DIM // 2, [0.0] * DIM
        for i in range(half):
            cos, sin = math.cos(position * 10000 ** (-2 * i / DIM)), math.sin(position * 10000 ** (-2 * i / DIM))
            out[i] = row[i] * cos - row[i + half] * sin
            out[i + half] = row[i + half] * cos + row[i] * sin
        return out

    def to_come(self, row: list[float]) -> list[float]:
        turned = [self.turn(row, position) for position in range(self.now, self.now + self.future)]
        return [sum(column) / self.future for column in zip(*turned, strict=True)]

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        self.text, self.now, self.first = text, first + new, first

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        text, others = self.text, [place for place in places if place >= self.sinks]
        scores = dict.fromkeys(others, 0.0)
        for member in range(text.group):
            rows = [self.turn(text.q[head * text.group + member][p], -p)
                    for p in range(max(self.first, self.sinks), self.now)]  # fmt: skip
            mean = [sum(column) / len(rows) for column in zip(*rows, strict=True)]
            apart = [[a - b for a, b in zip(row, mean, strict=True)] for row in rows]
            mean, apart = self.to_come(mean), [self.to_come(row) for row in apart]
            given = {}
            for p in others:
                dots = [sum(a * b for a, b in zip(row, text.k[head][p], strict=True)) for row in [mean, *apart]]
                variance = sum(dot * dot for dot in dots[1:]) / len(apart)
                given[p] = math.exp(dots[0] / math.sqrt(DIM) + variance / DIM / 2)
            for p in others:
                scores[p] += given[p] / sum(given.values())
        norms = {p: math.hypot(*text.values[head, p].double().tolist()) for p in others}
        always = {place for place in places if place < self.sinks} | {places[-1]}
        return always | top({p: scores[p] * norms[p] for p in others if p not in always}, target - len(always))


class SlowWindow(Rule):
    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        pass

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        return set(places[-target:])


class SlowStreaming(Rule):
    """The first tokens of the text and the newest."""

    def __init__(self, sinks: int = 4) -> None:
        self.sinks = sinks

    def see(self, text: Text, held: Held, probabilities: Probabilities, first: int, new: int) -> None:
        pass

    def stay(self, head: int, places: list[int], target: int) -> set[int]:
        return set(places[: self.sinks]) | set(places[len(places) - target + self.sinks :])


def tokens(budget: int) -> Callable[[int, int], int]:
    return lambda seen, _: min(seen, budget)


def share(numerator: int, denominator: int, least: int = 1) -> Callable[[int, int], int]:
    return lambda seen, _: min(seen, max(-(-seen * numerator // denominator), least))


def after_prompt(prompt: Callable[[int, int], int]) -> Callable[[int, int], int]:
    return lambda seen, generated: prompt(seen - generated, 0) + generated


def buffer(size: int, drop: int) -> Callable[[int, int], int]:
    """Filled one by one; a token too many, and `drop` of them go."""

    def held(seen: int, _: int) -> int:
        count = 0
        for _token in range(seen):
            count += 1
            if count > size:
                count -= drop
        return count

    return held


CASES: dict[str, tuple[Callable[[], Rule], Callable[[int, int], int]]] = {
    "h2o:12": (SlowH2O, tokens(12)),
    "h2o:0.25": (SlowH2O, share(1, 4)),
    "h2o:13:recent=3:sinks=2": (lambda: SlowH2O(3, sinks=2), tokens(13)),
    "h2o:12:group=max": (lambda: SlowH2O(largest=True), tokens(12)),
    "scissorhands:12:recent=2": (lambda: SlowScissorHands(12, 6, 6, 2), buffer(12, 6)),
    "scissorhands:12:drop=8:history=3:recent=1:sinks=2": (lambda: SlowScissorHands(12, 8, 3, 1, 2), buffer(12, 8)),
    "scissorhands:12:drop=1": (lambda: SlowScissorHands(12, 1, 1, 3), buffer(12, 1)),
    "tova:9": (SlowTOVA, tokens(9)),
    "tova:0.3:sinks=2": (lambda: SlowTOVA(sinks=2), share(3, 10, least=3)),
    "tova:9:heads=group": (lambda: SlowTOVA(together=False), tokens(9)),
    "snapkv:12:window=4": (lambda: SlowSnapKV(4), after_prompt(tokens(12))),
    "snapkv:0.5:window=3:sinks=2": (lambda: SlowSnapKV(3, sinks=2), after_prompt(share(1, 2, least=5))),
    "snapkv:12:window=8:kernel=3:pool=max": (lambda: SlowSnapKV(8, 3, True), after_prompt(tokens(12))),
    "snapkv:32": (lambda: SlowSnapKV(32), after_prompt(tokens(32))),
    "expected-attention:12:future=16": (lambda: SlowExpectedAttention(16), after_prompt(tokens(12))),
    "expected-attention:0.5:future=3:sinks=1": (
        lambda: SlowExpectedAttention(3, 1),
        after_prompt(share(1, 2, least=2)),
    ),
    "knorm:9": (SlowKeyNorm, tokens(9)),
    "knorm:0.5:sinks=3": (lambda: SlowKeyNorm(3), share(1, 2, least=4)),
    "streaming-llm:9:positions=text": (SlowStreaming, tokens(9)),
    "streaming-llm:0.5:sinks=2:positions=text": (lambda: SlowStreaming(2), share(1, 2, least=3)),
    "window:9": (SlowWindow, tokens(9)),
    "window:0.5": (SlowWindow, share(1, 2)),
}
RAGGED = ["h2o:12", "scissorhands:16:recent=2", "h2o:13:recent=3:sinks=2", "tova:9", "tova:9:heads=group:sinks=2", "snapkv:12:window=4:sinks=2",
          "snapkv:12:window=8:pool=max", "knorm:9:sinks=2", "window:9", "streaming-llm:12:positions=text", "streaming-llm:12:sinks=1:positions=text",
          "expected-attention:12:future=16"]  # fmt: skip
"""Of a share a padded sequence keeps as many as the others: it has room for more than alone."""
STATE = {"h2o:12": "sums", "scissorhands:12:recent=2": "counts", "random:12": "drawn"}
CHUNKS = {
    "whole": (40,),
    "pieces": (15, 10, 15),
    "steps": (24, *[1] * 16),
    "singles": (1,) * 30,
    "one": (1,),
    "few": (7,),
}


@pytest.mark.engine
@pytest.mark.parametrize("heads", [(4, 2), (3, 3), (4, 1)], ids=["gqa", "mha", "mqa"])
@pytest.mark.parametrize("chunks", CHUNKS.values(), ids=CHUNKS)
@pytest.mark.parametrize("technique", CASES)
def test_kept_tokens_against_the_definition(technique: str, chunks: tuple[int, ...], heads: tuple[int, int]) -> None:
    pytest.importorskip("transformers", reason="needs torch and transformers")
    make, target = CASES[technique]
    texts = [Text(sum(chunks), *heads, seed) for seed in (1, 2)]
    ours = driven(layer_of(technique), texts, chunks)
    for text, one in zip(texts, ours, strict=True):
        assert one == reference(text, chunks, make(), target)


@pytest.mark.engine
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("technique", CASES)
def test_kept_tokens_in_half_precision(technique: str, dtype: str) -> None:
    """Queries and keys that are exact in either format: what differs from float32 is nothing."""
    pytest.importorskip("transformers", reason="needs torch and transformers")
    chunks = (24, *[1] * 8)
    text = Text(32, 4, 2, 3)
    for name in ("queries", "keys", "values"):
        rounded = (getattr(text, name) * 8).round() / 8
        setattr(text, name, rounded)
    text.q, text.k = text.queries.double().tolist(), text.keys.double().tolist()
    make, target = CASES[technique]
    assert driven(layer_of(technique), [text], chunks, dtype)[0] == reference(text, chunks, make(), target)


@pytest.mark.engine
@pytest.mark.parametrize("chunks", [(40,), (24, *[1] * 16)], ids=["whole", "steps"])
@pytest.mark.parametrize("technique", RAGGED)
def test_padding_on_the_left_changes_nothing(technique: str, chunks: tuple[int, ...]) -> None:
    pytest.importorskip("transformers", reason="needs torch and transformers")
    short, long = Text(sum(chunks) - 8, 4, 2, 5), Text(sum(chunks), 4, 2, 6)
    together = driven(layer_of(technique), [short, long], chunks, pads=[8, 0])
    assert together[0] == driven(layer_of(technique), [short], (chunks[0] - 8, *chunks[1:]))[0]
    assert together[1] == driven(layer_of(technique), [long], chunks)[0]


@pytest.mark.engine
@pytest.mark.parametrize("technique", RAGGED)
def test_more_padding_than_the_budget(technique: str) -> None:
    """No padding is held where a token could be."""
    pytest.importorskip("transformers", reason="needs torch and transformers")
    short, long = Text(14, 4, 2, 5), Text(40, 4, 2, 6)
    ours = driven(layer_of(technique), [short, long], (40,), pads=[26, 0])
    assert ours[0] == driven(layer_of(technique), [short], (14,))[0]


@pytest.mark.engine
@pytest.mark.parametrize(
    "keep",
    ["h2o:16:sinks=2", "tova:16:sinks=2", "snapkv:16:window=4:sinks=2", "streaming-llm:16:sinks=2:positions=text"],
)
@pytest.mark.parametrize("pads", [1, 8, 30])
def test_padding_where_first_tokens_are_not_packed(keep: str, pads: int) -> None:
    """The places of unpacked tokens stay, with padding in them; the text's own first tokens and its newest stay too."""
    pytest.importorskip("transformers", reason="needs torch and transformers")
    short, long = Text(40 - pads, 4, 2, 5), Text(40, 4, 2, 6)
    layer = layer_of(f"int8:group=8:residual=3:sinks=2+{keep}")
    held = driven(layer, [short, long], (32, *[1] * 8), pads=[pads, 0])
    # One and two of the 16 places hold padding; of ten tokens there is room for all.
    room = min(16 - min(pads, 2), 40 - pads) if not keep.startswith("snapkv") else 24 - min(pads, 2)
    for head in held[0][-1]:
        assert len(head) == min(room, 40 - pads)
        assert {0, 1, 37 - pads, 38 - pads, 39 - pads} <= set(head)
    assert layer.key_rows.first.shape[2] == layer.value_rows.first.shape[2] == 2
    # The other sequence is as it is alone.
    alone = driven(layer_of(f"int8:group=8:residual=3:sinks=2+{keep}"), [long], (32, *[1] * 8))
    assert held[1] == alone[0]


@pytest.mark.engine
@pytest.mark.parametrize("technique", STATE)
def test_scores_move_with_their_sequences_and_end_with_them(technique: str) -> None:
    torch = pytest.importorskip("torch", reason="needs torch and transformers")
    pytest.importorskip("transformers")
    texts = [Text(40, 4, 2, seed) for seed in (7, 8)]
    layer = layer_of(technique)
    first = driven(layer, texts, (30,))
    before = getattr(layer.policy, STATE[technique])
    layer.reorder_cache(torch.tensor([1, 0]))
    assert torch.equal(getattr(layer.policy, STATE[technique]), before.flip(0))
    assert layer.value_rows.read()[0, ..., 0].long().tolist() == first[1][-1]
    layer.reorder_cache(torch.tensor([1, 1]))
    assert layer.value_rows.read()[1, ..., 0].long().tolist() == first[0][-1]
    layer.reset()
    assert getattr(layer.policy, STATE[technique]) is None
    assert driven(layer, texts, (24, *[1] * 16)) == driven(layer_of(technique), texts, (24, *[1] * 16))


@pytest.mark.parametrize(("technique", "layers", "each"), [
    # Mean 56 beside the window of 8: 1.95 · 56 = 109.2, 56 and 0.05 · 56 = 2.8.
    ("pyramidkv:64:window=8", 3, [117, 64, 11]),
    # beta=2: 1.5, 1.25, 1, 0.75 and 0.5 times 16.
    ("pyramidkv:20:window=4:beta=2", 5, [28, 24, 20, 16, 12]),
    ("pyramidkv:20:window=4:beta=1", 4, [20, 20, 20, 20]),
    ("pyramidkv:20:window=4", 1, [20]),
    # A quarter of 1000 is 250; 1.95 · 242 = 471.9, 242, 0.05 · 242 = 12.1, rounded up.
    ("pyramidkv:0.25:window=8", 3, [480, 250, 21]),
    # No layer keeps more than all: not 1.95 but 1 / 0.8 = 1.25, 1 and 0.75 times 792.
    ("pyramidkv:0.8:window=8", 3, [998, 800, 602]),
    ("pyramidkv:1.0", 3, [1000, 1000, 1000]),
])  # fmt: skip
def test_pyramid_by_hand(technique: str, layers: int, each: list[int]) -> None:
    assert [kept(technique, 1000, 0, Place(layer, layers)) for layer in range(layers)] == each
    # Generated tokens all stay.
    assert [kept(technique, 1017, 17, Place(layer, layers)) for layer in range(layers)] == [
        count + 17 for count in each
    ]


@pytest.mark.parametrize("layers", [1, 2, 7, 30, 64])
def test_pyramids_sum_to_the_budget(layers: int) -> None:
    places = [Place(layer, layers) for layer in range(layers)]
    for budget in (32, 33, 100, 129, 1024):
        assert sum(kept(f"pyramidkv:{budget}", 10**6, 0, place) for place in places) == layers * budget
    for budget in ("0.1", "0.25", "0.5", "0.75", "0.9"):
        for seen in (400, 999, 12345):
            # A share of what was seen in every layer, and less than one token more for each.
            exact = Fraction(budget) * seen * layers
            assert 0 <= sum(kept(f"pyramidkv:{budget}", seen, 0, place) for place in places) - exact < layers


@pytest.mark.parametrize("budget", ["0.1", "0.33", "0.5", "0.75", "0.99", "50"])
def test_a_longer_prompt_needs_no_token_that_is_gone(budget: str) -> None:
    """Else a prompt in pieces would hold fewer than one in a piece."""
    for place in (Place(layer, 5) for layer in range(5)):
        counts = [kept(f"pyramidkv:{budget}", seen, 0, place) for seen in range(1, 400)]
        assert all(0 <= after - before <= 1 for before, after in pairwise(counts))
        assert all(min(seen, 32) <= count <= seen for seen, count in enumerate(counts, 1))


@pytest.mark.engine
@pytest.mark.parametrize("chunks", [(40,), (15, 25), (24, *[1] * 6)], ids=["whole", "pieces", "steps"])
def test_a_pyramid_keeps_what_snapkv_keeps_of_such_a_budget(chunks: tuple[int, ...]) -> None:
    pytest.importorskip("transformers", reason="needs torch and transformers")
    text = Text(sum(chunks), 4, 2, 1)
    # Mean 8 beside a window of 4: 1.5, 1 and 0.5 times 8 are 12, 8 and 4.
    for layer, budget in enumerate((16, 12, 8)):
        ours = driven(layer_of("pyramidkv:12:window=4:beta=2", Place(layer, 3)), [text], chunks)[0]
        assert ours == reference(text, chunks, SlowSnapKV(4), after_prompt(tokens(budget)))


@pytest.mark.engine
def test_lots_are_an_even_sample() -> None:
    """Which of 200 tokens are among 50 does not depend on how they arrived; old ones are as many as new ones."""
    pytest.importorskip("transformers", reason="needs torch and transformers")
    texts = [Text(200, 2, 2, seed) for seed in (1, 2)]
    found = [driven(layer_of("random:50"), texts, chunks) for chunks in ((200,), (70, 130), (120, *[1] * 80))]
    last = [[sequence[-1] for sequence in one] for one in found]
    # The newest stays whatever it drew, in each pass: one token may be another.
    for one in last[1:]:
        for a, b in zip(last[0][0], one[0], strict=True):
            assert len(set(a) ^ set(b)) <= 2
    assert last[0][0] == last[0][1]
    assert last[0][0][0] != last[0][0][1]
    other = driven(layer_of("random:50", Place(1, 2)), texts, (200,))[0][-1]
    assert other[0] != last[0][0][0]
    old = [sum(place < 100 for place in head) for head in [*last[0][0], *other]]
    # 100 of 200 are old: of 50 drawn 25 are expected, with a deviation of √(50 · ½ · ½ · 150/199) = 3.1.
    assert all(25 - 4 * 3.1 < count < 25 + 4 * 3.1 for count in old)
    assert driven(layer_of("random:50:seed=1"), texts, (200,))[0][-1] != last[0][0]


@pytest.mark.parametrize(("text", "part"), [
    ("h2o:4:recent=5", "is less than 0 first and 5 newest"), ("h2o:0.25:group=mean", "is not known"),
    ("tova:1:sinks=1", "is less than 1 first and 1 newest"), ("window:9:sinks=1", "'sinks' is not known here"),
    ("snapkv:31", "has no room for the last 32 tokens"), ("snapkv:0.5:kernel=4", "has no middle"),
    ("scissorhands:0.25", "not of a share"), ("scissorhands:16:history=9", "more than the 8 tokens dropped at once"),
    ("scissorhands:16:recent=10", "leaves 9, less than 0 first and 10 newest"), ("int8:residual=12+scissorhands:16", "and 12 newest"),
    ("h2o:1.01", "is no share"), ("h2o:0.25:512", "'512' is not known here"),
])  # fmt: skip
def test_what_is_no_eviction(text: str, part: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse(text)
    assert part in caught.value.message


def kept(technique: str, seen: int, generated: int = 0, place: Place | None = None) -> int:
    keep = parse(technique).keep
    assert isinstance(keep, Keep)
    return keep.kept(seen, generated, place or Place())

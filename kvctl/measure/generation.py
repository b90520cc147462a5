"""What a model generates through a cache: how long it stays with the plain cache, and whether it finds a hidden key."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.measure.assessed import AssessAsked, Greedy, Recall
from kvctl.measure.passkey import ANSWER_TOKENS, Needle, answers, divergence, needle
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.passes import Passes

_LAST = 16
"""Tokens at a prompt's end that are fed in steps: what a pass over the whole prompt says of its end, an eviction that
decides after the pass has not touched yet."""


class Reading(Record):
    """A text, and how the model's tokenizer reads."""

    name: str
    ids: tuple[int, ...]
    encode: Callable[[str], Sequence[int]]
    """Without special tokens."""
    decode: Callable[[Sequence[int]], str]
    begin: tuple[int, ...] = ()
    """Tokens that every text of this model begins with."""


def continued(passes: Passes, ids: Any, step: int, count: int, told: Callable[[int], None]) -> list[list[int]]:
    """The likeliest `count` tokens after each prompt [prompts, length]; its end is fed `step` tokens at a time."""
    import torch

    passes.begin(ids.shape[0])
    length = ids.shape[1]
    early = max(length - _LAST, 1)
    logits = passes.prefill(ids[:, :early])
    for start in range(early, length, step):
        logits = passes.feed(ids[:, start : start + step])
    out = []
    for number in range(count):
        told(number)
        token = logits.argmax(-1, keepdim=True)
        out.append(token)
        if number + 1 < count:
            logits = passes.feed(token)
    passes.drop()
    found: list[list[int]] = torch.cat(out, dim=1).tolist()
    return found


def greedy(plain: Sequence[Sequence[int]], other: Sequence[Sequence[int]]) -> Greedy:
    """Continuations of the same texts, by both."""
    same = [divergence(one, two) for one, two in zip(plain, other, strict=True)]
    return Greedy(sum(same) / len(same), len(plain[0]), len(same))


class Needles:
    """Prompts with a key in each, for every depth as many."""

    def __init__(self, text: Reading, asked: AssessAsked) -> None:
        self._text, self._asked = text, asked
        self.needles: tuple[Needle, ...] = ()
        """Empty where a prompt has no room for a key and its question."""
        try:
            self.needles = tuple(
                needle(text.encode, asked.prompt, depth, seed, begin=text.begin)
                for depth in asked.depths
                for seed in range(asked.keys)
            )
        except UsageError:
            self.needles = ()

    def found(self, passes: Passes, step: int, told: Callable[[int], None]) -> Recall:
        """Which keys the model finds through the cache that `passes` has."""
        import torch

        ids = torch.tensor([needle.ids for needle in self.needles], dtype=torch.long, device=passes.device)
        said = continued(passes, ids, step, ANSWER_TOKENS, told)
        right = [
            answers(self._text.decode(tokens), needle.key) for tokens, needle in zip(said, self.needles, strict=True)
        ]
        keys = self._asked.keys
        by_depth = tuple(sum(right[start : start + keys]) for start in range(0, len(right), keys))
        return Recall(self._asked.depths, by_depth, keys)

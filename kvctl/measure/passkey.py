"""A key hidden in a long text and asked for at its end, and how long two continuations stay the same.

The passkey task of Mohtashami and Jaggi 2023 (arXiv 2305.16300), as a text to be continued: a base model answers it
as an instruct model does, and no chat template is needed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence

from kvctl import texts
from kvctl.errors import UsageError
from kvctl.record import Record

_SAID = "\n\nThe pass key is the number {key}. Remember it. The pass key is the number {key}.\n\n"
_ASKED = "\n\nWhat is the pass key? The pass key is the number"
ANSWER_TOKENS = 12
"""Enough for five digits in any vocabulary, with a space and a few bytes to spare."""


class Needle(Record):
    """A prompt with a key in it."""

    ids: tuple[int, ...]
    key: str
    depth: float
    at: int
    """Where among the ids the sentence with the key begins."""


def needle(
    encode: Callable[[str], Sequence[int]],
    length: int,
    depth: float,
    seed: int = 0,
    *,
    begin: Sequence[int] = (),
    filler: str | None = None,
) -> Needle:
    """A prompt of exactly `length` tokens: filler with a key at `depth` (0: its beginning, 1: its end), and the question.

    `encode` adds no special tokens; `begin` are those that a text of this model begins with. The filler is prose that
    starts somewhere else for every seed; a shorter one is repeated.

    Raises:
        UsageError: the length has no room for the key and the question, or the depth is not between 0 and 1.

    """
    if not 0 <= depth <= 1:
        raise UsageError(f"a depth of {depth:g} is not between 0 and 1")
    chance = random.Random(seed)
    key = str(chance.randrange(10_000, 100_000))
    said, asked = encode(_SAID.format(key=key)), encode(_ASKED)
    room = length - len(begin) - len(said) - len(asked)
    if room < 0:
        raise UsageError(f"{length} tokens have no room for a key and its question, which take {length - room}")
    prose = _filler(encode, texts.read("english") if filler is None else filler, room, chance)
    before = round(depth * room)
    ids = (*begin, *prose[:before], *said, *prose[before:], *asked)
    return Needle(ids, key, depth, len(begin) + before)


def _filler(encode: Callable[[str], Sequence[int]], text: str, room: int, chance: random.Random) -> list[int]:
    """So many tokens of prose, from a paragraph's beginning."""
    paragraphs = text.strip().split("\n\n")
    if not text.strip():
        raise UsageError("the filler is empty")
    first = chance.randrange(len(paragraphs))
    prose: list[int] = []
    # A token takes at least a byte or two of text: pieces of it are encoded until there are enough.
    while len(prose) < room:
        piece: list[str] = []
        size = 0
        while size < 8 * (room - len(prose)) and len(piece) < len(paragraphs):
            piece.append(paragraphs[(first + len(piece)) % len(paragraphs)])
            size += len(piece[-1])
        first += len(piece)
        found = encode("\n\n".join([*piece, ""]))
        if not found:
            raise UsageError("the filler has no tokens")
        prose.extend(found)
    return prose[:room]


def answers(text: str, key: str) -> bool:
    """Whether a continuation gives the key: its first number, which may come digit by digit, is the key."""
    found = re.search(r"\d(?:[ ,]?\d)*", text)
    return found is not None and re.sub(r"\D", "", found[0]) == key


def divergence(plain: Sequence[int], other: Sequence[int]) -> int:
    """How many tokens of two continuations are the same before the first that differs."""
    shorter = min(len(plain), len(other))
    return next((i for i in range(shorter) if plain[i] != other[i]), shorter)

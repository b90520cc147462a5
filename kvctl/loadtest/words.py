"""Prompts of exactly so many tokens, for servers whose tokenizer is not here.

Prompts are made of words of which each, with the space before it, is one token, whatever stands around it: byte-pair
tokenizers cut at spaces first. Which words are such is found out from the server: it counts a text of all of them, and where
that is not one token for each, halves of it, until the odd ones are out. What a template or a first token adds is then
a constant, which two lengths have to agree on. Each prompt is drawn by lot from its second word on, so that no two share a
beginning by accident.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Sequence

from kvctl.errors import KvctlError
from kvctl.record import Record

Count = Callable[[str], int]
"""Tokens of a text, with all that the server puts around it."""
_CANDIDATES = 256
_FEWEST = 48
"""Words, of which 16 in a row are drawn twice less often than once in 10^26 pairs."""


class Vocabulary(Record):
    """Words of one token each."""

    first: str
    """The word that every prompt begins with: behind no space it may be any number of tokens, but always the same."""
    words: tuple[str, ...]
    around: int
    """Tokens that stand around any prompt, that word among them."""
    exact: bool
    """Whether lengths that were tried came out as asked."""

    def prompt(self, tokens: int, lot: random.Random, beginning: str = "") -> str:
        """So many tokens, as the server counts them; `beginning` is another prompt, which comes first.

        Raises:
            KvctlError: what stands around it has as many already.

        """
        room = tokens - self.around - max(len(beginning.split()) - 1, 0)
        if room < 1:
            raise KvctlError(f"a prompt of {tokens:,} tokens has no room for a word: {self.around} stand around any",
                             hint=f"at least {self.around + 1}")  # fmt: skip
        drawn = " ".join(lot.choices(self.words, k=room))
        return f"{beginning or self.first} {drawn}"


def candidates(text: str) -> list[str]:
    """The commonest plain words of a text, in lower case."""
    found = Counter(re.findall(r"(?<![\w'])[a-z]{3,9}(?![\w'])", text))
    return [word for word, _ in found.most_common(_CANDIDATES)]


def learn(count: Count, words: Sequence[str]) -> Vocabulary:
    """Which of these words are one token each, by a server's own count.

    Raises:
        KvctlError: too few are.

    """
    first = words[0]
    base = count(first)
    kept = _single(count, first, base, list(words[1:]))
    if len(kept) < _FEWEST:
        raise KvctlError(f"only {len(kept)} of {len(words)} words are one token for this server",
                         hint="give real prompts: --prompts FILE")  # fmt: skip
    lot = random.Random(0)
    lengths = (3, 40, 200)
    exact = all(count(" ".join([first, *lot.choices(kept, k=length)])) == length + base for length in lengths)
    return Vocabulary(first, tuple(kept), base, exact)


def _single(count: Count, first: str, base: int, words: list[str]) -> list[str]:
    """Those of one token, behind a word whose count alone is `base`."""
    if not words:
        return []
    if count(" ".join([first, *words])) - base == len(words):
        return words
    if len(words) == 1:
        return []
    half = len(words) // 2
    return _single(count, first, base, words[:half]) + _single(count, first, base, words[half:])

"""Prompts of exactly so many tokens, by real tokenizers as the server's."""

from __future__ import annotations

import random
import re

import pytest

from kvctl import texts
from kvctl.errors import KvctlError
from kvctl.loadtest.words import Vocabulary, candidates, learn

TEXT = texts.read(texts.samples()[0])


def _pieces(text: str) -> int:
    """A tokenizer of a kind: a word of more than five letters is two tokens, one with a q three; a template of 11 around all."""
    return 11 + sum(3 if "q" in word else 2 if len(word) > 5 else 1 for word in re.findall(r"\S+", text))


def test_words_of_one_token_are_found_by_counting() -> None:
    calls = []

    def count(text: str) -> int:
        calls.append(text)
        return _pieces(text)

    found = learn(count, candidates(TEXT))
    assert found.exact
    assert found.around == _pieces(found.first)
    assert all(len(word) <= 5 and "q" not in word for word in found.words)
    assert len(calls) < 400
    lot = random.Random(1)
    for tokens in (found.around + 1, 100, 4096):
        assert _pieces(found.prompt(tokens, lot)) == tokens
    beginning = found.prompt(61, lot)
    assert _pieces(found.prompt(161, lot, beginning)) == 161
    assert found.prompt(161, lot, beginning).startswith(beginning + " ")
    with pytest.raises(KvctlError, match="no room for a word"):
        found.prompt(found.around, lot)


def test_no_two_prompts_begin_alike() -> None:
    found = learn(_pieces, candidates(TEXT))
    lot = random.Random(2)
    beginnings = {" ".join(found.prompt(100, lot).split()[1:17]) for _ in range(5000)}
    assert len(beginnings) == 5000


def test_a_server_that_counts_letters() -> None:
    with pytest.raises(KvctlError, match="words are one token"):
        learn(len, candidates(TEXT))


def test_one_that_joins_words_is_not_exact() -> None:
    """A count that is not a sum over words: one fewer for every hundred."""
    found = learn(lambda text: 5 + len(text.split()) - (len(text.split()) - 1) // 150, candidates(TEXT)[:100])
    assert isinstance(found, Vocabulary)
    assert not found.exact

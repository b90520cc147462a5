"""Requests with a common prefix, on a terminal: policies side by side, then what else was measured."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich.text import Text

from kvctl.screen_lines import Row, Screen
from kvctl.units import format_bytes, format_seconds, plural
from kvctl.words import one_line, share_words

if TYPE_CHECKING:
    from kvctl.measure.shared import Alike, Sharing

_TITLES = {
    "contiguous": "one piece, longest", "contiguous-pow2": "one piece, power of 2", "paged": "paged",
    "prefix": "paged, prefixes shared", "fork": "branches",
}  # fmt: skip


def print_sharing(screen: Screen, found: Sharing) -> None:
    """Memory and what of it is used, what was found, and what that saves."""
    head, *cells = _cells(found)
    heads = [head]
    if screen.width_of([head, *cells]) > screen.console.width:
        # Titles on two lines, under each other.
        upper, lower = zip(*(title.rpartition(", ")[::2] for title in head), strict=True)
        heads = [[part + "," * bool(part) for part in upper], list(lower)]
    wrong = any(one.agrees is False for one in found.held)
    rows: list[Row] = [(one, None, "dim") for one in heads]
    rows += [(one, None, "red" if wrong and one[0] == "predicted" else "") for one in cells]
    screen.table("l" + "r" * len(found.held), rows)
    screen.line()
    facts = _facts(found)
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        screen.line(Text.assemble((name.ljust(width), "dim"), "  ", one_line(text)), indent=width + 2)
    for text in _notes(found):
        screen.line(one_line(text), "dim")


def markdown_sharing(found: Sharing) -> tuple[list[list[str]], list[str]]:
    """The same as a table, its head first, and lines to stand under it."""
    return _cells(found), [*(f"{name}: {text}" for name, text in _facts(found)), *_notes(found)]


def _cells(found: Sharing) -> list[list[str]]:
    """A row for each fact about memory, a column for each policy; the titles first."""
    held = found.held
    hits = share_words(sum(found.hits), found.queried)
    return [
        ["", *(_TITLES[one.policy] for one in held)],
        ["memory", *(format_bytes(one.bytes) for one in held)],
        ["bytes", *(f"{one.bytes:,}" for one in held)],
        ["predicted", *("calculated" if one.predicted_bytes is None else "same" if one.agrees else f"{one.predicted_bytes:,}"
                        for one in held)],
        ["blocks", *("–" if one.blocks is None else f"{one.blocks:,}" for one in held)],
        ["holds tokens", *(share_words(one.stored, one.slots) for one in held)],
        ["never filled", *(share_words(one.unused, one.slots) for one in held)],
        ["prompts found", *(hits if one.policy == "prefix" else "0%" for one in held)],
    ]  # fmt: skip


def _facts(found: Sharing) -> list[tuple[str, str]]:
    hits = sum(found.hits)
    out = [("found", _found(found))]
    first, work = found.first_token, found.work
    if first is not None:
        between = "" if first.ratio.low is None else f" ({first.ratio.low:.2f} to {first.ratio.high:.2f})"
        unsure = " (?: too few pairs to tell from noise, --repeat 3)" if first.ratio.low is None else ""
        one, other = ("with the prefix in the cache", "without") if hits else ("looking for prefixes", "not looking")
        out.append(("TTFT", f"{format_seconds(first.cached.median)} {one}, {format_seconds(first.cold.median)} {other}: "
                    f"{first.ratio.value:.2f}×{between}{unsure}"))  # fmt: skip
    if work is not None:
        saved = share_words(round(work.saved * 10**6), 10**6)
        words = f"{_flops(work.cached_flops)} with it, {_flops(work.cold_flops)} without: {saved} saved"
        out.append(("prefill work", words if hits else f"{_flops(work.cold_flops)}, nothing saved"))
    out += [(_TITLES[one.policy], _alike(one)) for one in found.alike]
    forked = found.forked
    if forked is not None:
        copied = f"{plural(forked.copied, 'block')} copied" + ("" if forked.copied == forked.expected_copied else
                                                                 f" (NOT {forked.expected_copied:,}, as expected)")  # fmt: skip
        out.append((f"{forked.branches} branches", f"of {plural(forked.tokens, 'token')}, {forked.decode + 1:,} more each: {copied}, "
                    f"{forked.blocks:,} held instead of {forked.separate_blocks:,}; {_alike(forked.alike)}"))  # fmt: skip
    return out


def _found(found: Sharing) -> str:
    """Prompt tokens from the cache, beside those that prompts have in common."""
    hits, expected, asked = sum(found.hits), sum(found.expected_hits), found.asked
    if not hits and not expected:
        return f"nothing: prompts share no whole block of {plural(asked.block, 'token')} before their last token"
    return f"{hits:,} of {found.queried:,} prompt tokens, " + (
        "as many as prompts have in common in whole blocks" if found.hits == found.expected_hits
        else f"NOT the {expected:,} that prompts have in common in whole blocks")  # fmt: skip


def _alike(one: Alike) -> str:
    """ "as the plain cache in all of 520 distributions"."""
    if not one.difference:
        return f"the plain cache's logits, bit for bit, in all {one.compared:,} places"
    likeliest = "everywhere" if one.same == one.compared else f"in {one.same:,} of {one.compared:,}"
    return f"logits differ from the plain cache's by {one.difference:.2g} at most, of {one.largest:.3g}; the same likeliest token {likeliest}"


def _notes(found: Sharing) -> list[str]:
    asked, lengths = found.asked, found.asked.lengths
    span = f"{min(lengths):,} to {max(lengths):,}" if min(lengths) < max(lengths) else f"{max(lengths):,}"
    tokens = "token" if lengths == (1,) * asked.requests else "tokens"
    return [
        f"{asked.requests:,} requests of {span} {tokens}, the first {asked.common:,} of all the same, and {asked.decode:,} more each; all held at once at "
        f"the end; blocks of {asked.block:,}; prompts found: tokens of theirs that were in the cache",
        "one piece: what is reserved for every request ahead, at the model's longest or at the next power of 2",
    ]  # fmt: skip


def _flops(value: int) -> str:
    return f"{value / 1e12:.3g} TFLOP" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP"

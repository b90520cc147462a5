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
    held = found.held
    rows: list[Row] = [(("", *(_TITLES[one.policy] for one in held)), None, "dim")]

    def add(name: str, *cells: str, style: str = "") -> None:
        rows.append(((name, *cells), None, style))

    wrong = any(one.agrees is False for one in held)
    add("memory", *(format_bytes(one.bytes) for one in held))
    add("bytes", *(f"{one.bytes:,}" for one in held))
    add("predicted", *("calculated" if one.predicted_bytes is None else "same" if one.agrees else f"{one.predicted_bytes:,}"
                       for one in held), style="red" if wrong else "")  # fmt: skip
    add("blocks", *("–" if one.blocks is None else f"{one.blocks:,}" for one in held))
    add("of it, tokens stored", *(share_words(one.stored, one.slots) for one in held))
    add("  never filled", *(share_words(one.unused, one.slots) for one in held))
    hits = share_words(sum(found.hits), found.queried)
    add("prompt tokens from cache", *(hits if one.policy == "prefix" else "0%" for one in held))
    screen.table("l" + "r" * len(held), rows)
    screen.line()
    facts = _facts(found)
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        screen.line(Text.assemble((name.ljust(width), "dim"), "  ", one_line(text)), indent=width + 2)
    for text in _notes(found):
        screen.line(one_line(text), "dim")


def _facts(found: Sharing) -> list[tuple[str, str]]:
    expected = sum(found.expected_hits)
    hits = sum(found.hits)
    out = [("found", f"{hits:,} of {found.queried:,} prompt tokens, "
            + ("as many as prompts have in common in whole blocks" if found.hits == found.expected_hits
               else f"NOT the {expected:,} that prompts have in common in whole blocks"))]  # fmt: skip
    first = found.first_token
    if first is not None:
        between = "" if first.ratio.low is None else f" ({first.ratio.low:.2f} to {first.ratio.high:.2f})"
        out.append(("TTFT", f"{format_seconds(first.cached.median)} with the prefix in the cache, {format_seconds(first.cold.median)} without: "
                    f"{first.ratio.value:.2f}×{between}"))  # fmt: skip
    if found.work is not None:
        out.append(("prefill work", f"{_flops(found.work.cached_flops)} with it, {_flops(found.work.cold_flops)} without: "
                    f"{share_words(round(found.work.saved * 10**6), 10**6)} saved"))  # fmt: skip
    out += [(_TITLES[one.policy], _alike(one)) for one in found.alike]
    forked = found.forked
    if forked is not None:
        copied = f"{plural(forked.copied, 'block')} copied" + ("" if forked.copied == forked.expected_copied else
                                                                 f" (NOT {forked.expected_copied:,}, as expected)")  # fmt: skip
        out.append((f"{forked.branches} branches", f"of {forked.tokens:,} tokens, {forked.decode + 1:,} more each: {copied}, "
                    f"{forked.blocks:,} held instead of {forked.separate_blocks:,}; {_alike(forked.alike)}"))  # fmt: skip
    return out


def _alike(one: Alike) -> str:
    """ "as the plain cache in all of 520 distributions"."""
    if not one.difference:
        return f"the plain cache's logits, bit for bit, in all {one.compared:,} places"
    likeliest = "everywhere" if one.same == one.compared else f"in {one.same:,} of {one.compared:,}"
    return f"logits differ from the plain cache's by {one.difference:.2g} at most, of {one.largest:.3g}; the same likeliest token {likeliest}"


def _notes(found: Sharing) -> list[str]:
    asked, lengths = found.asked, found.asked.lengths
    span = f"{min(lengths):,} to {max(lengths):,}" if min(lengths) < max(lengths) else f"{max(lengths):,}"
    return [
        f"{asked.requests:,} requests of {span} tokens, the first {asked.common:,} of all the same, and {asked.decode:,} more each; all held at once at "
        f"the end; blocks of {asked.block:,}",
        "one piece: what is reserved for every request ahead, at the model's longest or at the next power of 2",
    ]  # fmt: skip


def _flops(value: int) -> str:
    return f"{value / 1e12:.3g} TFLOP" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP"

"""What a trace or a kind of workload says of the requests that come: how long, how often, and how much of a prompt is there already.

How much is found depends on the room for it. A cache that forgets what was used longest ago holds whatever a smaller one holds, so
that one pass over the requests tells it for every size at once (Mattson et al. 1970, "Evaluation techniques for storage
hierarchies"): each run of a prompt is found if all that was touched since it was last touched, and the run itself, fit into the room.
`kvctl.replay` plays the same requests in one size with times; without a limit both find the same but for the last block of a prompt.
"""

from __future__ import annotations

from array import array
from bisect import bisect_right
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.spec import ConvState, RecurrentState

if TYPE_CHECKING:
    from kvctl.recommend.candidate import Candidate
    from kvctl.replay.request import Request
    from kvctl.spec import ModelSpec

MOST_REQUESTS, MOST_HASHES = 200_000, 2_000_000
"""Of a trace, that are looked at: a few seconds and some 200 MB."""
_BLOCK = 16
"""Tokens of a block of most engines: a prompt that is there in full has its last one computed again."""
_SHOWN = 1024


class Row(Record):
    """One request of a trace."""

    arrival: int | None
    """Microseconds."""
    prompt: int
    answer: int
    run: int
    """Tokens under one hash."""
    path: array[int]
    """For each hash, one that stands for all before it, too."""


class Heard:
    """The requests of a trace."""

    def __init__(self, name: str, rows: Sequence[Row], rate: float | None, notes: tuple[str, ...]) -> None:
        self.name, self.rows, self.notes = name, rows, notes
        self.rate = rate
        """Requests a second, where the trace says it or it is assumed."""

    def load(self, limit: int | None) -> Load:
        """What is asked of a server whose longest request has `limit` tokens.

        Raises:
            UsageError: no request is so short.

        """
        rows = self.rows if limit is None else [row for row in self.rows if row.prompt + row.answer <= limit]
        if not rows:
            raise UsageError(
                f"no request of {self.name} fits in {limit:,} tokens", hint="a model or a --ctx that takes more"
            )
        notes = self.notes
        if len(rows) < len(self.rows):
            notes += (f"{len(self.rows) - len(rows):,} of {len(self.rows):,} requests have more than {limit:,} tokens, and are left out",)  # fmt: skip
        count = len(rows)
        return Load(
            self.name, -(-sum(row.prompt for row in rows) // count), max(1, -(-sum(row.answer for row in rows) // count)),
            max(row.prompt + max(row.answer, 1) for row in rows), self.rate, Reuse(self.name, rows), notes,
        )  # fmt: skip


class Load(Record):
    """The requests of one trace that a server takes; tokens."""

    name: str
    prompt: int
    """Mean, rounded up."""
    answer: int
    longest: int
    """Prompt and answer."""
    rate: float | None
    reuse: Reuse
    notes: tuple[str, ...]


def heard(
    name: str,
    requests: Iterable[Request],
    progress: Callable[[int], None] | None = None,
    *,
    rate: float | None = None,
    notes: Sequence[str] = (),
) -> Heard:
    """Read requests, `MOST_REQUESTS` at most; their own rate is taken where `rate` is None."""
    rows: list[Row] = []
    hashes, more, split = 0, False, False
    for request in requests:
        if len(rows) == MOST_REQUESTS or hashes > MOST_HASHES:
            more = True
            break
        path = array("q", _path(request.hash_ids, request.hash_tokens))
        rows.append(Row(request.arrival, request.input_length, request.output_length, request.hash_tokens, path))
        hashes += len(path)
        split = split or request.sequences > 1
        if progress is not None and len(rows) % _SHOWN == 0:
            progress(len(rows))
    said = list(notes)
    if more:
        said.append(f"{name}: the first {len(rows):,} requests are looked at, and there are more")
    if split:
        said.append(f"{name}: parallel samples of one prompt count as one answer")
    if not hashes:
        said.append(f"{name} says nothing of what prompts have in common: none is taken to be found in a cache")
    return Heard(name, rows, _rate(rows) if rate is None else rate, tuple(said))


def _path(ids: Iterable[int], run: int) -> Iterable[int]:
    """Hashes that stand for all before them: equal ones after unequal ones are different tokens in a cache."""
    node = run
    for one in ids:
        node = hash((node, one))
        yield node


def _rate(rows: Sequence[Row]) -> float | None:
    """Requests a second, on average from the first to the last."""
    times = [row.arrival for row in rows if row.arrival is not None]
    if len(times) < max(len(rows), 2) or times[-1] <= times[0]:
        return None
    return (len(times) - 1) * 1e6 / (times[-1] - times[0])


class Curve(Record):
    """What is found in caches of every size."""

    rooms: tuple[int, ...]
    """Tokens that a cache must hold, ascending,"""
    shares: tuple[float, ...]
    """and the share of all prompt tokens that is found with so much."""
    gap: float | None
    """Requests until a run is asked for again, median by tokens; None where nothing is."""

    def at(self, room: float) -> float:
        index = bisect_right(self.rooms, room)
        return self.shares[index - 1] if index else 0.0


class Reuse:
    """How much of a prompt is found; compared by identity, for it is as large as its trace."""

    def __init__(self, name: str, rows: Sequence[Row]) -> None:
        self.name = name
        self.shared = 0
        self._rows = rows
        self._curves: dict[int, Curve] = {}

    def curve(self, caches: int = 1) -> Curve:
        """Of so many caches to which requests are dealt in turn."""
        if caches not in self._curves:
            self._curves[caches] = _curve(self._rows, caches)
        return self._curves[caches]

    def share(self, room: float | None, caches: int = 1) -> float:
        """Of the prompt tokens, with room for so many in each of the caches; None is without limit."""
        return self.curve(caches).at(float("inf") if room is None else room)

    def gap(self) -> float | None:
        """Requests until a prefix is asked for again."""
        return self.curve().gap


class Shared(Reuse):
    """Equal tokens that every prompt begins with: found from the second request on, in a cache of any size."""

    def __init__(self, tokens: int, prompt: int) -> None:
        super().__init__("--shared-prefix", ())
        self.shared = tokens
        kept = min(tokens, prompt - 1) // _BLOCK * _BLOCK  # whole blocks, and the last token is computed
        self._curves[1] = Curve((0,), (kept / prompt,), 1.0)

    def curve(self, caches: int = 1) -> Curve:
        return self._curves[1]


def _curve(rows: Sequence[Row], caches: int) -> Curve:
    found: dict[int, int] = {}
    gaps: dict[int, int] = {}
    for first in range(min(caches, len(rows))):
        _touch(rows[first::caches], found, gaps)
    total = sum(row.prompt for row in rows)
    rooms, shares, sofar = [], [], 0
    for room, tokens in sorted(found.items()):
        sofar += tokens
        rooms.append(room)
        shares.append(sofar / total)
    gap = _median(gaps)
    return Curve(tuple(rooms), tuple(shares), None if gap is None else float(gap * caches))


def _median(weights: dict[int, int]) -> int | None:
    """The value that half of the weight is at or below."""
    half, sofar = sum(weights.values()) / 2, 0
    for value, weight in sorted(weights.items()):
        sofar += weight
        if sofar >= half:
            return value
    return None


def _touch(rows: Sequence[Row], found: dict[int, int], gaps: dict[int, int]) -> None:
    """One cache: adds tokens that are found to `found`, by the room that this takes, and to `gaps`, by requests since.

    `held` counts tokens by the request that touched them last: those of later ones have to be held, too.
    """
    last: dict[int, int] = {}
    held = _Sums(len(rows))
    for now, row in enumerate(rows):
        path, run = row.path, row.run
        size = len(path)
        left = (row.prompt - 1) // _BLOCK * _BLOCK
        at, before = 0, last.get(path[0]) if size else None
        while before is not None:
            start = at
            then: int | None = before
            while then == before:
                at += 1
                then = last.get(path[at]) if at < size else None
            tokens = (at - start) * run
            held.add(before, -tokens)
            room = held.after(before) + tokens
            counted = min(tokens, left)
            if counted:
                left -= counted
                found[room] = found.get(room, 0) + counted
                gaps[now - before] = gaps.get(now - before, 0) + counted
            held.add(now, tokens)
            before = then
        held.add(now, (size - at) * run)
        last.update(dict.fromkeys(path, now))


class _Sums:
    """Sums over ranges of numbers that change (Fenwick 1994)."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._tree = [0] * (size + 1)
        self._total = 0

    def add(self, index: int, value: int) -> None:
        self._total += value
        index += 1
        while index <= self._size:
            self._tree[index] += value
            index += index & -index

    def after(self, index: int) -> int:
        """The sum behind an index."""
        index, upto = index + 1, 0
        while index:
            upto += self._tree[index]
            index &= index - 1
        return self._total - upto


# -- of one candidate --------------------------------------------------------------------------


def caches(candidate: Candidate) -> int:
    """Caches of prompts that it has: one for each server, and for each group of ranks that attends on its own."""
    return candidate.deployment.replicas * candidate.split.data


def found(reuse: Reuse | None, candidate: Candidate, spec: ModelSpec, prompt: int, answer: int) -> float | None:
    """Share of prompt tokens that a candidate finds in its cache; None where nothing says it.

    Answers that are being written take room from what is kept. Recurrent layers keep states at few places of a prompt, and what is
    found with them is not known: nothing is counted on.
    """
    if reuse is None:
        return None
    if candidate.deployment.serving.prefix_caching is False or spec.keeps(RecurrentState, ConvState):
        return 0.0
    servers = caches(candidate)
    room = None
    if candidate.capacity is not None:
        most = candidate.usual_at_once if candidate.asked is None else min(candidate.usual_at_once, candidate.asked)
        room = max(candidate.capacity - most * answer, 0) / servers
    return min(reuse.share(room, servers), (prompt - 1) / prompt)

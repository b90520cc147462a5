"""What is asked of a server: prompts that are made, those of a trace, and those of a file.

Each kind says how long its requests are at most, and makes them one after the other: `source` gives something whose `next` is the
request to come. A conversation's next turn hangs at the request before it (`Ask.then`), since it goes on from its answer.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from kvctl.errors import KvctlError
from kvctl.loadtest.asks import CHAT, Wire
from kvctl.loadtest.exchange import Exchange
from kvctl.loadtest.lengths import Fixed, Spread
from kvctl.loadtest.load import Ask
from kvctl.loadtest.words import Vocabulary
from kvctl.record import Record
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.replay import Request

Message = dict[str, Any]
ROUND, RANDOM = "round", "random"


class Kit(Record):
    """What requests are made with."""

    wire: Wire
    vocabulary: Vocabulary | None
    """None where prompts are given."""
    lot: random.Random
    context: int | None = None
    """Tokens that the server takes, where it says."""
    most_out: int | None = None
    """Output tokens at most, of requests that only try the server."""
    index: int = 0
    """Of this process, among `of`: where requests are given by a list, its own are every `of`-th."""
    of: int = 1

    def out(self, tokens: int) -> int:
        """So many output tokens, or the most."""
        return tokens if self.most_out is None else min(tokens, self.most_out)

    def ask(
        self, prompt: str | Sequence[Message], tokens: int | None, out: int, known: int | None = None,
        then: Callable[[Exchange], Ask | None] | None = None,
    ) -> Ask:  # fmt: skip
        """A request of this prompt, of `tokens` as it was built."""
        data = self.wire.request(self.wire.body(prompt, self.out(out)))
        asked = self.out(out) if self.wire.lengthens else None
        return Ask(data, tokens=tokens, asked=asked, known=known, then=then, reads=then is not None)


class Source(Protocol):
    """Makes requests."""

    cut: int
    """Requests that were made of another length than drawn: what stands around any prompt is longer, or the server's context shorter."""

    def next(self) -> Ask | None:
        """The next request, or conversation; None: there are no more."""

    def prime(self) -> list[Ask]:
        """Those that are sent once before anything is measured."""


class Work(Record):
    """A kind of requests."""

    @property
    def words(self) -> str:
        """In a phrase."""
        raise NotImplementedError

    @property
    def longest(self) -> int | None:
        """Tokens of the longest request with its answer; None where there is no bound, or nobody has counted."""
        raise NotImplementedError

    @property
    def made(self) -> bool:
        """Whether prompts are made, of words of one token each."""
        return True

    @property
    def talks(self) -> bool:
        """Whether some are conversations: a request follows another."""
        return False

    @property
    def natural(self) -> bool:
        """Whether answers end where the model ends them."""
        return False

    @property
    def count(self) -> int | None:
        """Requests that there are; None: as many as are wanted."""
        return None

    @property
    def extra(self) -> Mapping[str, Any]:
        """What every body has besides."""
        return {}

    def source(self, kit: Kit) -> Source:
        """A new one, from the beginning."""
        raise NotImplementedError

    def times(self) -> Iterator[float] | None:
        """When requests are due, in seconds from the start; None where they do not say."""
        return None

    def to_dict(self) -> dict[str, Any]:
        raise NotImplementedError


# -- made ---------------------------------------------------------------------------------------------


class Made(Work):
    """Prompts of words drawn by lot, which share nothing but what they are meant to share."""

    input: Spread
    output: Spread
    prefix: int = 0
    """Tokens with which prompts begin alike; 0: no two do."""
    groups: int = 1
    """Beginnings that there are."""
    order: str = RANDOM
    """How groups follow one another: by lot, or ROUND, which is the worst for a cache that drops what was used longest ago."""
    turns: int = 1
    """Requests of a conversation, each with all that was said before."""
    turn: Spread = Fixed(64)
    """Tokens that the user adds with each turn after the first."""
    think: float = 0.0
    """Seconds between an answer and the next turn."""
    tools: int = 0
    """Definitions of tools with every request; answers that call some are followed by their results."""

    @property
    def words(self) -> str:
        parts = [f"{self.input.words} tokens in, {self.output.words} out"]
        if self.prefix:
            parts.append(f"{self.prefix:,} of them as in one of {plural(self.groups, 'beginning')}")
        if self.turns > 1:
            parts.append(f"conversations of {self.turns:,} turns, {self.turn.words} tokens more in each")
        if self.tools:
            parts.append(plural(self.tools, "tool"))
        return "; ".join(parts)

    @property
    def longest(self) -> int | None:
        parts = (self.input.most, self.output.most, self.turn.most)
        if any(part is None for part in parts):
            return None
        first, out, more = (part or 0 for part in parts)
        return first + self.turns * out + (self.turns - 1) * more

    @property
    def talks(self) -> bool:
        return self.turns > 1

    @property
    def alone(self) -> Made:
        """The same without beginnings that are shared."""
        return self.replace(prefix=0, groups=1, order=RANDOM)

    @property
    def extra(self) -> Mapping[str, Any]:
        return {"tools": tools(self.tools)} if self.tools else {}

    def source(self, kit: Kit) -> Source:
        return _Maker(self, kit)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "made", "input_tokens": self.input.to_dict(), "output_tokens": self.output.to_dict(), "prefix_tokens": self.prefix,
            "groups": self.groups, "order": self.order, "turns": self.turns, "turn_tokens": self.turn.to_dict(), "think_seconds": self.think,
            "tools": self.tools,
        }  # fmt: skip


class _Maker:
    def __init__(self, work: Made, kit: Kit) -> None:
        assert kit.vocabulary is not None
        self._work, self._kit, self._vocabulary = work, kit, kit.vocabulary
        self.cut = 0
        self._number = 0
        self._beginnings = (
            [self._vocabulary.prompt(work.prefix, kit.lot) for _ in range(work.groups)] if work.prefix else [""]
        )

    def _lengths(self) -> tuple[int, int]:
        work, kit = self._work, self._kit
        tokens, out = work.input.draw(kit.lot), work.output.draw(kit.lot)
        least = max(work.prefix, self._vocabulary.around) + 1
        if tokens < least and work.input.most is None:
            tokens = least
            self.cut += 1
        if kit.context is not None and work.longest is None and tokens + out > kit.context:
            out = min(out, max(1, kit.context - least))
            tokens = min(tokens, kit.context - out)
            self.cut += 1
        return tokens, out

    def next(self) -> Ask:
        work, kit = self._work, self._kit
        tokens, out = self._lengths()
        if work.order == ROUND:
            beginning = self._beginnings[self._number % len(self._beginnings)]
        else:
            beginning = kit.lot.choice(self._beginnings)
        self._number += 1
        prompt = self._vocabulary.prompt(tokens, kit.lot, beginning)
        known = work.prefix or None
        if work.turns == 1:
            return kit.ask(prompt, tokens, out, known)
        talk = _Talk(kit, [prompt, *self._more()], out, work.think)
        return talk.first(tokens, known)

    def _more(self) -> Iterator[str]:
        """What the user says in turns after the first."""
        for _ in range(self._work.turns - 1):
            words = self._work.turn.draw(self._kit.lot)
            yield " ".join(self._kit.lot.choices(self._vocabulary.words, k=words))

    def prime(self) -> list[Ask]:
        work, kit = self._work, self._kit
        if not work.prefix:
            return []
        once = kit.replace(most_out=1)
        tokens = max(work.prefix, self._vocabulary.around) + 1
        return [once.ask(self._vocabulary.prompt(tokens, kit.lot, one), tokens, 1) for one in self._beginnings]


class _Talk:
    """A conversation: what was said goes into every request after it."""

    def __init__(self, kit: Kit, says: Iterable[str], out: int, think: float) -> None:
        self._kit, self._out, self._think = kit, out, think
        self._says = iter(says)
        self._text = ""
        self._messages: list[Message] = []

    def first(self, tokens: int | None, known: int | None) -> Ask:
        """Its first request."""
        says = next(self._says)
        self._text = says
        self._messages = [{"role": "user", "content": says}]
        return self._ask(tokens, known)

    def _ask(self, tokens: int | None, known: int | None) -> Ask:
        prompt: str | list[Message] = self._messages if self._kit.wire.path == CHAT else self._text
        return self._kit.ask(prompt, tokens, self._out, known, self._then)

    def _then(self, exchange: Exchange) -> Ask | None:
        says = next(self._says, None)
        wrote = exchange.wrote
        if says is None or wrote is None:
            return None
        self._text += wrote.text + " " + says
        self._messages = [*self._messages, *_heard(wrote.text, list(wrote.calls.values()), says)]
        usage = exchange.usage
        known = None
        if usage is not None and usage.prompt is not None and usage.completion is not None:
            # The last token that was written was never read: it is not in the cache.
            known = usage.prompt + usage.completion - 1
        ask = self._ask(None, known)
        ask.pause = self._think
        return ask


def _heard(text: str, calls: Sequence[Any], says: str) -> list[Message]:
    """An answer and what follows it, as messages: results of the tools that it called, or else the user's word."""
    if not calls:
        return [{"role": "assistant", "content": text}, {"role": "user", "content": says}]
    names = [call.id or f"call_{number}" for number, call in enumerate(calls)]
    called = [
        {"id": name, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for name, call in zip(names, calls, strict=True)
    ]
    results = [{"role": "tool", "tool_call_id": name, "content": says} for name in names]
    return [{"role": "assistant", "content": text or None, "tool_calls": called}, *results]


_TOOLS = (
    ("search_files", "Find files whose path or contents match a pattern.", ("pattern", "folder")),
    ("read_file", "Read a range of lines of a text file.", ("path", "first_line", "last_line")),
    ("write_file", "Replace the contents of a file.", ("path", "contents")),
    ("run_command", "Run a shell command and return what it prints.", ("command", "timeout_seconds")),
    ("query_database", "Run a read-only query and return its rows.", ("query", "limit")),
    ("get_metric", "Read a metric between two points in time.", ("name", "start", "end")),
    ("list_tickets", "List open tickets of a team.", ("team", "state")),
    ("send_message", "Send a message to a channel.", ("channel", "text")),
)


def tools(count: int) -> list[Message]:
    """So many definitions, as OpenAI's protocol has them."""
    out = []
    for number in range(count):
        name, what, fields = _TOOLS[number % len(_TOOLS)]
        again = number // len(_TOOLS)
        kinds = {field: {"type": "string", "description": field.replace("_", " ")} for field in fields}
        parameters = {"type": "object", "properties": kinds, "required": list(fields[:1])}
        function = {"name": f"{name}_{again + 1}" if again else name, "description": what, "parameters": parameters}
        out.append({"type": "function", "function": function})
    return out


# -- of a trace ---------------------------------------------------------------------------------------


class Traced(Work):
    """Requests of a trace: their lengths, what their prompts share, and their times; not their words, which traces do not have."""

    path: str
    speed: float | None = None
    """How many times as fast as they came; None: not by their times."""
    seen: int = 0
    """Requests that it has."""
    most: int = 0
    """Tokens of the longest of them, with its answer."""
    seconds: float | None = None
    """From the first to the last; None where it does not say."""
    limit: int | None = None
    """Tokens that the server takes: longer ones are left out."""
    left_out: int = 0

    @property
    def words(self) -> str:
        return f"{plural(self.seen, 'request')} of {self.path}" + (
            "" if self.speed in (None, 1.0) else f", {self.speed:g} times as fast"
        )

    @property
    def longest(self) -> int | None:
        return None

    @property
    def count(self) -> int | None:
        return self.seen

    def fitting(self, limit: int | None) -> Traced:
        """Without requests of more tokens than that."""
        if limit is None or self.most <= limit:
            return self
        kept = sum(1 for _ in _requests(self.path, limit))
        if not kept:
            raise KvctlError(f"{self.path}: no request fits into the {limit:,} tokens that the server takes")
        return self.replace(limit=limit, seen=kept, left_out=self.seen - kept)

    def source(self, kit: Kit) -> Source:
        return _Replay(self, kit)

    def times(self) -> Iterator[float] | None:
        if self.speed is None:
            return None
        return _times(_requests(self.path, self.limit), self.speed)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "trace", "path": self.path, "speed": self.speed, "requests": self.seen, "seconds": self.seconds,
            "longest_tokens": self.most, "left_out": self.left_out,
        }  # fmt: skip


def traced(path: str, speed: float | None) -> Traced:
    """A trace that was read from its beginning to its end, so that no fault of it comes up in the middle of a load.

    Raises:
        SourceError: it cannot be read.
        KvctlError: it has no times, and they are asked for.

    """
    count = most = 0
    first: int | None = None
    last: int | None = None
    for one in _requests(path, None):
        count += 1
        most = max(most, one.input_length + max(1, one.output_length))
        if one.arrival is None:
            if speed is not None:
                raise KvctlError(
                    f"{path}: request {count:,} has no time", hint="--concurrency or --rate sends them by another clock"
                )
            continue
        first = one.arrival if first is None else first
        last = one.arrival
    seconds = None if first is None or last is None else (last - first) / 1e6
    return Traced(path, speed, count, most, seconds)


def _requests(path: str, limit: int | None) -> Iterator[Request]:
    from kvctl.replay import read_trace

    for one in read_trace(path):
        if limit is None or one.input_length + max(1, one.output_length) <= limit:
            yield one


def _times(found: Iterator[Request], speed: float) -> Iterator[float]:
    first: int | None = None
    for one in found:
        assert one.arrival is not None
        first = one.arrival if first is None else first
        yield (one.arrival - first) / 1e6 / speed


class _Replay:
    """Prompts that share what the trace's shared: the same words for the same hash, drawn anew in each run."""

    def __init__(self, work: Traced, kit: Kit) -> None:
        assert kit.vocabulary is not None
        self._kit, self._vocabulary = kit, kit.vocabulary
        self._requests = _requests(work.path, work.limit)
        self._salt = kit.lot.getrandbits(64)
        self._before: dict[int, int] = {}
        """Tokens that came under each hash."""
        self._number = 0
        self.cut = 0

    def next(self) -> Ask | None:
        for one in self._requests:
            self._number += 1
            if (self._number - 1) % self._kit.of == self._kit.index:
                return self._ask(one)
            self._met(one)
        return None

    def _ask(self, one: Request) -> Ask:
        room = one.input_length - self._vocabulary.around
        if room < 1:  # shorter than what stands around any prompt
            room = 1
            self.cut += 1
        known = self._met(one) if one.hash_ids else None
        self.cut += not one.output_length
        prompt = " ".join([self._vocabulary.first, *self._words(one, room)])
        return self._kit.ask(prompt, room + self._vocabulary.around, max(1, one.output_length), known)

    def _met(self, one: Request) -> int:
        """Tokens of its beginning that came before; from now on all of it has."""
        shared, whole = 0, True
        for place, number in enumerate(one.hash_ids):
            own = min(one.hash_tokens, one.input_length - place * one.hash_tokens)
            before = self._before.get(number, 0)
            if whole:
                shared += min(own, before)
                whole = before >= own
            self._before[number] = max(before, own)
        return shared

    def _words(self, one: Request, room: int) -> list[str]:
        words = self._vocabulary.words
        out: list[str] = []
        for number in one.hash_ids:
            if len(out) >= room:
                break
            own = random.Random(f"{self._salt} {number}")
            out += own.choices(words, k=min(one.hash_tokens, room - len(out)))
        out += self._kit.lot.choices(words, k=room - len(out))
        return out

    def prime(self) -> list[Ask]:
        return []


# -- of a file ----------------------------------------------------------------------------------------


class Given(Work):
    """Prompts of a file, in an order drawn by lot; answers end where the model ends them."""

    path: str
    prompts: tuple[Prompt, ...]
    output: Spread
    """Output tokens at most, of those that do not say; with `capped` of all."""
    think: float = 0.0
    many: int | None = None
    """How many there are, where they are not here themselves: of a result that was saved."""
    turns: int = 1
    """Of the longest conversation."""
    capped: bool = False
    left_out: int = 0
    """Conversations of the file in which nobody asks anything."""

    @property
    def number(self) -> int:
        """Prompts of the file."""
        return len(self.prompts) if self.many is None else self.many

    @property
    def words(self) -> str:
        return f"{plural(self.number, 'prompt')} of {self.path}, at most {self.output.words} tokens out"

    @property
    def longest(self) -> int | None:
        return None

    @property
    def made(self) -> bool:
        return False

    @property
    def talks(self) -> bool:
        return self.turns > 1

    @property
    def natural(self) -> bool:
        return True

    def source(self, kit: Kit) -> Source:
        return _Reader(self, kit)

    def to_dict(self) -> dict[str, Any]:
        return {
            "kind": "prompts",
            "path": self.path,
            "prompts": self.number,
            "turns": self.turns,
            "output_tokens": self.output.to_dict(),
            "output_capped": self.capped,
            "think_seconds": self.think,
            "left_out": self.left_out,
        }


class Prompt(Record):
    """One of a file: messages that are sent as they are, or what a user says turn after turn."""

    messages: tuple[Message, ...] = ()
    says: tuple[str, ...] = ()
    out: int | None = None
    """Output tokens at most; None where the file does not say."""


class _Reader:
    def __init__(self, work: Given, kit: Kit) -> None:
        self._work, self._kit = work, kit
        self._order: list[int] = []
        self.cut = 0

    def next(self) -> Ask:
        kit, work = self._kit, self._work
        if not self._order:
            self._order = kit.lot.sample(range(len(work.prompts)), len(work.prompts))
        one = work.prompts[self._order.pop()]
        out = work.output.draw(kit.lot)
        if one.out is not None:
            out = min(out, one.out) if work.capped else one.out
        if one.messages:
            return kit.ask(list(one.messages), None, out)
        if len(one.says) == 1:
            return kit.ask(one.says[0], None, out)
        return _Talk(kit, one.says, out, work.think).first(None, None)

    def prime(self) -> list[Ask]:
        return []

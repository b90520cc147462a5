"""What GPUs cost: prices that the user gives, for none is built in (they age). Without one, GPUs are counted instead."""

from __future__ import annotations

import math
import os
import re
import tomllib
from collections.abc import Iterable, Mapping
from typing import Any

from kvctl.errors import ConfigError, SourceError, UsageError
from kvctl.hardware import table
from kvctl.record import Record
from kvctl.speed import Range
from kvctl.units import plural

_HINT = "--price 2.5, --price H100=2.5,L40S=0.9, or a TOML file with such lines"
_NUMBER = re.compile(r"\d+(?:[._]\d+)*")
_SIZED = re.compile(r"(.+?)[\s:_-]*(\d{1,4})\s*gi?b?", re.IGNORECASE)
_MOST = 1_000_000.0
_LIMIT = 1_000_000
"""Bytes of a file."""


class Prices(Record):
    """Prices of a GPU for an hour, in the user's currency."""

    each: float | None = None
    """Of any GPU that is not named."""
    named: Mapping[str, float] = {}
    """By the names that the user wrote."""
    typed: tuple[str, ...] = ()
    """Names that stand in the options themselves: a file may be a list of all there is."""

    def of(self, gpu: str) -> float | None:
        """The price of a GPU by its name in the table (kvctl.hardware.table), or None.

        Names are spelled as for --gpu; of several that stand for the card, the one that stands for the fewest counts ("A100 80GB
        PCIe" before "A100-80GB" before "A100").
        """
        spelled = table.key(gpu)
        meant = [(names, price) for name, price in self.named.items() if spelled in (names := _cards(name))]
        return min(meant, key=lambda one: len(one[0]))[1] if meant else self.each


class Cost(Record):
    """What a deployment costs."""

    gpus: int
    """Devices; of a card with two dies each is one."""
    per_hour: float | None
    """None without a price: GPUs are counted instead."""
    per_million: Range | None
    """A million output tokens, at the rate that is predicted; the prompts that lead to them are part of it."""
    cards: int = 0
    """Where a card has several dies: what is paid for, as --gpu names and counts them."""

    @property
    def order(self) -> tuple[float, int]:
        """What to sort by: the price of an hour where there is one, and the number of GPUs."""
        return (0.0 if self.per_hour is None else self.per_hour, self.gpus)

    def to_dict(self) -> dict[str, Any]:
        million = self.per_million
        return {"gpus": self.gpus, "per_hour": self.per_hour,
                "per_million_output_tokens": None if million is None else {name: getattr(million, name) for name in million._fields}}  # fmt: skip


def cost(gpu: str, gpus: int, prices: Prices, output_rate: Range | None = None, *, dies: int = 1) -> Cost:
    """The cost of so many GPUs that give `output_rate` tokens a second together.

    A card with `dies` is paid for once. The more tokens, the less each costs: the low end of the cost is that of the high end
    of the rate.
    """
    price = prices.of(gpu) if gpus else None
    bought = -(-gpus // dies)
    cards = bought if dies > 1 else 0
    if price is None:
        return Cost(gpus, None, None, cards)
    hour = round(price * bought, 6)
    if output_rate is None or output_rate.low <= 0:
        return Cost(gpus, hour, None, cards)
    million = [hour / 3600 / rate * 1e6 for rate in (output_rate.high, output_rate.mid, output_rate.low)]
    return Cost(gpus, hour, Range(*million), cards)


def parse(texts: tuple[str, ...] | list[str]) -> Prices:
    """Read --price, given once or several times: a number, NAME=PRICE with commas between several, or a TOML file.

    Raises:
        UsageError: something else, an unknown GPU, a price that is none, or two for one GPU.
        ConfigError: the file holds something else.
        SourceError: it cannot be read.

    """
    each: float | None = None
    named: dict[str, float] = {}
    typed: list[str] = []
    for text in texts:
        found = _file(text) if _is_file(text) else _words(text)
        typed += found.named if not _is_file(text) else ()
        if found.each is not None:
            if each is not None:
                raise UsageError(f"--price: {each:g} and {found.each:g} are both for any GPU", hint=_HINT)
            each = found.each
        for name, price in found.named.items():
            _add(named, name, price, "--price")
    return Prices(each, named, tuple(dict.fromkeys(typed)))


def remarks(prices: Prices, gpus: Iterable[str]) -> tuple[str, ...]:
    """What of the prices says nothing of the GPUs that are asked about, by their names in the table, and which have none."""
    asked = tuple(dict.fromkeys(gpus))
    spelled = {table.key(gpu) for gpu in asked}
    idle = [name for name in prices.typed if not spelled & _cards(name)]
    out = [f"--price {name}: no such GPU is asked about, and its price is not used" for name in idle]
    bare = [gpu for gpu in asked if prices.named and prices.of(gpu) is None]
    return (*out, *(f"{gpu} has no price: its GPUs are counted instead" for gpu in bare))


def _is_file(text: str) -> bool:
    return text.strip().endswith(".toml") or ("=" not in text and os.path.isfile(text))


def _words(text: str) -> Prices:
    each: float | None = None
    named: dict[str, float] = {}
    parts = [part.strip() for part in text.split(",")]
    for part in parts:
        name, equals, price = (piece.strip() for piece in part.partition("="))
        if not equals:
            if each is not None or not part:
                raise UsageError(f"--price: {text[:60]!r} is no price", hint=_HINT)
            each = _price(part, "--price")
        else:
            _add(named, name, _price(price, f"--price: {name[:40]}"), "--price")
    return Prices(each, named)


def _file(path: str) -> Prices:
    where = path.strip()[:200]
    try:
        with open(path.strip(), "rb") as file:
            raw = file.read(_LIMIT + 1)
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise SourceError(f"{where}: {reason[:1].lower()}{reason[1:]}", hint=_HINT) from None
    try:
        data = tomllib.loads(raw.decode("utf-8-sig")) if len(raw) <= _LIMIT else None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ConfigError(f"{where} is no TOML: {str(error)[:120]}", hint='lines such as "H100 SXM" = 2.5') from None
    if data is None:
        raise ConfigError(f"{where} is too long for prices: over {_LIMIT // 1_000_000} MB", hint=_HINT)
    rows = data.get("prices", data)  # a table of that name, or lines without one
    if not isinstance(rows, dict) or not rows:
        raise ConfigError(f"{where} holds no prices", hint='lines such as "H100 SXM" = 2.5')
    named: dict[str, float] = {}
    each: float | None = None
    for name, value in rows.items():
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ConfigError(f"{where}: the price of {name[:40]} is no number", hint='a line such as "H100 SXM" = 2.5')
        price = _bounded(float(value), f"{where}: {name[:40]}")
        if name == "default":
            each = price
        else:
            _add(named, name, price, where)
    return Prices(each, named)


def _add(named: dict[str, float], name: str, price: float, where: str) -> None:
    if not _cards(name):
        near = ", ".join(table.nearest(name)) if name else ""
        raise UsageError(f"{where}: unknown GPU {name[:40]!r}", hint=f"nearest: {near}" if near else _HINT)
    for other, before in named.items():
        if before != price and table.key(other) == table.key(name):
            raise UsageError(f"{where}: {name[:40]} has two prices, {before:g} and {price:g}", hint=_HINT)
    named[name] = price


def _price(text: str, where: str) -> float:
    match = _NUMBER.fullmatch(text.lstrip("$€£").strip()) if len(text) <= 40 else None
    try:
        value = float(match[0]) if match else math.nan
    except ValueError:
        value = math.nan
    if math.isnan(value):
        raise UsageError(f"{where}: {text[:40]!r} is no price", hint=_HINT)
    return _bounded(value, where)


def _bounded(value: float, where: str) -> float:
    if not 0 < value <= _MOST:  # also what is no number
        raise UsageError(f"{where}: {value:g} an hour is out of range", hint=f"more than 0, at most {_MOST:,.0f}")
    return value


def _cards(name: str) -> frozenset[str]:
    """Keys of the cards that a name stands for: "H100", "A100-80GB", "L40S"."""
    cards = table.find(name)
    sized = _SIZED.fullmatch(name.strip()) if not cards and len(name) <= 80 else None
    if sized is not None:
        cards = tuple(card for card in table.find(sized[1]) if card.nominal_gb == int(sized[2]))
    return frozenset(table.key(card.name) for card in cards)


def words(found: Cost) -> str:
    """ "8 GPUs, 20 an hour"; "2 GPUs of 1 card, 4 an hour"."""
    count = plural(found.gpus, "GPU") + (f" of {plural(found.cards, 'card')}" if found.cards else "")
    return count if found.per_hour is None else f"{count}, {found.per_hour:,.4g} an hour"

"""Read a config.json the way its configuration class would.

A config leaves out fields that equal its class's defaults, spells them by its class's
names, and nests the decoder. `Fields` hides that: ask for the standard name, get the
value the real model would use, or a ConfigError that names the key.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, NamedTuple

from kvctl.errors import ConfigError, Hint

# importlib.resources would cost more than the rest of a run together.
_FACTS = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "model_types.jsonl")

# Beyond any real model, and far below what would make a report slow.
MAX_LAYERS = 10_000
MAX_INT = 2**48


class ModelType(NamedTuple):
    """What the configuration class of a model type adds to a config.json."""

    defaults: Mapping[str, Any]
    aliases: Mapping[str, str]
    nested: Mapping[str, str]
    """Model types of nested parts that name none."""
    fixed: frozenset[str]
    """Nested parts that are read by that type whatever they name."""
    nested_defaults: Mapping[str, Mapping[str, Any]]
    """What stands in for a nested part that is missing."""
    merged: frozenset[str]
    """Nested parts where it also fills in what a given part leaves out."""


_UNKNOWN = ModelType({}, {}, {}, frozenset(), {}, frozenset())


@cache
def _type_lines() -> str:
    with open(_FACTS, encoding="utf-8") as file:
        return file.read()


@cache
def model_type_facts(model_type: str) -> ModelType:
    """Defaults, aliases and nested types of `model_type`; empty for an unknown one."""
    # One line a type: find it as text, parse only that line.
    text = _type_lines()
    start = text.find("\n" + '{"model_type":' + json.dumps(model_type) + ",")
    if start < 0:
        return _UNKNOWN
    row = json.loads(text[start + 1 : text.index("\n", start + 1)])
    return ModelType(
        row["defaults"], row.get("aliases", {}), row.get("nested", {}), frozenset(row.get("fixed", ())),
        row.get("nested_defaults", {}), frozenset(row.get("merged", ())),
    )  # fmt: skip


class Fields:
    """One (sub-)configuration: JSON over class defaults, under standard names.

    `read` lists what has been asked for, by full path, and where it came from ("config",
    "default" or "absent"); nested configurations share it. It tells a what-if that has an
    effect from one that has none, and which facts an incomplete catalogue row rests on.
    """

    __slots__ = ("_facts", "_spellings", "path", "raw", "read", "type")

    def __init__(
        self, raw: Mapping[str, Any], *, path: str = "", default_type: str = "", read: dict[str, str] | None = None
    ) -> None:
        model_type = raw.get("model_type") or default_type
        if not isinstance(model_type, str):
            raise ConfigError(f"{path}model_type is {_show(model_type)}, not a name")
        self._facts = model_type_facts(model_type)
        self.raw = raw
        self.path = path
        self.type = model_type
        self._spellings: dict[str, tuple[str, ...]] | None = None
        self.read: dict[str, str] = {} if read is None else read
        if model_type:
            self.read[f"{path}model_type"] = "config"

    # -- reading ---------------------------------------------------------------

    def get(self, name: str, default: Any = None) -> Any:
        """The value the configuration object would show under `name`."""
        raw = self.raw
        aliases, defaults = self._facts.aliases, self._facts.defaults
        if aliases:
            # transformers sets declared fields first and left-over keys after them, through
            # the alias map: a standard spelling in the file wins over the class's own.
            stored = aliases.get(name, name)
            if self._spellings is None:
                spellings: dict[str, tuple[str, ...]] = {}
                for alias, target in aliases.items():
                    spellings[target] = (*spellings.get(target, ()), alias)
                self._spellings = spellings
            for alias in self._spellings.get(stored, ()):
                if alias in raw:
                    self.read[self.path + stored] = "config"
                    return raw[alias]
        else:
            stored = name
        if stored in raw:
            self.read[self.path + stored] = "config"
            return raw[stored]
        if stored in defaults:
            self.read[self.path + stored] = "default"
            return defaults[stored]
        self.read.setdefault(self.path + stored, "absent")
        return default

    def stored_name(self, name: str) -> str:
        """The name under which the class keeps a field ("n_head" for "num_attention_heads" of GPT-2)."""
        return self._facts.aliases.get(name, name)

    def has(self, name: str) -> bool:
        """True where the file or the class knows the field."""
        stored = self.stored_name(name)
        return name in self.raw or stored in self.raw or stored in self._facts.defaults

    def knows(self, name: str) -> bool:
        """True where the class has the field; a key of the file alone does not count."""
        return self.stored_name(name) in self._facts.defaults

    def default(self, name: str) -> Any:
        """What the class has under `name` where the file has nothing; does not count as asked for."""
        return self._facts.defaults.get(self.stored_name(name))

    def number(self, name: str, *, minimum: int = 1) -> int:
        """A required whole number."""
        value = self.get(name)
        if value is None:
            raise ConfigError(
                f"{self.path}{name} is missing from the configuration of {self.type[:60] or 'this model'}",
                hint=Hint(
                    f"give it with --set {self.path}{name}=N", "size", "profile", otherwise="say it in its config.json"
                ),
            )
        return self.as_number(name, value, minimum)

    def optional_number(self, name: str, *, minimum: int = 1) -> int | None:
        """A whole number, or None where it is absent or null."""
        value = self.get(name)
        return None if value is None else self.as_number(name, value, minimum)

    def number_or(self, name: str, default: int, *, minimum: int = 1) -> int:
        """A whole number, or `default` where it is absent or null."""
        value = self.optional_number(name, minimum=minimum)
        return default if value is None else value

    def flag(self, name: str, default: bool = False) -> bool:
        """A truth value, as Python would take it."""
        value = self.get(name)
        if value is None:
            # A null that stands in the file is false; only what is absent takes the default.
            return default and self.stored_name(name) not in self.raw and name not in self.raw
        if not isinstance(value, (bool, int)):
            raise ConfigError(f"{self.path}{name} is {_show(value)}, not true or false")
        return bool(value)

    def entries(self, name: str) -> list[Any] | None:
        """A list, or None where it is absent or null."""
        value = self.get(name)
        if value is None:
            return None
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{self.path}{name} is {_show(value)}, not a list")
        if len(value) > MAX_LAYERS:
            raise ConfigError(f"{self.path}{name} has {len(value):,} entries; no model has over {MAX_LAYERS:,} layers")
        return list(value)

    def wholes(self, name: str) -> list[int] | None:
        """A list of whole numbers, layers for example."""
        value = self.entries(name)
        for entry in value or ():
            if isinstance(entry, bool) or not isinstance(entry, int):
                raise ConfigError(f"{self.path}{name} holds {_show(entry)}, not a whole number")
        return value

    def strings(self, name: str, length: int | None = None) -> list[str] | None:
        """A list of names, of `length` where given."""
        value = self.entries(name)
        if value is None:
            return None
        for entry in value:
            if not isinstance(entry, str):
                raise ConfigError(f"{self.path}{name} holds {_show(entry)}, not a name")
        if length is not None and len(value) != length:
            raise ConfigError(f"{self.path}{name} has {len(value)} entries for {length} layers")
        return value

    def layers(self, name: str = "num_hidden_layers") -> int:
        """A number of layers, within reason."""
        count = self.number(name, minimum=0)
        if count > MAX_LAYERS:
            raise ConfigError(f"{self.path}{name} is {count:,}; no model has over {MAX_LAYERS:,} layers")
        return count

    def as_number(self, name: str, value: Any, minimum: int) -> int:
        """`value`, found under `name`, as a whole number in range."""
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise ConfigError(f"{self.path}{name} is {_show(value)}, not a whole number")
        if not minimum <= value <= MAX_INT:
            raise ConfigError(f"{self.path}{name} is {value:,}, out of range" if abs(value) < 2**64 else
                              f"{self.path}{name} is out of range")  # fmt: skip
        return value

    # -- nesting ---------------------------------------------------------------

    @property
    def nested_types(self) -> Mapping[str, str]:
        """Model types that the class gives to its nested parts."""
        return self._facts.nested

    def nested(self, name: str, *, default_type: str = "") -> Fields | None:
        """The configuration under `name`, or None where there is none."""
        value = self.get(name)
        declared = self.nested_types.get(name, default_type)
        stand_in = self._facts.nested_defaults.get(name, {})
        if value is None:
            if not declared:
                return None
            value = stand_in
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.path}{name} is {_show(value)}, not an object")
        if name in self._facts.merged:
            value = {**stand_in, **value}
        if name in self._facts.fixed:
            value = {**value, "model_type": declared}
        return Fields(value, path=f"{self.path}{name}.", default_type=declared, read=self.read)

    def section(self, name: str) -> Fields:
        """A plain object of settings under `name` (empty where absent), read under its own names."""
        value = self.get(name)
        if value is None:
            value = {}
        if not isinstance(value, Mapping):
            raise ConfigError(f"{self.path}{name} is {_show(value)}, not an object")
        return Fields(dict(value, model_type=""), path=f"{self.path}{name}.", read=self.read)

    def with_values(self, **values: Any) -> Fields:
        """The same configuration with some fields replaced (`__post_init__` of the class)."""
        fields = Fields.__new__(Fields)
        fields.raw = {**self.raw, **values}
        fields.path, fields.type = self.path, self.type
        fields._facts, fields._spellings, fields.read = self._facts, self._spellings, self.read
        return fields

    def keys(self) -> Iterator[str]:
        """Keys of the file itself."""
        return iter(self.raw)


def _show(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else text[:37] + "..."

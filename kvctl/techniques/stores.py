"""Formats of the cache, each token or group of tokens packed as it becomes old enough.

Groups of integers with a scale and a minimum, KIVI (Liu et al., 2024, arXiv 2402.02750), small floats, the formats of vLLM and
of llama.cpp; a Hadamard rotation before packing (QuaRot, arXiv 2404.00456), keys before their rotary embedding (KVQuant,
arXiv 2401.18079).
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.techniques.codecs import CODECS, Codec, Fp8, codec, grouped
from kvctl.techniques.options import Options
from kvctl.techniques.store import Packing, Store

_INTEGERS = {"int8": 8, "int4": 4, "int2": 2}
_KIVI = {"kivi8": 8, "kivi4": 4, "kivi2": 2}
GROUP, KIVI_GROUP, KIVI_RESIDUAL = 64, 32, 128


def build(options: Options) -> Store:
    """`int4:group=32:sym`, `kivi2:residual=32`, `q8_0:values=q4_0`, `fp8:scaled`; for all: residual=, sinks=, values=, rotate, rope=before."""
    name = options.name
    if name in _INTEGERS:
        keys = values = _grouped(options, _INTEGERS[name])
        residual = 0
    elif name in _KIVI:
        group = options.number("group", KIVI_GROUP, least=1)
        keys = grouped(_KIVI[name], group, per_channel=True)
        values = grouped(_KIVI[name], group)
        residual = KIVI_RESIDUAL
    else:
        keys = values = codec(name)
        if isinstance(keys, Fp8) and options.flag("scaled"):
            keys = values = keys.replace(name=f"{name}-scaled", calibrated=True)
        residual = 0
    return _store(options, keys, values, residual)


def _grouped(options: Options, bits: int) -> Codec:
    group = options.number("group", GROUP)
    return grouped(bits, group, symmetric=options.flag("sym"))


def _store(options: Options, keys: Codec, values: Codec, residual: int) -> Store:
    other = options.text("values")
    if other is not None:
        values = _of_values(options.name, other)
    residual, sinks = options.number("residual", residual), options.number("sinks", 0)
    rotated, unrotated = options.flag("rotate"), options.choice("rope", ("after", "before")) == "before"
    return Store(Packing(keys, sinks, residual, rotated), Packing(values, sinks, residual, rotated), unrotated)


def _of_values(name: str, text: str) -> Codec:
    if text in _KIVI:
        raise UsageError(f"{name}:values={text}: KIVI's values are groups of a token", hint=f"values=int{_KIVI[text]}")
    if text not in CODECS:
        raise UsageError(f"{name}:values={text[:40]} is no format", hint="one of " + ", ".join(CODECS))
    return codec(text)

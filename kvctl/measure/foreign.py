"""Runs other people's caches: transformers' quantized ones and presses of kvpress (`kvctl.techniques.foreign`)."""

from __future__ import annotations

import ast
import contextlib
import importlib.util
from collections.abc import Iterator
from typing import Any

from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.measure.faults import first_line
from kvctl.techniques.foreign import Foreign, Press, Quantized

_PACKAGES = {
    "quanto": ("optimum.quanto", "optimum-quanto"),
    "hqq": ("hqq", "hqq"),
    "fp8": ("transformers", "transformers"),
}
"""Of each backend: the module, and what pip calls it."""
_LAYERS = {"quanto": "QuantoQuantizedLayer", "hqq": "HQQQuantizedLayer", "fp8": "Fp8QuantizedLayer"}


def need(foreign: Foreign) -> None:
    """Refuses to go on where it cannot be run on this machine; loads no model.

    Raises:
        KvctlError: its package is not installed, or does not work here.
        UsageError: the package has no such press, or it takes no such options.

    """
    if isinstance(foreign, Quantized):
        _need_backend(foreign)
    elif isinstance(foreign, Press):
        _need_press(foreign)


def equip(foreign: Foreign, cache: Any, model: Any) -> None:
    """Make an empty DynamicCache the one that is asked for.

    Raises:
        ConfigError: the model keeps more than keys and values of full attention.

    """
    from transformers.cache_utils import DynamicLayer

    if any(type(layer) is not DynamicLayer for layer in getattr(cache, "layers", [None])):
        raise ConfigError(f"{foreign.name}: {type(model).__name__} keeps more than keys and values of full attention",
                          hint="caches of other people take nothing else")  # fmt: skip
    if isinstance(foreign, Quantized):
        cache.layers = [_layer(foreign) for _ in range(model.config.get_text_config(decoder=True).num_hidden_layers)]


@contextlib.contextmanager
def around_prompt(foreign: Foreign, model: Any) -> Iterator[None]:
    """What it does while the prompt is read."""
    if not isinstance(foreign, Press):
        yield
        return
    press = _made(foreign)
    theirs = press.forward_hook

    def hook(module: Any, given: Any, named: dict[str, Any], out: Any) -> Any:
        # What newer transformers call otherwise, or leave out.
        if "past_key_values" not in named:
            named = named | {"past_key_values": named["cache"]}
        if "cache_position" not in named:
            named = named | {"cache_position": named["position_ids"][0]}
        return theirs(module, given, named, out)

    press.forward_hook = hook
    before = {id(module) for module in model.modules() if "rotary_emb" in module._modules}
    try:
        with press(model):
            yield
    finally:
        # It has given every attention the model's rotary embedding.
        for module in list(model.modules()):
            if id(module) not in before:
                module._modules.pop("rotary_emb", None)


# -- transformers' quantized caches ---------------------------------------------------------------


def _need_backend(foreign: Quantized) -> None:
    module, package = _PACKAGES[foreign.packing.backend]
    if not _installed(module):
        raise KvctlError(f"{foreign.name} needs {package}, which is not installed", hint=f"pip install {package}")
    import torch

    rows = torch.ones(1, 1, max(foreign.packing.q_group_size, 8), 64)
    try:
        # The second pass unpacks what the first one packed; quanto compiles that.
        layer = _layer(foreign)
        for _ in range(2):
            layer.update(rows, rows)
    except Exception as error:
        hint = f"pip install --upgrade {package}"
        if module == "optimum.quanto":
            hint = "quanto compiles C++ when it is first used: that takes a compiler and ninja"
        raise KvctlError(f"{foreign.name}: {package} does not work here: {first_line(error)}", hint=hint) from error


def _layer(foreign: Quantized) -> Any:
    from transformers import cache_utils

    own = foreign.packing
    kind = getattr(cache_utils, _LAYERS[own.backend])
    if own.backend == "fp8":
        return kind()
    return kind(nbits=own.nbits, axis_key=own.axis_key, axis_value=own.axis_value, q_group_size=own.q_group_size,
                residual_length=own.residual_length)  # fmt: skip


# -- kvpress --------------------------------------------------------------------------------------


def _need_press(foreign: Press) -> None:
    if not _installed("kvpress"):
        raise KvctlError(f"{foreign.name} needs kvpress, which is not installed", hint="pip install kvpress")
    try:
        kvpress: Any = importlib.import_module("kvpress")
    except Exception as error:
        raise KvctlError(f"{foreign.name}: kvpress does not work here: {first_line(error)}",
                         hint="it goes with some versions of transformers alone: pip install kvpress, in an environment of its own") from error  # fmt: skip
    presses = {name: one for name, one in vars(kvpress).items() if isinstance(one, type) and name.endswith("Press")}
    if foreign.press not in presses:
        raise UsageError(f"{foreign.name}: kvpress has no such press", hint="it has " + ", ".join(sorted(presses)))
    _made(foreign)


def _made(foreign: Press) -> Any:
    kvpress: Any = importlib.import_module("kvpress")
    given = {key: _value(text) for key, text in foreign.given}
    if foreign.ratio is not None:
        given["compression_ratio"] = float(foreign.ratio)
    try:
        return getattr(kvpress, foreign.press)(**given)
    except Exception as error:
        raise UsageError(f"{foreign.name}: it cannot be made so: {first_line(error)}",
                         hint="kvpress:PRESS:RATIO, and its other parameters as name=value") from error  # fmt: skip


def _value(text: str) -> Any:
    """A parameter of a press: a number, a truth value, or a word."""
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


def _installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # of the package around it
        return False

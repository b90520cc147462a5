"""Settings of a plan as words of the engine's own command line, and such words as a plan again."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

from kvctl.engines import commandline
from kvctl.engines import engine as find_engine
from kvctl.engines.flags import serving
from kvctl.engines.spelling import COMMANDS
from kvctl.errors import UsageError
from kvctl.formats import TORCH_NAMES, model_dtype
from kvctl.size import SizePlan


def formats(engine: str, plan: SizePlan) -> list[str]:
    """Options for the formats of the cache and of the model.

    Raises:
        UsageError: keys and values apart, where the engine stores both alike.

    """
    if engine == "llama.cpp":
        pairs = (("--cache-type-k", plan.key), ("--cache-type-v", plan.value))
        return [word for name, fmt in pairs if fmt is not None for word in (name, fmt.name)]
    out = ["--dtype", TORCH_NAMES[plan.dtype.name]] if plan.dtype is not None else []
    if plan.key is not None:
        if plan.value not in (None, plan.key, plan.key.values):
            raise UsageError(f"{engine} stores keys and values in one format", hint="--kv-dtype sets both")
        out += ["--kv-cache-dtype", TORCH_NAMES.get(plan.key.name, plan.key.name)]
    return out


def planned(engine: str, words: Sequence[str], plan: SizePlan, rules: str = "") -> SizePlan:
    """The plan of a start with these words; `plan` has what no word says, `rules` the version if that is known.

    Raises:
        UsageError: a word that no such engine has, or a value that it does not know.

    """
    said = commandline.read(f"{COMMANDS[engine]} {shlex.join(words)}", engine)
    found = find_engine(rules or engine)
    common = said.common
    told = serving(engine, said.flags, strict=True).replace(draft=plan.serving.draft)
    context = common.get("context")
    both = common.get("kv_dtype", "auto")
    key, value = (common.get(field, both) for field in ("k_dtype", "v_dtype"))
    keys = None if key == "auto" else found.kv_dtype(key, "--kv-cache-dtype")
    values = None if value == "auto" else found.kv_dtype(value, "--kv-cache-dtype")
    return plan.replace(
        engine=found,
        contexts=(commandline.count_of(engine, context, "its length"),) if context else plan.contexts,
        dtype=model_dtype(common.get("dtype", "auto")),
        key=keys,
        value=(values.values or values) if values is not None else None,
        serving=told,
        notes=(*plan.notes, *said.notes),
    )

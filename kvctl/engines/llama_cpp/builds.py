"""What changed in llama.cpp's caches from build to build.

Measured on the builds of `BUILDS` themselves: the shared objects in the npm packages @node-llama-cpp/linux-x64
3.6.0 to 3.20.0 loaded small models, and logged these rules' lines (tests/test_llama_cpp_builds.py). All but two: windows got
a cache of their own in May 2025, of pad(window · slots + logical batch) cells (llama.cpp pull request 13194), and since b5554
of a physical batch (13833; issue 14071 names that build and the one before it, b5552).
"""

from __future__ import annotations

import re

from kvctl.errors import UsageError
from kvctl.record import Record

NEWEST = 11434


class Rules(Record):
    """Rules of a build and those after it."""

    pad: int = 256
    """Cells of a stream come in multiples of this."""
    pad_without_flash: int = 256
    streams: bool = True
    """Whether slots may have cells of their own."""
    flash_by_default: bool = True
    slots: int = 4
    """Slots of llama-server without --parallel, on one unified cache."""
    latent_values: bool = False
    """Whether latents are stored a second time, as values."""
    hybrid_cells: str = "slot"
    """Cells in each stream of a hybrid's attention: a "slot"'s, or those of all "slots", or the whole "context"'s."""
    name: str = "llama_kv_cache"
    recurrent_log: int = 2
    """Fields in the line on states: 1 with rs_seq, 2 with P too."""
    whole_batch: bool = False
    """Whether windows have room for a logical batch, and not for a physical one."""
    one_cache: str = ""
    """What logs the one line of builds with one cache for everything: no windows apart, no latents, no hybrids."""


_NEWEST = Rules()
_B9842 = Rules(recurrent_log=1)
_B8095 = Rules(recurrent_log=0)
_B7347 = _B8095.replace(latent_values=True, hybrid_cells="slots")
_B6431 = _B7347.replace(pad_without_flash=32, slots=1, hybrid_cells="context")
_B6122 = _B6431.replace(flash_by_default=False, name="llama_kv_cache_unified")
_B5590 = _B6122.replace(streams=False)

_B5552 = _B5590.replace(whole_batch=True)
_B4980 = _B5590.replace(one_cache="llama_context")
_B4753 = _B5590.replace(one_cache="llama_init_from_model")

BUILDS: tuple[tuple[int, Rules], ...] = (
    (4753, _B4753), (4980, _B4980),
    (5552, _B5552), (5554, _B5590), (5590, _B5590), (5640, _B5590), (6122, _B6122), (6431, _B6431), (6673, _B6431), (7347, _B7347), (7698, _B7347),
    (8095, _B8095), (8179, _B8095), (8352, _B8095), (8390, _B8095), (9842, _B9842), (10361, _B9842), (NEWEST, _NEWEST),
)  # fmt: skip


def unsure(version: str | None) -> bool:
    """Whether a build lies where windows and latents got caches of their own, in steps that were not measured."""
    return version is not None and 4980 < int(version.removeprefix("b")) < 5552


def rules(version: str | None) -> tuple[Rules, tuple[str, ...]]:
    """The rules of bNNNN, and what to say where they were not measured.

    Raises:
        UsageError: no build number, or one before the first that was measured.

    """
    if version is None:
        return _NEWEST, ()
    named = re.fullmatch(r"b?([0-9]{1,6})", version)
    if named is None:
        raise UsageError(f"--engine: {version[:40]!r} is no build of llama.cpp", hint="for example llama.cpp@b9842")
    build = int(named[1])
    if build < BUILDS[0][0]:
        raise UsageError(
            f"--engine: kvctl knows llama.cpp from build b{BUILDS[0][0]} (February 2025), not b{build}",
            hint="--engine llama.cpp",
        )
    if build > NEWEST:
        return _NEWEST, (f"estimated: build b{build} by the rules of b{NEWEST}, the newest that was measured",)
    before, ours = next(row for row in reversed(BUILDS) if row[0] <= build)
    after, theirs = next((row for row in BUILDS if row[0] >= build), BUILDS[-1])
    if ours is theirs:
        return ours, ()
    return ours, (f"build b{build} by the rules of b{before}; some of them changed by b{after}",)

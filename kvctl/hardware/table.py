"""The bundled table of GPUs, and which of them a name means."""

from __future__ import annotations

import os
import re
from functools import cache
from typing import Any

from kvctl.hardware.device import GpuFacts
from kvctl.units import MIB

# Words that people add or leave out; what is left tells every card of the table apart.
_MAKERS = re.compile("nvidia|geforce|tesla|amd|instinct|radeon|intel|habana|apple|rtx|generation|gpu|pergpu")
_SPELLED = re.compile(r"[A-Za-z0-9 ._/()+-]{1,80}")
_GIGABYTES = re.compile(r"(\d)gi?b")

# importlib.resources would cost more than a look-up.
_PATH = os.path.join(os.path.dirname(os.path.dirname(__file__)), "data", "gpus.json")


def key(name: str) -> str:
    """What two spellings of one name share: no case, blanks, dashes or makers' words ("h100sxm")."""
    letters = re.sub(r"[^a-z0-9]", "", name.lower())
    return _GIGABYTES.sub(r"\1g", _MAKERS.sub("", letters))


@cache
def cards() -> tuple[GpuFacts, ...]:
    """Every row."""
    return tuple(_card(row, _data()["sources"]) for row in _data()["gpus"])


@cache
def _data() -> dict[str, Any]:
    import json

    with open(_PATH, encoding="utf-8") as file:
        data: dict[str, Any] = json.load(file)
    return data


def _card(row: dict[str, Any], legend: dict[str, str]) -> GpuFacts:
    return GpuFacts(
        name=row["name"],
        vendor=row["vendor"],
        nvml_names=tuple(row["nvml"]),
        aliases=tuple(row.get("aliases", ())),
        memory_mib=row.get("mib"),
        nominal_gb=row["gb"],
        bandwidth_gbs=row.get("bw"),
        fp16_tflops=row.get("fp16"),
        fp8_tflops=row.get("fp8"),
        int8_tops=row.get("int8"),
        fp4_tflops=row.get("fp4"),
        fp32_tflops=row.get("fp32"),
        shader_tflops=row.get("shader"),
        compute_capability=row.get("cc"),
        link_gbs=row.get("link"),
        unified=row.get("unified", False),
        metal=row["vendor"] == "Apple",
        memory_options_gb=tuple(row.get("options", ())),
        dies=row.get("dies", 1),
        per_node=row.get("node"),
        cuda_sightings=tuple((mib, legend.get(code, code)) for mib, code in sorted(row.get("cuda", ()))),
        sources=tuple((field, legend[code]) for field, code in row["src"].items()),
        note=row.get("note"),
    )


@cache
def _index() -> dict[str, tuple[GpuFacts, ...]]:
    """Every spelling's key; what several cards share must be listed as generic."""
    index: dict[str, tuple[GpuFacts, ...]] = {}
    for card in cards():
        for name in (card.name, *card.nvml_names, *card.aliases):
            index[key(name)] = (card,)
    by_name = {card.name: card for card in cards()}
    for name, members in _data()["generic"].items():
        index[key(name)] = tuple(by_name[member] for member in members)
    return index


def find(name: str) -> tuple[GpuFacts, ...]:
    """The cards that a name may mean, the likeliest first; none for a name that is not known."""
    return _index().get(key(name), ()) if _SPELLED.fullmatch(name) else ()


def facts_of(nvml_name: str, memory_bytes: int) -> GpuFacts | None:
    """The row of a card that this machine's driver names; of several, the one with the nearest memory."""
    found = find(nvml_name)
    return min(found, key=lambda card: abs(card.device_mib * MIB - memory_bytes), default=None)


def nearest(name: str) -> tuple[str, ...]:
    """Up to three names of the table like this one."""
    import difflib

    spelled = key(name[:80])
    index = _index()
    within = sorted((known for known in index if len(known) > 2 and known in spelled), key=len, reverse=True)
    near = [*within, *difflib.get_close_matches(spelled, index, n=8, cutoff=0.6)]
    near = near or difflib.get_close_matches(spelled, index, n=8, cutoff=0.3)
    return tuple(dict.fromkeys(index[known][0].name for known in near))[:3]

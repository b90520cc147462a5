"""What TAB offers for the values of options."""

from __future__ import annotations

from kvctl.formats import CACHE_FORMATS, MODEL_DTYPES
from kvctl.options import OUTPUT_FORMATS, SOLVES


def complete_dtypes(incomplete: str) -> list[str]:
    """Model dtypes that start so."""
    return [name for name in ("auto", *(d.name for d in MODEL_DTYPES)) if name.startswith(incomplete.lower())]


def complete_cache_formats(incomplete: str) -> list[str]:
    """Cache formats that start so."""
    return [name for name in ("auto", *(f.name for f in CACHE_FORMATS)) if name.startswith(incomplete.lower())]


def complete_techniques(incomplete: str) -> list[str]:
    """Techniques whose last part, behind commas and +, starts so."""
    from kvctl.techniques import PLAIN, TABLE

    cut = max(incomplete.rfind(","), incomplete.rfind("+")) + 1
    names = [kind.name for kind in TABLE] + ([PLAIN.name] if incomplete[cut - 1 : cut] != "+" else [])
    return [incomplete[:cut] + name for name in names if name.startswith(incomplete[cut:].lower())]


def complete_structures(incomplete: str) -> list[str]:
    """Structures whose last one, behind commas, starts so."""
    from kvctl.structure import NAMES

    cut = incomplete.rfind(",") + 1
    return [incomplete[:cut] + name for name in NAMES if name.startswith(incomplete[cut:].lower())]


def complete_output_formats(incomplete: str) -> list[str]:
    """Output formats that start so."""
    return [name for name in OUTPUT_FORMATS if name.startswith(incomplete)]


def complete_engines(incomplete: str) -> list[str]:
    """Engines that start so."""
    from kvctl.engines import ENGINES

    return [name for name in (*(engine.name for engine in ENGINES), "all") if name.startswith(incomplete.lower())]


def complete_sources(incomplete: str) -> list[str]:
    """Sources that start so."""
    from kvctl.sources import SOURCES

    return [name for name in SOURCES if name.startswith(incomplete.lower())]


def complete_solves(incomplete: str) -> list[str]:
    """What --solve takes."""
    return [name for name in SOLVES if name.startswith(incomplete.lower())]


def complete_workloads(incomplete: str) -> list[str]:
    """What --workload takes."""
    from kvctl.traffic import WORKLOADS

    return [name for name in WORKLOADS if name.startswith(incomplete.lower())]


def complete_gpus(incomplete: str) -> list[str]:
    """GPU names of the table that start so, after a count and earlier names; as they are typed (rtx4090, RTX-4090)."""
    import re

    from kvctl.hardware import table

    times = re.match(r"(.*,)?(\d+x)?", incomplete)
    before = times[0] if times is not None else ""
    typed = incomplete[len(before) :]
    names = ["local", "cpu"]
    for card in table.cards():
        names += [card.name.replace(" ", sign) for sign in ("-", "")]
        names += [name.replace(" ", "-") for name in card.aliases]
    names += [name.partition("GeForce")[2].lstrip("-") for name in names if name.startswith("GeForce")]
    # One spelling of a card is enough while none is being typed.
    plain = [name for name in names if typed or "-" in name or name in ("local", "cpu")]
    return [
        before + typed + name[len(typed) :] for name in dict.fromkeys(plain) if name.lower().startswith(typed.lower())
    ]


def complete_models(incomplete: str) -> list[str]:
    """Catalogue names: full ids, and unique short names while no organisation is typed."""
    from kvctl.sources import catalogue

    names = catalogue.names()
    if "/" not in incomplete:
        names += catalogue.short_names()
    return [name for name in names if name.lower().startswith(incomplete.lower())]


def complete_profile_engines(incomplete: str) -> list[str]:
    """Engines that profile runs."""
    return [name for name in ("transformers", "llama.cpp", "vllm") if name.startswith(incomplete.lower())]


def complete_devices(incomplete: str) -> list[str]:
    """Devices of torch."""
    return [name for name in ("auto", "cpu", "cuda:0", "mps") if name.startswith(incomplete.lower())]


def complete_device_maps(incomplete: str) -> list[str]:
    """What --device-map takes."""
    return [name for name in ("auto",) if name.startswith(incomplete.lower())]


def complete_attentions(incomplete: str) -> list[str]:
    """Implementations of attention."""
    return [name for name in ("sdpa", "eager", "flash_attention_2") if name.startswith(incomplete.lower())]


def complete_weights(incomplete: str) -> list[str]:
    """What --weights takes."""
    return [name for name in ("auto", "random") if name.startswith(incomplete.lower())]


def complete_until(incomplete: str) -> list[str]:
    """What --until-oom takes."""
    return [name for name in ("ctx", "batch") if name.startswith(incomplete.lower())]


def complete_weight_formats(incomplete: str) -> list[str]:
    """What quantize makes, after the last comma."""
    from kvctl.weights.ways import TABLE

    before, comma, last = incomplete.rpartition(",")
    return [before + comma + way.name for way in TABLE if way.name.startswith(last.lower())]


def complete_backends(incomplete: str) -> list[str]:
    """Who makes weights."""
    from kvctl.weights.backends.table import BACKENDS

    names = ("kvctl", *(one.name for one in BACKENDS))
    return [name for name in names if name.startswith(incomplete.lower())]


def complete_goals(incomplete: str) -> list[str]:
    """What recommend may aim at."""
    from kvctl.recommend.request import GOALS

    return [name for name in GOALS if name.startswith(incomplete.lower())]


def complete_servers(incomplete: str) -> list[str]:
    """Engines that recommend considers, after the last comma."""
    from kvctl.recommend.request import SERVERS

    before, comma, last = incomplete.rpartition(",")
    names = (*(() if comma else ("any",)), *SERVERS, "ollama")
    return [before + comma + name for name in names if name.startswith(last.lower())]


def complete_emit_kinds(incomplete: str) -> list[str]:
    """What recommend writes, after the last comma."""
    from kvctl.recommend.emit import KINDS

    before, comma, last = incomplete.rpartition(",")
    names = (*(() if comma else ("all",)), *(kind.name for kind in KINDS), "json")
    return [before + comma + name for name in names if name.startswith(last.lower())]

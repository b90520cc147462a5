"""Where nothing fits: the nearest request in each direction that something does.

Each is looked for with the same search that found nothing, and holds what it says: the answer has the candidate that does.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence

from kvctl.engines import ENGINES
from kvctl.errors import KvctlError
from kvctl.hardware import Device, read_gpus, table
from kvctl.hardware.device import GpuFacts
from kvctl.model import build_spec
from kvctl.recommend.candidate import Candidate, Rejection
from kvctl.recommend.fits import Search
from kvctl.recommend.request import MOST_NODES, SERVERS, Ask
from kvctl.recommend.takes import vendor
from kvctl.record import Record
from kvctl.search import last
from kvctl.sources import catalogue
from kvctl.spec import ModelSpec
from kvctl.units import GIB, format_bytes, plural

Allowed = Callable[[Ask, Candidate], bool]
"""What else a candidate of a request has to meet: quality, objectives."""

NODE = 8
"""GPUs that a node has at most, where more are looked for."""
_LARGEST = 6
"""Of a maker's cards that may do: where none of so many of the largest does, none is looked for."""
_PAST = ("gfx906", "gfx908", "gfx1030")
"""AMD's of before CDNA 2 and RDNA 3."""
_CHINA = ("A800 80GB SXM", "H800", "H20")
_STEP = 256
"""Tokens in which shorter requests are looked for: a multiple of every engine's blocks."""
_SIZE = re.compile(r"(?<![A-Za-z0-9.])(\d+(?:\.\d+)?)([BbMm])(-A\d+(?:\.\d+)?[Bb])?(?![A-Za-z0-9])")
"""The size in a model's name: 72B, 0.6B, 235B-A22B."""


class Near(Record):
    """A change with which it fits."""

    direction: str
    """rate, gpus, gpu, host, context, requests, formats, engine or model."""
    words: str
    """What it is, for people."""
    ask: Ask
    """The request with the change."""
    candidate: Candidate
    """What holds it."""


def anything(_: Ask, __: Candidate) -> bool:
    return True


class Lack(Record):
    """What is known of why nothing meets a request; it spares searches that cannot find anything."""

    lossy: Allowed | None = None
    """The same bounds but for quality, where that has one."""
    gpus: int = 0
    """Fewer GPUs than these are surely too few."""
    slow: bool = False
    """Whether it is speed that is short, not memory: cards that are no faster are none to look at."""


def nearest(ask: Ask, allowed: Allowed = anything, lack: Lack | None = None) -> tuple[Near, ...]:
    """The nearest requests that something fits, one for each direction that has one."""
    lack = lack or Lack()
    found = (
        formats(ask, lack.lossy), engines(ask, allowed), more_gpus(ask, allowed, lack.gpus), larger_gpu(ask, allowed, slow=lack.slow),
        None if lack.slow else host_memory(ask, allowed),
        shorter(ask, allowed), fewer(ask, allowed), smaller_model(ask, allowed),
    )  # fmt: skip
    return tuple(near for near in found if near is not None)


def holding(ask: Ask, allowed: Allowed = anything) -> Candidate | None:
    """The first candidate that holds all that is asked for."""
    return next((one for one in Search(ask, widest=True).walk() if not one.queues and allowed(ask, one)), None)


def formats(ask: Ask, lossy: Allowed | None) -> Near | None:
    """Other formats of weights and of the cache, where a bound on quality rules these out; the least change is the first.

    `lossy` are all other bounds; None: the search has tried all formats.
    """
    found = holding(ask, lossy) if lossy is not None else None
    if found is None:
        return None
    deployment = found.deployment
    cache = "" if deployment.kv_dtype == "auto" else f", a cache in {deployment.kv_dtype}"
    words = f"weights in {deployment.weights}{cache}, with what that costs"
    return Near("formats", words, ask, found)


def engines(ask: Ask, allowed: Allowed = anything) -> Near | None:
    """Another engine, where some are left out."""
    names = {engine.name for engine in ask.engines}
    others = tuple(engine for name in SERVERS for engine in ENGINES if engine.name == name and name not in names)
    changed = ask.replace(engines=others)
    found = holding(changed, allowed) if others else None
    return Near("engine", f"--engine {found.deployment.engine.name}", changed, found) if found is not None else None


def more_gpus(ask: Ask, allowed: Allowed = anything, least: int = 0) -> Near | None:
    """The fewest GPUs of the same kind: in the node first, then more nodes of as many; fewer than `least` are not tried."""
    if not ask.gpus or ask.device.unified:
        return None
    for changed in _larger(ask):
        found = holding(changed, allowed) if changed.all_gpus >= least else None
        if found is not None:
            nodes = f" in each of {changed.nodes} nodes" if changed.nodes > 1 else ""
            return Near("gpus", f"{plural(changed.gpus, 'GPU')}{nodes}: {ask.device.name}", changed, found)
    return None


def _larger(ask: Ask) -> Iterator[Ask]:
    node = min(NODE, (ask.device.facts and ask.device.facts.per_node) or NODE)
    if ask.nodes == 1:
        yield from (ask.replace(gpus=count) for count in range(ask.gpus + 1, node + 1))
    gpus = max(ask.gpus, node)
    nodes = max(ask.nodes, 1)
    for count in (nodes + 1, nodes + 2, 2 * nodes + 2, 4 * nodes + 4):
        if count <= MOST_NODES:
            yield ask.replace(gpus=gpus, nodes=count)


def host_memory(ask: Ask, allowed: Allowed = anything) -> Near | None:
    """The least of the host's memory, in powers of two, that what GPUs do not hold of the weights may stay in."""
    if not ask.gpus or ask.host is not None or ask.device.unified:
        return None
    for size in (16, 32, 64, 128, 256, 512):
        changed = ask.replace(host=size * GIB)
        found = holding(changed, allowed)
        if found is not None:
            return Near("host", f"--host-memory {size}GiB, which is slow", changed, found)
    return None


def larger_gpu(ask: Ask, allowed: Allowed = anything, *, slow: bool = False) -> Near | None:
    """As many GPUs of another kind: the nearest card of the table that holds it, of the same maker where one does.

    Nearest is that with the least memory, by its maker's count; of those the one with the least bandwidth, and then with the least
    arithmetic. Where none of a maker's largest holds it, its others are not tried.
    """
    if not ask.gpus:
        return None
    own = vendor(ask.device)
    for makers in (True, False):
        devices = [device for device in others(ask.device, ask.gpus, slow=slow) if (vendor(device) == own) is makers]
        found = {
            device.name: candidate
            for device in devices[-_LARGEST:]
            if (candidate := holding(ask.replace(device=device), allowed)) is not None
        }
        for device in devices if found else ():
            changed = ask.replace(device=device)
            tried = device in devices[-_LARGEST:]
            candidate = found.get(device.name) if tried else holding(changed, allowed)
            if candidate is not None:
                what = f"{plural(ask.all_gpus, 'GPU')} with {format_bytes(device.cuda_bytes)}{' each' if ask.all_gpus > 1 else ''}: {device.name}"
                return Near("gpu", what, changed, candidate)
    return None


def others(device: Device, gpus: int = 1, *, slow: bool) -> list[Device]:
    """Cards that may do what a device does not, the nearest first: those with as much memory; `slow`: those that are faster in anything.

    Of those alone of which a machine has `gpus`.
    """
    own, apple = device.facts, vendor(device) == "Apple"
    cards = [card for card in table.cards() if _sold(card) and gpus <= (card.per_node or gpus)
             and not apple and (own is None or card.name != own.name)]  # fmt: skip
    found = []
    for card in sorted(cards, key=lambda card: (card.nominal_gb, *(rate or 0.0 for rate in _rates(card)), card.name)):
        if slow and (
            own is None or not any((new or 0) > (old or 0) for new, old in zip(_rates(card), _rates(own), strict=True))
        ):
            continue
        (other,) = read_gpus(card.name)
        if slow or other.cuda_bytes > device.available_bytes or (own is not None and card.nominal_gb >= own.nominal_gb):
            found.append(other.replace(notes=()))
    return found


def _rates(card: GpuFacts) -> tuple[float | None, ...]:
    return card.bandwidth_gbs, card.fp16_tflops, card.fp8_tflops, card.int8_tops, card.fp4_tflops


def _sold(card: GpuFacts) -> bool:
    """Whether it is a card of its own that is made or rented out widely: none of before 2020, and none that is made for China alone."""
    has = card.cuda_capability
    old = card.compute_capability in _PAST if has is None else has < 8.0
    return not (old or card.unified or card.dies > 1 or card.name in _CHINA)


def shorter(ask: Ask, allowed: Allowed = anything) -> Near | None:
    """The longest request, in steps of 256 tokens, of which as many fit as are asked for."""

    def at(context: int) -> Ask:
        prompt = min(ask.prompt, max(1, context * ask.prompt // (ask.prompt + ask.answer)))
        answer = max(1, min(ask.answer, context - prompt))
        return ask.replace(context=context, prompt=min(prompt, context - answer), answer=answer)

    if ask.context <= _STEP:
        return None
    best, least, most = None, 0, -(-ask.context // _STEP)
    for candidate in Search(at(_STEP), widest=True).walk():
        if candidate.queues or not allowed(at(_STEP), candidate):
            continue

        def holds(steps: int, candidate: Candidate = candidate) -> bool:
            return _again(at(steps * _STEP), candidate, allowed) is not None

        if not holds(least + 1):
            continue
        least = last(holds, least + 1, most)
        best = _again(at(least * _STEP), candidate, allowed)
    if best is None:
        return None
    return Near("context", f"--ctx {least * _STEP}", at(least * _STEP), best)


def _again(ask: Ask, candidate: Candidate, allowed: Allowed) -> Candidate | None:
    """A candidate for another request, where it holds that too."""
    found = Search(ask).again(candidate)
    return None if isinstance(found, Rejection) or found.queues or not allowed(ask, found) else found


def fewer(ask: Ask, allowed: Allowed = anything) -> Near | None:
    """The most requests at once that fit."""
    if ask.concurrency is None or ask.concurrency < 2:
        return None
    best, least = None, 0
    for candidate in Search(ask.replace(concurrency=1)).walk():
        for count in _replicas(ask, candidate):
            tried = candidate.replace(deployment=candidate.deployment.replace(replicas=count))

            def holds(requests: int, tried: Candidate = tried) -> bool:
                return _again(ask.replace(concurrency=requests), tried, allowed) is not None

            if holds(least + 1):
                least = last(holds, least + 1, ask.concurrency)
                best = _again(ask.replace(concurrency=least), tried, allowed)
    if best is None:
        return None
    return Near("requests", f"--concurrency {least}", ask.replace(concurrency=least), best)


def _replicas(ask: Ask, candidate: Candidate) -> Sequence[int]:
    """As many as there are GPUs for."""
    from kvctl.recommend.space import replicas

    return replicas(candidate.split, ask)[-1:]


def smaller_model(ask: Ask, allowed: Allowed = anything) -> Near | None:
    """The largest model of the same family, by name and maker in the catalogue, that fits."""
    for spec in siblings(ask.spec):
        context = min(ask.context, spec.max_context or ask.context)
        if context < ask.context:
            continue
        changed = ask.replace(spec=spec)
        found = holding(changed, allowed)
        if found is not None:
            return Near("model", spec.id, changed, found)
    return None


def siblings(spec: ModelSpec) -> Iterator[ModelSpec]:
    """Smaller models whose names differ in the size alone, the largest first."""
    family = _family(spec.id)
    own = spec.weights.parameters if spec.weights is not None else None
    if family is None:
        return
    sizes = sorted((-size, name) for name in catalogue.names() if (other := _family(name)) is not None
                   for size in [other[1]] if other[0] == family[0] and size < family[1])  # fmt: skip
    for _, name in sizes:
        try:
            found = build_spec(catalogue.find(name))
        except KvctlError:
            continue
        if own is None or found.weights is None or (found.weights.parameters or 0) < own:
            yield found


def _family(name: str) -> tuple[str, float] | None:
    """A name with its size taken out, and the size."""
    match = _SIZE.search(name)
    if match is None:
        return None
    scale = 1e9 if match[2] in "Bb" else 1e6
    return (name[: match.start()] + "*" + name[match.end() :]).lower(), float(match[1]) * scale

"""The two phases as bytes and operations, and as seconds.

A phase is counted first (`Demand`: seconds that hardware at its best would take, and how often something is launched or
exchanged), and then priced with `Efficiency`: which part of the best an engine reaches. Counting needs no fit; pricing is a few
sums and products, so that the fit can price thousands of measurements at once with arrays in place of numbers.
"""

from __future__ import annotations

import math
from typing import Any

from kvctl.record import Record
from kvctl.speed.machine import Format, Peaks
from kvctl.speed.work import Work

SHARP = 3
"""How sharply the longer of two times that overlap wins: 1 adds them, infinity takes the longer. Assumed, and absorbed by the fit."""


class Layout(Record):
    """A model on ranks."""

    work: Work
    fmt: Format
    peaks: Peaks
    tensor: int = 1
    pipeline: int = 1
    data: int = 1
    """Groups of ranks that attend for requests of their own and share the experts."""
    expert: bool = False
    """Whether experts lie whole on the ranks."""
    node: int = 8
    """GPUs that a node joins by its own links."""
    network: float = 0.0
    """Bytes a second of one GPU to another node."""
    context_parallel: int = 1
    """Ranks that divide the cache of a request among themselves while decoding."""

    @property
    def spread(self) -> int:
        """Ranks that the experts of a stage lie on."""
        return self.tensor * self.data

    @property
    def bytes_of(self) -> tuple[float, float, float]:
        """Bytes of a weight of a layer, of an expert, and of the output's projection."""
        size = self.fmt.bits / 8
        dense = 2.0 if self.fmt.name in ("mxfp4",) and self.work.experts else size  # gpt-oss: the experts alone
        return dense, size, size if self.fmt.whole else 2.0

    @property
    def wire(self) -> tuple[float, str]:
        """Bytes a second between tensor ranks, and over what."""
        if self.tensor > self.node and self.network:
            return self.network, "network"
        return self.peaks.link, self.peaks.wired


class Demand(Record):
    """A phase, as it would be on hardware at its best; seconds, and counts."""

    weights: Any
    """Reading weights."""
    operations: Any
    """Multiplying them."""
    cache: Any
    """Reading keys, values and states."""
    attention: Any
    """Multiplying those."""
    wire: Any
    """Moving activations between tensor ranks."""
    exchanges: Any
    """How often ranks wait for each other."""
    layers: Any
    """How many layers are launched, of all stages."""
    expert_layers: Any
    passes: Any
    """How often the model is run."""
    sequences: Any
    """Sequences that are sampled and scheduled."""
    tokens: Any
    """Tokens in one pass on one rank, of which the last alone goes through the head: as many as make the operations."""


FIELDS = Demand._fields


class Efficiency(Record):
    """Shares of the best (below 1), and times that hardware has no figure for (seconds)."""

    memory: Any
    prefill: Any
    decode: Any
    """Operations while decoding, of `prefill`."""
    cache: Any
    attention: Any
    link: Any
    exchange: Any
    layer: Any
    expert_layer: Any
    step: Any
    sequence: Any
    half: Any
    """Tokens in a pass that reach half of `prefill`."""
    first: Any
    """Before a prompt is begun and after its token is made."""
    wait: Any
    """How long a prompt waits for others, in prompts, for each request in service."""
    mix: Any
    """Share of other requests' prompts that a decoding request waits for."""
    busy: Any
    """Share of the rate at which nothing is idle that a server full of requests reaches."""


def step(layout: Layout, batch: float, length: float) -> Demand:
    """One decoded token of each of `batch` requests with `length` tokens in the cache."""
    work, peaks, ranks = layout.work, layout.peaks, layout.tensor
    dense, each, head = layout.bytes_of
    mine = batch / layout.data / layout.pipeline  # stages work on parts of the batch at once
    alone = max(mine, 1.0)
    stage_tokens = max(batch / layout.pipeline, 1.0)
    touched = work.touched(stage_tokens)
    read = (work.dense * dense + work.head * head) / ranks + touched * work.expert * each / layout.spread
    multiplied = (
        2 * alone * (work.dense + work.head) / ranks + 2 * stage_tokens * work.chosen * work.expert / layout.spread
    )
    cached = compared = 0.0
    for group in work.attends:
        seen = group.seen(max(int(length), 1))
        share = min(ranks, group.heads * layout.context_parallel)
        cached += alone * group.layers * group.row * seen / share
        compared += alone * group.layers * group.step * seen / ranks
    states = 2 * alone * work.state / ranks  # read and written
    wire, exchanges = (one + more for one, more in zip(_wire(layout, alone), _dealt(layout, alone), strict=True))
    return Demand(
        read / peaks.bandwidth, multiplied / peaks.flops, (cached + states) / peaks.bandwidth, compared / peaks.flops16, wire, exchanges,
        work.layers, work.expert_layers, layout.pipeline, alone, alone,
    )  # fmt: skip


def prompt(
    layout: Layout,
    tokens: float,
    count: float = 1.0,
    chunk: float = 8192.0,
    *,
    before: float = 0.0,
    pipelined: bool = False,
) -> Demand:
    """Computing `count` prompts of `tokens`, in passes of at most `chunk` tokens, on one group of ranks.

    `before`: tokens of each that are in the cache already; `pipelined`: whether stages work on passes of their own.
    """
    work, peaks, ranks = layout.work, layout.peaks, layout.tensor
    dense, each, head = layout.bytes_of
    total = max(tokens * count, 1.0)
    passes = math.ceil(total / chunk)
    in_pass = total / passes
    read = passes * (
        (work.dense * dense + work.head * head) / ranks + work.touched(in_pass) * work.expert * each / layout.spread
    )
    # Groups that share the experts compute prompts at the same time: each has its own ranks' part of the operations.
    body, head_alone = 2 * total * (work.dense + work.chosen * work.expert) / ranks, 2 * count * work.head / ranks
    multiplied = body + head_alone
    compared = cached = 0.0
    for group in work.attends:
        far = float(group.limit or 0) or before + tokens
        pairs = _pairs(before + tokens, far) - _pairs(before, far)
        compared += count * group.layers * group.pair * pairs / ranks
        cached += passes * group.layers * group.row * min(before + tokens, far) / min(ranks, group.heads)
    wire, exchanges = _wire(layout, in_pass)
    overlap = 1.0
    if layout.pipeline > 1 and pipelined and passes > 1:
        overlap = layout.pipeline * passes / (layout.pipeline + passes - 1)
    found = Demand(
        read / peaks.bandwidth, multiplied / peaks.flops, cached / peaks.bandwidth, compared / peaks.flops16, passes * wire, passes * exchanges,
        passes * work.layers, passes * work.expert_layers, passes, count, in_pass * multiplied / body,
    )  # fmt: skip
    if overlap == 1.0:
        return found
    shared = ("weights", "operations", "cache", "attention", "wire", "exchanges", "layers", "expert_layers")
    return found.replace(**{name: getattr(found, name) / overlap for name in shared})


def _pairs(tokens: float, far: float) -> float:
    """Pairs of a token and one that it looks back at, in a text of so many tokens, each as far back as `far`."""
    return tokens * tokens / 2 if far >= tokens else far * far / 2 + (tokens - far) * far


def _wire(layout: Layout, tokens: float) -> tuple[float, float]:
    """Seconds that activations of one pass take at best, and how often ranks wait for each other."""
    work, ranks = layout.work, layout.tensor
    seconds = waits = 0.0
    bandwidth, _ = layout.wire
    if ranks > 1:
        sums = 2 * work.layers  # after attention and after the feed-forward part
        moved = 2 * (ranks - 1) / ranks * tokens * work.hidden * 2
        seconds += sums * moved / bandwidth if bandwidth else 0.0
        waits += sums * (1 + math.log2(ranks)) / 2
    if layout.data > 1:
        moved = 2 * tokens * work.hidden * 2 * min(work.chosen, layout.data)
        seconds += work.expert_layers * moved / bandwidth if bandwidth else 0.0
        waits += 2 * work.expert_layers * (1 + math.log2(layout.data)) / 2
    waits += layout.pipeline - 1
    return seconds, waits


def _dealt(layout: Layout, tokens: float) -> tuple[float, float]:
    """The same of decoded tokens whose keys are dealt out: in each layer that attends, ranks gather the queries, and the sums and
    outputs of all (vLLM's query_gather and cp_lse_ag_out_rs; SGLang's layers/dcp).
    """
    work, ranks = layout.work, layout.context_parallel
    if ranks == 1:
        return 0.0, 0.0
    # An operation of a step is half a multiplication with a number of a query or of an output, each of 2 bytes.
    moved = sum(group.layers * group.step for group in work.attends) * tokens * (ranks - 1) / layout.tensor
    layers = sum(group.layers for group in work.attends)
    bandwidth, _ = layout.wire
    return moved / bandwidth if bandwidth else 0.0, 3 * layers * (1 + math.log2(ranks)) / 2


# -- seconds: of numbers, or of arrays ------------------------------------------------------------------


def step_seconds(d: Demand, e: Efficiency) -> Any:
    """Of one decoded token."""
    linear = _longer(d.weights / e.memory, d.operations / (e.prefill * e.decode))
    attended = d.cache / e.cache + d.attention / e.attention
    return linear + attended + d.wire / e.link + d.exchanges * e.exchange + _launched(d, e)


def prompt_seconds(d: Demand, e: Efficiency) -> Any:
    """Of prompts that run at once."""
    multiplied = d.operations / e.prefill * (1 + e.half / d.tokens)
    linear = _longer(d.weights / e.memory, multiplied)
    attended = d.attention / e.attention
    return linear + attended + d.wire / e.link + d.exchanges * e.exchange + _launched(d, e)


def _longer(one: Any, other: Any) -> Any:
    return (one**SHARP + other**SHARP) ** (1 / SHARP)


def _launched(d: Demand, e: Efficiency) -> Any:
    return d.layers * e.layer + d.expert_layers * e.expert_layer + d.passes * e.step + d.sequences * e.sequence

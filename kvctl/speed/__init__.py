"""How fast a model runs on GPUs: a roofline for each phase, efficiencies fitted on published measurements, a queue on top.

`prepare` takes what does not depend on the load, `at` gives figures for one load. Every figure is a range: `low` and `high`
hold nine of ten measurements that were kept from the fit, `mid` is the likeliest.
"""

from __future__ import annotations

from kvctl.record import Record


class Range(Record):
    """A figure and what it lies between, nine times of ten."""

    low: float
    mid: float
    high: float


class Speed(Record):
    """One load's figures."""

    ttft: Range
    """Seconds to the first token, waiting in the queue included."""
    tpot: Range
    """Seconds between tokens of one request."""
    output_rate: Range
    """Output tokens a second, of all requests of all replicas."""
    request_rate: Range
    """Requests a second, of all replicas."""
    concurrency: int
    """Requests in service at once that these figures are for, of all replicas."""
    prefill_bound: str
    """What binds a prompt: compute, attention, memory, communication."""
    decode_bound: str
    """What binds a step: weights, cache, compute, communication, overhead."""
    validated: str
    """What the figures were compared with ("vllm on H100 SXM: 57 measurements, …"); empty is unvalidated."""
    assumption: str
    """The assumption that these figures hang on most."""

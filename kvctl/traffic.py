"""A trace or a kind of workload, replayed in the memory that a result leaves for the cache."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from kvctl.errors import KvctlError, SourceError, UsageError
from kvctl.record import Record
from kvctl.replay import PRESETS, Request, Setup, preset, read_trace, replay
from kvctl.reports import SizeReport, SizeResult
from kvctl.solve import NoAnswer

if TYPE_CHECKING:
    from kvctl.ask import Plans

WORKLOADS = tuple(PRESETS)
_GROWING = ("full_attention", "latent_attention", "indexer")
"""Kinds of state that take a row for every token."""
_SLOWLY = "compressed_attention"
"""One that takes a row for several tokens: part of the bytes a token, and of no block of its own."""
_LARGEST_TOKENIZER = 256 * 2**20
"""Bytes of a tokenizer.json; those of 260,000 words have 35 MiB."""
_USUAL_BLOCK = 16
"""Tokens of a block where an engine has none: vLLM's."""


class Traffic(Record):
    """What is replayed, and how fast it is served."""

    trace: str | None = None
    """A file, - for stdin."""
    tokenizer: str | None = None
    """A tokenizer.json, for traces of messages."""
    workload: str | None = None
    requests: int = 10_000
    rate: float = 2.0
    """Requests a second of a workload."""
    in_flight: int | None = None
    tpot: int | None = None
    """Microseconds between tokens of a request."""
    prefill_rate: int | None = None
    """Prompt tokens a second."""


def replayed(
    report: SizeReport, plans: Plans, traffic: Traffic, progress: Callable[[int], None] | None = None
) -> SizeReport:
    """The report with a replay in its one result, whose context is the longest that a request may have.

    Raises:
        SourceError: a trace that cannot be read.
        UsageError: several results, or no cache that grows.

    """
    if len(report.results) > 1:
        raise UsageError(
            "a replay is for one model, context, format and engine",
            hint="--engine vllm" if plans.comparing else "--ctx 32k",
        )
    (result,) = report.results
    block, size, capacity, notes = _pool(result)
    if traffic.workload is not None:
        mix = PRESETS[traffic.workload]
        notes.insert(0, f"{mix.name}: {mix.source}; assumed: {mix.assumed}")
    setup = Setup(
        block_size=block,
        capacity_blocks=capacity,
        bytes_per_block=size,
        max_length=result.context,
        max_sequences=plans.each[0].serving.max_sequences,
        concurrency=traffic.in_flight,
        **{name: value for name in ("tpot", "prefill_rate") if (value := getattr(traffic, name)) is not None},
    )
    found = replay(requests_of(traffic), setup, progress)
    return report.replace(results=(result.replace(replay=found.replace(notes=(*notes, *found.notes))),))


def requests_of(traffic: Traffic) -> Iterator[Request]:
    """Its requests, one after another.

    Raises:
        SourceError: a trace that cannot be read.

    """
    if traffic.trace is not None:
        return read_trace(traffic.trace, _tokenizer(traffic.tokenizer))
    assert traffic.workload is not None
    return preset(traffic.workload, traffic.requests, traffic.rate)


def _tokenizer(path: str | None) -> Callable[[str], list[int]] | None:
    """What a tokenizer.json makes of a text."""
    if path is None:
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise UsageError("--tokenizer needs the package tokenizers", hint="pip install 'kvctl[trace]'") from None
    hint = "a file tokenizer.json, as models have it"
    try:
        if not os.path.isfile(path):  # a device or a pipe would be read to its end, or for ever
            raise SourceError(f"{path[:200]}: no such file", hint=hint)
        if os.path.getsize(path) > _LARGEST_TOKENIZER:
            raise SourceError(f"{path[:200]}: larger than {_LARGEST_TOKENIZER >> 20} MiB, no tokenizer", hint=hint)
        read = Tokenizer.from_file(path)
    except (KvctlError, KeyboardInterrupt):
        raise
    except BaseException as error:  # it raises nothing more particular, and panics are no Exception
        raise SourceError(f"{path[:200]}: no tokenizer: {error}", hint=hint) from None

    def tokens(text: str) -> list[int]:
        found: list[int] = read.encode(text, add_special_tokens=False).ids
        return found

    return tokens


def _pool(result: SizeResult) -> tuple[int, int, int | None, list[str]]:
    """Tokens of a block, its bytes on one rank, and how many there are."""
    plan, notes = result.allocation, []
    budget = result.fit.kv_budget_bytes if result.fit is not None else None
    if budget == 0 or result.beyond_device:
        raise NoAnswer(
            "there is no memory for the cache to replay in", hint="see the fit without --trace and --workload"
        )
    fixed = [row for row in result.layers if row.kind not in (*_GROWING, _SLOWLY) and row.bytes]
    if fixed:
        kinds = ", ".join(dict.fromkeys(row.kind.replace("_", " ") for row in fixed))
        notes.append(f"estimated: {kinds} take memory that does not grow with a request; the replay leaves it out")
    if plan is not None and plan.blocks_are_alike and plan.block_size:
        # A request draws a block for every group that keeps all tokens.
        growing = sum(group.kind in _GROWING for group in plan.groups)
        if growing:
            capacity = None
            if plan.num_blocks is not None:
                spare = 1 if result.engine == "vllm" else 0  # one block is always set aside
                capacity = (plan.num_blocks - spare) // growing
            return plan.block_size, plan.bytes_per_block * growing, capacity, notes
    rate = result.kv_bytes_per_token
    if not rate:
        raise UsageError("nothing of this model's cache grows with its requests: there is nothing to replay",
                         hint="its size is the same for every request: leave --trace and --workload out")  # fmt: skip
    ranks = len(result.fit.ranks) if result.fit is not None and plan is None else 1
    block = plan.block_size if plan is not None and plan.block_size else _USUAL_BLOCK
    if plan is None or not plan.block_size:
        notes.append(f"{result.engine} has no blocks of its own: {block} tokens, as vLLM has them")
    size = -(-rate * block // ranks)
    if plan is not None and plan.capacity_tokens is not None:
        return block, size, plan.capacity_tokens // block, notes
    return block, size, budget // size if budget is not None else None, notes

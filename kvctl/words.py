"""Words that the screen, Markdown and errors share."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.allocation import Allocation
from kvctl.reports import Fit, SizeResult, WeightsInfo
from kvctl.units import format_bytes, format_count, plural

if TYPE_CHECKING:
    from kvctl.replay import Replay
    from kvctl.startlog import LogReport


def one_line(text: str) -> str:
    """Text from outside as one line without control characters: nothing may steer the terminal."""
    return " ".join("".join(char if char.isprintable() else " " for char in text).split(" ")).strip()


def shortened(text: str, length: int) -> str:
    """A long name without its middle: both ends tell models apart."""
    if len(text) <= length:
        return text
    tail = (length - 1) // 2
    return text[: length - 1 - tail] + "…" + text[len(text) - tail :]


def unicode_output() -> bool:
    """Whether stdout can show any character."""
    return "utf" in (getattr(sys.stdout, "encoding", None) or "").lower()


def listing_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One catalogue row for people."""
    parameters, context = row.get("parameters"), row.get("max_context")
    return (
        str(row["id"]),
        str(row.get("model_type") or ""),
        format_count(parameters) if parameters else "",
        f"{context:,}" if context else "",
    )


_HOLDS = {"compressed_attention": "entries", "cross_attention": "positions"}


def kind_words(kind: str) -> str:
    """sliding_window as "sliding window"."""
    return kind.replace("_", " ")


def held_words(kind: str, tokens: int) -> str:
    """What a kind of state holds for one sequence."""
    if kind == "none":
        return "nothing"
    if kind == "shared":
        return "another layer's cache"
    if not tokens:
        return "fixed size" if kind.endswith("_state") else "nothing yet"
    return f"{tokens:,} {_HOLDS.get(kind, 'tokens')}"


def what_if_words(result: SizeResult) -> str:
    """ " with num_key_value_heads = 64", for tables that have no line for it."""
    changes = ", ".join(f"{key} = {value!r}" for key, value in result.model.overrides.items())
    structure = f" if {result.what_if}" if result.what_if is not None else ""
    return (" " + one_line(f"with {changes}") if changes else "") + structure


def beside_own_words(result: SizeResult, own: SizeResult | None) -> str:
    """ "4.00x smaller" than with the model's own structure, in what the architecture needs."""
    if own is None or result.what_if is None:
        return ""
    here, there = result.kv_bytes, own.kv_bytes
    if here == there or not here or not there:
        return "the same" if here == there else ""
    return f"{there / here:,.2f}x smaller" if here < there else f"{here / there:,.2f}x larger"


def of_own_structure(results: Sequence[SizeResult]) -> Callable[[SizeResult], SizeResult | None]:
    """What finds the same question about a model's own structure."""

    def key(result: SizeResult) -> tuple[object, ...]:
        work = result.context, result.sequences, result.beams
        return result.model.id, result.model.location, result.engine, *work, format_words(result)

    own = {key(result): result for result in results if result.what_if is None}
    return lambda result: own.get(key(result))


def copies_words(result: SizeResult) -> str:
    """ "3 sequences × 4 beams"."""
    beams = f" × {plural(result.beams, 'beam')}" if result.beams > 1 else ""
    return plural(result.sequences, "sequence") + beams


def title_words(result: SizeResult) -> str:
    """The question in one line."""
    extra = "".join(
        f" + {count:,} {what}"
        for count, what in ((result.image_tokens, "image positions"), (result.audio_tokens, "audio positions"))
        if count
    )
    structure = f", if {result.what_if}" if result.what_if is not None else ""
    return one_line(f"{result.model.id}{structure}: {result.context:,} tokens{extra} × {copies_words(result)}")


def device_words(fit: Fit) -> str:
    """ "4 × NVIDIA H100 80GB HBM3"."""
    counts: dict[str, int] = {}
    for name in fit.devices:
        counts[name] = counts.get(name, 0) + 1
    return " + ".join(f"{count} × {name}" if len(fit.devices) > 1 else name for name, count in counts.items())


def signed_bytes(count: int) -> str:
    """−1.50 GiB for what is missing."""
    return format_bytes(count) if count >= 0 else f"−{format_bytes(-count)}"


def fit_cells(result: SizeResult) -> tuple[str, str, str, str]:
    """Fits, headroom, longest context and requests at once."""
    fit = result.fit
    if fit is None:
        return "", "", "", ""
    longest = "any" if fit.max_context is None else f"{fit.max_context:,}"
    fits = ("barely" if fit.close else "yes") if fit.fits else "no"
    return fits, signed_bytes(fit.headroom_bytes), longest, f"{fit.max_concurrency:,}"


def gpu_cells(row: dict[str, Any]) -> tuple[str, ...]:
    """One row of the GPU table for people."""
    memory, rate, dense = row["memory_mib"], row["bandwidth_gbs"], row["fp16_tflops"]
    return (
        row["name"],
        f"{memory:,} MiB" if memory else f"{row['nominal_gb']} GB",
        f"{rate:,g} GB/s" if rate else "",
        f"{dense:,g} TFLOPS" if dense else "",
        ", ".join(row["nvml_names"]),
    )


def log_verdict(report: LogReport) -> str:
    """Whether a log agrees with kvctl, in a line."""
    if report.refused is not None:
        return "the engine did not start"
    differs = [row for row in report.rows if row.agrees is False]
    same = sum(row.agrees is True for row in report.rows)
    if report.agrees is None:
        return "the log says nothing that kvctl works out exactly"
    if not differs:
        return f"agrees: {plural(same, 'number')} of the log, as exactly as it prints them"
    unknown = len(report.unexplained)
    return (f"{plural(len(differs), 'number')} of {len(differs) + same} differ: "
            + ("all accounted for" if not unknown else f"{unknown} not explained"))  # fmt: skip


def verdict_words(result: SizeResult) -> str:
    """Fits or not, and by how much."""
    fit = result.fit
    assert fit is not None
    alike = len({rank.headroom_bytes for rank in fit.ranks}) == 1
    rank = (
        ""
        if len(fit.ranks) == 1
        else f" on each of {len(fit.ranks)} ranks"
        if alike
        else f" on rank {fit.bottleneck_rank}"
    )
    about = "about " if fit.estimated else ""
    if fit.fits and result.model.source == "shape":
        return f"the cache alone fits: {format_bytes(fit.headroom_bytes)} left{rank}, and a shape has no weights"
    if fit.fits:
        barely = ", less than its estimates may be off by" if fit.close else ""
        return f"fits{', barely' if fit.close else ''}: {about}{format_bytes(fit.headroom_bytes)} of headroom{rank}{barely}"
    short = f", {format_bytes(-fit.headroom_bytes)} short{rank}" if fit.headroom_bytes < 0 else ""
    barely = "; estimates may be off by more" if fit.close else ""
    return f"does not fit{short}: {fit.why}{barely}"


def share_words(part: int, whole: int) -> str:
    """Percent: 100% only for all of it, 0% only for nothing."""
    if not part or not whole:
        return "0%"
    if part == whole:
        return "100%"
    percent = 100 * part / whole
    if percent > 100:
        return f"{percent:,.0f}%"
    if percent >= 99.95:
        return ">99.9%"
    if percent < 0.05:
        return "<0.1%"
    return f"{percent:.0f}%" if 9.95 <= percent < 99 else f"{percent:.1f}%"


def replay_verdict(found: Replay) -> tuple[str, bool]:
    """What blocks with shared prefixes make of the traffic, in a line, and whether nothing had to give way."""
    last = found.policies[-1]
    much = f"{plural(found.requests, 'request')}: at most {format_bytes(last.peak_held_bytes)}"
    if found.setup.capacity_blocks is not None:
        much += f" of {format_bytes(found.setup.capacity_blocks * found.setup.bytes_per_block)}"
    trouble = []
    if last.rejected:
        trouble.append(f"{last.rejected:,} refused as too long")
    if last.preemptions:
        trouble.append(f"{plural(last.preemptions, 'preemption')}")
    if last.waiting_area:
        trouble.append(f"{last.mean_queue:,.1f} waiting on average")
    return f"{much} in blocks with shared prefixes; " + (
        ", ".join(trouble) or "nothing waited or gave way"
    ), not trouble


def replay_words(found: Replay) -> list[str]:
    """What a replay took for granted."""
    setup = found.setup
    pool = (
        "without limit" if setup.capacity_blocks is None else f"of {setup.capacity_blocks * setup.block_size:,} tokens"
    )
    lines = [f"a pool {pool} on each rank in blocks of {plural(setup.block_size, 'token')}, {setup.bytes_per_block:,} bytes each; "
             f"contiguous: {setup.max_length:,} tokens reserved for each request, or what it says it may take"]  # fmt: skip
    speed = f"{setup.tpot / 1000:g} ms a token and {setup.prefill_rate:,} prompt tokens a second"
    lines.append(f"{'assumed' if found.assumed else 'as given'}: {speed}"
                 + ("; --tpot and --prefill-rate set them" if found.assumed else ""))  # fmt: skip
    if setup.concurrency is not None:
        lines.append(f"{plural(setup.concurrency, 'request')} in flight, whenever they came")
    return [*lines, *found.notes]


def format_words(result: SizeResult) -> str:
    """bf16, or K q8_0, V q4_0; the name of a technique."""
    if result.technique is not None:
        return result.technique
    if result.k_dtype == result.v_dtype:
        return result.k_dtype
    return f"K {result.k_dtype}, V {result.v_dtype}"


def scheme_words(result: SizeResult) -> str:
    """How the formats count, where that is more than a plain element."""
    parts = [
        (letter, name, scheme)
        for letter, name, scheme in (("K", result.k_dtype, result.k_scheme), ("V", result.v_dtype, result.v_scheme))
        if not scheme.endswith("bytes an element")
    ]
    if len(parts) == 2 and parts[0][1] == parts[1][1]:
        return f"{parts[0][1]}: {parts[0][2]}"
    return "; ".join(f"{letter} {name}: {scheme}" for letter, name, scheme in parts)


def reserved_words(result: SizeResult) -> str:
    """What the engine reserves: "4 × 2.50 GiB" for ranks that each hold so much."""
    plan = result.allocation
    if plan is None:
        return ""
    ranks = f"{len(plan.per_rank)} × " if len(plan.per_rank) > 1 else ""
    return ranks + format_bytes(plan.reserved_bytes)


def capacity_words(plan: Allocation | None) -> str:
    """What a budget holds: tokens of a pool, or the longest context of an engine that allocates for one."""
    if plan is None or plan.capacity_tokens is None:
        return ""
    if plan.max_concurrency is None:
        return f"up to --ctx {plan.capacity_tokens}" if plan.capacity_tokens else "no context"
    return f"{plan.capacity_tokens:,} tokens"


def engine_words(result: SizeResult) -> str:
    """ "transformers 5.24"."""
    return f"{result.engine} {result.engine_version}" if result.engine_version else result.engine


def naive_words(result: SizeResult) -> str | None:
    """What the usual formula would have said, where that differs."""
    naive = result.naive_bytes
    if naive is None or naive == result.kv_bytes or not result.kv_bytes or not naive:
        return None
    factor = naive / result.kv_bytes
    how = f"{factor:,.1f}× too much" if factor > 1 else f"{1 / factor:,.1f}× too little"
    if how.startswith("1.0×"):
        how = how.replace("1.0×", "a little", 1)
    usual = "The usual formula, 2 × layers × KV heads × head dim × tokens × bytes, would say"
    return f"{usual} {format_bytes(naive)} ({naive:,} B): {how}."


def formula_lines(result: SizeResult) -> list[tuple[str, str]]:
    """Kind and sum of every kind of layer, largest first as in the table, and the total."""
    lines = [(kind_words(f.kind), f.text) for f in sorted(result.formulas, key=lambda f: -f.bytes) if f.bytes]
    return [*lines, ("total", f"{result.kv_bytes:,} B = {format_bytes(result.kv_bytes)}")]


def rank_words(weights: WeightsInfo) -> str:
    """What lies on each rank, or on the fullest where they differ."""
    sizes = weights.per_rank or (0,)
    each = f"on each of {len(sizes)} ranks" if len(set(sizes)) == 1 else f"on the fullest of {len(sizes)} ranks"
    if len(sizes) == 1:
        each = "that are loaded"
    return f"{max(sizes):,} bytes of weights {each}, cut as {weights.rules} does"

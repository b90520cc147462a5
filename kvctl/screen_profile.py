"""A profile on a terminal: what was measured, and beside it what was predicted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from rich.text import Text

from kvctl.measure.report import Line, Point, ProfileReport, UntilOom
from kvctl.measure.statistics import Sample
from kvctl.screen_lines import Row, Screen
from kvctl.screen_techniques import print_techniques
from kvctl.units import format_bytes, format_seconds, plural
from kvctl.words import one_line

if TYPE_CHECKING:
    from kvctl.measure.compare import Comparison
    from kvctl.measure.machine import Gpu, Machine
    from kvctl.measure.rates import Rates

_SHARES = {
    "memory": "memory bandwidth",
    "compute": "arithmetic",
    "overhead": "neither limit: its kernels reach neither, or launching them takes the most",
}


def print_profile(screen: Screen, report: ProfileReport, comparison: Comparison | None) -> None:
    """Everything of one run of a model."""
    screen.line(one_line(title(report)), "bold")
    screen.line(*_verdict(report))
    if any(point.ttft for point in report.points):
        screen.line()
        _times(screen, report.points)
    if any(point.cache for point in report.points):
        screen.line()
        _memory(screen, report)
    if any(point.scaled for point in report.points):
        screen.line()
        _scaled(screen, report)
    for point in report.points:
        if point.error is not None:
            screen.line(one_line(f"{_where(point)}: {point.error}"), "red")
    if report.techniques is not None and report.techniques.rows:
        screen.line()
        print_techniques(screen, report.techniques, report.dtype)
    if report.sharing is not None and report.sharing.held:
        from kvctl.screen_sharing import print_sharing

        screen.line()
        print_sharing(screen, report.sharing)
    facts = [*_limits(report.points), *_lines(report.lines)]
    if facts:
        screen.line()
        width = max(len(name) for name, _ in facts)
        for name, text in facts:
            screen.line(Text.assemble((name.ljust(width), "dim"), "  ", one_line(text)), indent=width + 2)
    if report.engine_log is not None:
        from kvctl.screen_log import print_log

        screen.line()
        print_log(screen, report.engine_log)
    if report.until_oom is not None:
        screen.line()
        _until_oom(screen, report.until_oom)
    if comparison is not None:
        screen.line()
        _comparison(screen, comparison)


def title(report: ProfileReport) -> str:
    """What was run, and how."""
    settings = report.settings
    name = report.model.id if report.model is not None else "a model"
    words = [f"{name}: {report.dtype}" if report.dtype else f"{name}:"]
    if settings.get("weights") == "random":
        words.append("random weights")
    if settings.get("device"):
        words.append(str(settings["device"]))
    if settings.get("attention"):
        words.append(str(settings["attention"]))
    if report.ranks > 1:
        words.append(f"{report.ranks} tensor-parallel ranks")
    if settings.get("prefill_chunk"):
        words.append(f"prefill in chunks of {settings['prefill_chunk']:,}")
    words.append(f"{report.engine} {report.engine_version}" if report.engine_version else report.engine)
    return ", ".join(words)


def _verdict(report: ProfileReport) -> tuple[str, str]:
    """One line that says whether predictions hold, and its style."""
    measured = [point for point in report.points if point.cache]
    wrong = [point for point in measured if not point.agrees]
    cut = "interrupted: " if report.interrupted else ""
    if wrong:
        return f"{cut}the cache is not as predicted in {len(wrong)} of {plural(len(measured), 'point')}", "bold red"
    if measured:
        where = "the one point" if len(measured) == 1 else f"all {len(measured)} points"
        return f"{cut}the cache is as predicted, to the byte, in {where}", "bold yellow" if cut else "bold green"
    if report.techniques is not None and report.agrees is not None:
        count = plural(len(report.techniques.rows), "cache")
        return (f"{cut}{count}: the bytes are as predicted", "bold green") if report.agrees else (
            f"{cut}{count}: the bytes are NOT as predicted in all", "bold red")  # fmt: skip
    if report.sharing is not None and report.agrees is not None:
        words = "bytes, blocks found and blocks copied are"
        return (f"{cut}{words} as predicted", "bold yellow" if cut else "bold green") if report.agrees else (
            f"{cut}{words} NOT as predicted in all", "bold red")  # fmt: skip
    if report.agrees is not None:  # of another engine's log
        return (f"{cut}what it logged is as predicted", "bold green") if report.agrees else (
            f"{cut}what it logged is not as predicted", "bold red")  # fmt: skip
    if any(point.ttft for point in report.points):
        return f"{cut}times were measured, and nothing that is predicted to the byte", "bold yellow"
    if report.found:
        return f"{cut}what was tried is below", "bold yellow"
    return f"{cut}nothing was measured", "bold red"


def _where(point: Point) -> str:
    return f"{point.context:,} tokens × {point.batch}"


def _times(screen: Screen, points: Sequence[Point]) -> None:
    rows: list[Row] = [(("context", "batch", "TTFT", "±", "prefill", "TPOT", "±", "p95", "decode"), None, "dim")]
    for point in points:
        if point.ttft is None:
            continue
        tpot = point.tpot
        rows.append(((
            f"{point.context:,}",
            f"{point.batch:,}",
            format_seconds(point.ttft.median),
            _noise(point.ttft),
            _rate(point.prefill_rate),
            format_seconds(tpot.median) if tpot else "–",
            _noise(tpot) if tpot else "–",
            format_seconds(tpot.p95) if tpot else "–",
            _rate(point.decode_rate),
        ), None, ""))  # fmt: skip
    screen.table("r" * 9, rows, bold=5)


def _noise(sample: Sample) -> str:
    """Half the 95% interval; a question mark where there are too few values to tell."""
    noise = sample.noise
    if noise is None:
        return "?"
    return f"{noise:.1%}" if noise < 0.1 else f"{noise:.0%}" if noise < 1 else ">100%"


def _rate(tokens: float | None) -> str:
    if tokens is None:
        return "–"
    return f"{tokens:,.0f} tok/s" if tokens >= 100 else f"{tokens:.3g} tok/s"


def _memory(screen: Screen, report: ProfileReport) -> None:
    several = report.ranks > 1
    head = ["rank"] * several + ["context", "batch", "KV cache", "bytes", "predicted", "ratio", "storage", "peak"]
    rows: list[Row] = [(head, None, "dim")]
    for point in report.points:
        for row in point.held:
            ratio = "–" if row.ratio is None else f"{row.ratio:.6f}"
            peak = point.memory.peak_bytes if point.memory is not None and row.rank == 0 else None
            cells = [f"{row.rank}"] * several + [
                f"{row.tokens:,}",
                f"{point.batch:,}",
                format_bytes(row.logical_bytes),
                f"{row.logical_bytes:,}",
                "same" if row.agrees else f"{row.predicted_bytes:,}",
                ratio,
                format_bytes(row.storage_bytes),
                "–" if peak is None else format_bytes(peak),
            ]
            rows.append((cells, None, "" if row.agrees else "red"))
    screen.table("r" * len(head), rows, bold=2 + several)


def _scaled(screen: Screen, report: ProfileReport) -> None:
    """The whole model, from the layers that ran."""
    kept, counts = report.settings.get("layers_kept") or [], report.settings.get("layers_of_kind") or []
    total = sum(counts)
    screen.line(f"all {total:,} layers, scaled up from {len(kept)} that ran "
                f"({', '.join(f'{count:,}' for count in counts)} of each kind); times are estimates", "bold")  # fmt: skip
    rows: list[Row] = [(("context", "batch", "KV cache", "bytes", "predicted", "TTFT", "TPOT"), None, "dim")]
    for point in report.points:
        scaled = point.scaled
        if scaled is None:
            continue
        rows.append(((
            f"{point.context + point.decode:,}",
            f"{point.batch:,}",
            format_bytes(scaled.kv_bytes),
            f"{scaled.kv_bytes:,}",
            "same" if scaled.agrees else f"{scaled.predicted_bytes:,}",
            "about " + format_seconds(scaled.ttft_s),
            "–" if scaled.tpot_s is None else "about " + format_seconds(scaled.tpot_s),
        ), None, "" if scaled.agrees else "red"))  # fmt: skip
    screen.table("r" * 7, rows, bold=2)


def _limits(points: Sequence[Point]) -> list[tuple[str, str]]:
    """Of the largest point: that is where limits show."""
    found = [point for point in points if point.limits is not None]
    if not found:
        return []
    point = max(found, key=lambda p: (p.context * p.batch, p.batch))
    limits = point.limits
    assert limits is not None
    out = [("at", _where(point))] if len(found) > 1 else []
    if limits.compute_share is not None:
        peak = limits.flops_per_second / limits.compute_share
        out.append(
            (
                "prefill",
                f"{_flops(limits.flops_per_second)}, {limits.compute_share:.0%} of the {_flops(peak)} of matrix products",
            )
        )
    else:
        out.append(("prefill", f"{_flops(limits.flops_per_second)}; no peak to hold it against was measured"))
    if limits.bandwidth_share is not None:
        peak = limits.bytes_per_second / limits.bandwidth_share
        out.append(
            (
                "decode",
                f"reads {_speed(limits.bytes_per_second)}, {limits.bandwidth_share:.0%} of the {_speed(peak)} of the memory",
            )
        )
    out.append(("decode waits for", _SHARES.get(limits.binds, limits.binds)))
    return out


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _speed(value: float) -> str:
    for size, unit in ((1e12, "TB/s"), (1e9, "GB/s")):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value / 1e6:.3g} MB/s"


def _lines(lines: Sequence[Line]) -> list[tuple[str, str]]:
    several = len({line.batch for line in lines}) > 1
    out = []
    for line in lines:
        name = line.what + (f" × {line.batch}" if several else "")
        if not line.told:
            noise = "is within the noise" if line.slope_error is not None else "cannot be told from noise: --repeat 3"
            out.append((name, f"its growth with context {noise}"))
            continue
        if line.unit == "bytes":
            text = f"{_signed(line.intercept)} {_plus(line.slope)} {format_bytes(round(abs(line.slope)))} × tokens"
            if line.predicted_slope is not None:
                text += f"; predicted for the cache: {format_bytes(round(line.predicted_slope))}"
        else:
            sign = "−" if line.intercept < 0 else ""
            text = f"{sign}{format_seconds(abs(line.intercept))} {_plus(line.slope)} {format_seconds(abs(line.slope))} × tokens"
        if line.curve:
            text += f" {_plus(line.curve)} {abs(line.curve) * 1e9:.3g} ns × tokens²"
        out.append((name, text))
    return out


def _plus(value: float) -> str:
    return "−" if value < 0 else "+"


def _signed(value: float) -> str:
    return ("−" if value < 0 else "") + format_bytes(round(abs(value)))


def _until_oom(screen: Screen, found: UntilOom) -> None:
    unit = "token" if found.what == "context" else "sequence"
    largest = "nothing runs" if found.largest is None else f"runs up to {plural(found.largest, unit)}"
    failed = "" if found.first_failed is None else f"; {found.first_failed:,} does not"
    predicted = "" if found.predicted is None else f"; predicted: {found.predicted:,}"
    screen.line(one_line(f"until memory runs out: {largest}{failed}{predicted}"), "bold")
    rows: list[Row] = [((found.what, "peak", "took", "how it ended"), None, "dim")]
    for one in found.tries:
        peak = "–" if one.peak_bytes is None else format_bytes(one.peak_bytes)
        rows.append(
            (
                (f"{one.size:,}", peak, format_seconds(one.seconds), one_line(one.ended)),
                None,
                "" if one.ran else "yellow",
            )
        )
    if found.tries:
        screen.table("rrrl", rows)
    if found.note:
        screen.line(one_line(found.note), "dim")


def _comparison(screen: Screen, found: Comparison) -> None:
    screen.line("beside " + one_line(", ".join(found.names[1:])) + "; ratio: its value over this run's", "bold")
    rows: list[Row] = [
        (
            ("", *found.names[:1], *(head for name in found.names[1:] for head in (one_line(name), "ratio", ""))),
            None,
            "dim",
        )
    ]
    for point in found.points:
        rows.append(([""] * len(rows[0][0]), Text(point.key.words(), style="bold"), ""))
        for row in point.rows:
            cells = [row.what, _value(row.what, row.cells[0].value)]
            for cell in row.cells[1:]:
                ratio = "" if cell.ratio is None else f"{cell.ratio.value:.3f}"
                cells += [_value(row.what, cell.value), ratio, cell.verdict]
            rows.append((cells, None, ""))
    if found.points:
        screen.table("lr" + "rrl" * (len(found.names) - 1), rows)
    for one in found.differences:
        screen.line(
            one_line(f"{one.what}: " + " / ".join("–" if value is None else str(value) for value in one.values)), "dim"
        )
    for text in found.unmatched:
        screen.line(one_line(f"not in all: {text}"), "dim")
    screen.line(one_line(found.note), "dim")


def _value(what: str, value: float | int | None) -> str:
    if value is None:
        return "–"
    return format_seconds(value) if what in ("TTFT", "TPOT") else format_bytes(round(value))


# -- the machine --------------------------------------------------------------------------------


def print_machine(screen: Screen, machine: Machine) -> None:
    """Processor, memory, GPUs and who holds them, and what was measured."""
    facts = [("CPU", _cpu(machine)), ("memory", _host_memory(machine))]
    if machine.load is not None:
        facts.append(
            ("load", f"{machine.load[0]:.2f} over the last minute, of {machine.cpu.usable_cores or '?'} cores")
        )
    for gpu in machine.gpus:
        facts += _gpu(gpu)
    if not machine.gpus:
        facts.append(("GPU", machine.no_gpu or "none"))
    for rates in machine.rates:
        facts += _rates(rates)
    screen.line("this machine", "bold")
    width = max(len(name) for name, _ in facts)
    for name, text in facts:
        screen.line(Text.assemble((name.ljust(width), "dim"), "  ", one_line(text)), indent=width + 2)


def _cpu(machine: Machine) -> str:
    cpu = machine.cpu
    words = [cpu.model or "unknown", f"{plural(cpu.usable_cores, 'core')} to use" if cpu.usable_cores else ""]
    telling = [name for name in cpu.instruction_sets if name in _TELLING]
    words.append(", ".join(telling))
    return "; ".join(word for word in words if word)


_TELLING = ("avx2", "avx512f", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "neon", "sve", "i8mm", "bf16")


def _host_memory(machine: Machine) -> str:
    memory = machine.memory
    text = f"{format_bytes(memory.total_bytes)}, {format_bytes(memory.available_bytes)} available"
    if memory.limit_bytes is not None:
        text += f"; {memory.limit_name} limits it to {format_bytes(memory.limit_bytes)}"
    return text


def _gpu(gpu: Gpu) -> list[tuple[str, str]]:
    device = gpu.device
    name = "GPU" if device.index is None else f"GPU {device.index}"
    if device.unreadable is not None:
        return [(name, f"{device.name}: {device.unreadable}")]
    free = "" if device.free_bytes is None else f", {format_bytes(device.free_bytes)} free"
    out = [(name, f"{device.name}: {format_bytes(device.memory_bytes)}{free}")]
    for holder in gpu.holders:
        size = "an unknown part" if holder.bytes is None else format_bytes(holder.bytes)
        who = f" of {holder.user}" if holder.user else ""
        out.append(("", f"held by {holder.name or 'a process'} ({holder.pid}){who}: {size}"))
    readings = gpu.readings
    if readings is not None:
        words = [f"{label} {value}" for label, value in _readings(readings) if value]
        if words:
            out.append(("", ", ".join(words)))
    return out


def _readings(readings: Any) -> list[tuple[str, str]]:
    def of(name: str, unit: str) -> str:
        value = getattr(readings, name, None)
        return "" if value is None else f"{value:g} {unit}"

    return [("SM clock", of("sm_mhz", "MHz")), ("memory clock", of("memory_mhz", "MHz")), ("power", of("power_watts", "W")),
            ("temperature", of("temperature_c", "°C"))]  # fmt: skip


def _rates(rates: Rates) -> list[tuple[str, str]]:
    out = []
    if rates.bandwidth is not None:
        best = max(rates.memory, key=lambda rate: rate.value)
        text = f"{_speed(rates.bandwidth)} measured ({best.ran})"
        if rates.published_bandwidth is not None:
            text += f", {_speed(rates.published_bandwidth)} by the maker"
        out.append((f"{rates.device} reads", text))
    shown = ", ".join(f"{_flops(rate.value)} in {rate.dtype}" for rate in rates.matrix)
    if shown:
        if rates.published_flops is not None:
            shown += f"; {_flops(rates.published_flops)} dense 16-bit by the maker"
        out.append((f"{rates.device} multiplies", shown))
    out += [(rates.device, note) for note in rates.notes]
    return out

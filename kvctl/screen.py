"""What each report looks like on a terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.text import Text

from kvctl.reports import LayerRow, Missing, SizeReport, SizeResult
from kvctl.screen_lines import Row, Screen, bar
from kvctl.units import format_bytes, format_count, plural
from kvctl.words import (
    beside_own_words,
    capacity_words,
    copies_words,
    engine_words,
    fit_cells,
    format_words,
    formula_lines,
    gpu_cells,
    held_words,
    kind_words,
    listing_cells,
    naive_words,
    of_own_structure,
    one_line,
    rank_words,
    reserved_words,
    scheme_words,
    share_words,
    title_words,
    what_if_words,
)

_ENGINE_WORDS = {
    "ideal": ": what the architecture needs, no engine's rounding",
    "transformers": ": the tensors of its cache",
    "vllm": ": by the rules of its planner",
    "sglang": ": by the rules of its pools",
    "llama.cpp": ": by the rules of its caches",
    "tensorrt-llm": ": by the rules of its cache managers",
    "ollama": ": by the rules of llama.cpp, which it starts",
}


def print_listing(rows: Sequence[dict[str, Any]]) -> None:
    """The catalogue."""
    head: Row = (("model", "type", "parameters", "context"), None, "dim")
    Screen().table("llrr", [head, *((listing_cells(row), None, "") for row in rows)])


def print_gpus(rows: Sequence[dict[str, Any]]) -> None:
    """The GPU table."""
    head: Row = (("GPU", "memory", "bandwidth", "dense FP16", "as the driver names it"), None, "dim")
    Screen().table("lrrrl", [head, *((gpu_cells(row), None, "") for row in rows)])


def print_size(report: SizeReport) -> None:
    """One model in detail, or several side by side; or a model in several engines."""
    screen = Screen()
    if report.log is not None:
        from kvctl.screen_log import print_log

        print_log(screen, report.log)
        return
    if len({result.engine for result in report.results}) > 1 or report.refused:
        _engines(screen, report.results)
        return
    groups: dict[Key, dict[int, SizeResult]] = {}
    for result in report.results:
        groups.setdefault(_key(result), {})[result.context] = result
    largest = [max(group.values(), key=lambda result: result.context) for group in groups.values()]
    if len(groups) > 1 or report.missing:
        _comparison(screen, [list(group.values()) for group in groups.values()], report.missing)
    else:
        (group,) = groups.values()
        if len(group) > 1:
            _ladder(screen, list(group.values()))
        if largest[0].replay is not None:
            _replayed(screen, largest[0])
        elif largest[0].fit is not None:
            from kvctl.screen_fit import print_fit

            screen.line(f"{title_words(largest[0])}, {engine_words(largest[0])}", "bold")
            print_fit(screen, largest[0])
            screen.line()
            _fact_lines(screen, _facts(largest[0]))
            _log(screen, largest[0])
        else:
            _one(screen, largest[0])
    for result in largest:
        _layer_list(screen, result)
        _formulas(screen, result)


def _one(screen: Screen, result: SizeResult, *, titled: bool = True) -> None:
    if titled:
        screen.line(title_words(result), "bold")
    rows: list[Row] = [(("layers", "kind", "holds", "size", "share"), None, "dim")]
    for row in sorted(result.layers, key=lambda row: -row.bytes):
        cells = (
            f"{row.count:,}",
            kind_words(row.kind),
            held_words(row.kind, row.tokens),
            format_bytes(row.bytes),
            share_words(row.bytes, result.kv_bytes),
        )
        rows.append((cells, bar(row.bytes, result.kv_bytes), "dim" if row.kind in ("none", "shared") else ""))
    if not result.layers:
        rows.append((("0", "none", "nothing", "0 B", "0%"), None, "dim"))
    screen.table("rllrr", rows)
    screen.line()
    _fact_lines(screen, _facts(result))
    _log(screen, result)


def _replayed(screen: Screen, result: SizeResult) -> None:
    """A replay under the question it belongs to; what the memory is made of is another screen."""
    from kvctl.screen_replay import print_replay

    screen.line(one_line(f"{result.model.id}: at most {result.context:,} tokens each, {engine_words(result)}"), "bold")
    print_replay(screen, result)


def _fact_lines(screen: Screen, facts: Sequence[tuple[str, str, str]]) -> None:
    names, sizes = (max(len(fact[column]) for fact in facts) for column in (0, 1))
    for index, (name, size, detail) in enumerate(facts):
        text = Text.assemble(
            (name.ljust(names + 2), "dim"), (size.rjust(sizes), "bold" if index == 0 else ""), "  ", one_line(detail)
        )
        screen.line(text, indent=names + sizes + 4)


def _log(screen: Screen, result: SizeResult) -> None:
    too_long = (
        result.fit is not None and result.model.max_context is not None and result.context > result.model.max_context
    )
    if result.allocation is not None and result.allocation.log and not too_long:
        screen.line()
        screen.line("its log will say", "bold")
        for line in result.allocation.log:
            # In one piece, to be compared with the real one.
            screen.console.print(Text("  " + line), soft_wrap=True)


def _facts(result: SizeResult) -> list[tuple[str, str, str]]:
    """Name, size for people, exact number and what it is."""
    need = ", what the architecture needs" if result.allocation else ""
    rows = [("KV cache", format_bytes(result.kv_bytes), f"{result.kv_bytes:,} bytes in {format_words(result)}{need}")]
    if result.fit is None or result.formulas:
        rows += _allocation(result)  # beside a fit only where every step is asked for
    exact = result.kv_bytes_per_token_exact
    if result.kv_bytes_per_token:
        each = f"{_mixed(exact)} bytes" if exact else f"{result.kv_bytes_per_token:,} bytes"
        rows.append(("+1 token", format_bytes(result.kv_bytes_per_token), f"{each} for each sequence"))
    else:
        rows.append(("+1 token", "0 B", "nothing grows any more at this context"))
    if result.kv_bytes_fixed:
        rows.append(
            ("fixed part", format_bytes(result.kv_bytes_fixed), f"{result.kv_bytes_fixed:,} bytes that do not grow")
        )
    count = f"{format_count(result.weights_parameters)} parameters, " if result.weights_parameters else ""
    origin = result.weights.source if result.weights else "not in the source"
    if result.weights and result.weights.scheme:
        origin += f"; {result.weights.scheme}"
    if result.weights_bytes is not None:
        rows.append(("weights", format_bytes(result.weights_bytes), f"{count}{origin}"))
        if result.allocation is None and result.fit is None:
            rows.append(("together", format_bytes(result.kv_bytes + result.weights_bytes), "KV cache and weights"))
    elif result.model.source != "shape":
        rows.append(("weights", "unknown", f"{count}{origin}"))
    if result.weights and result.weights.per_rank:
        rows.append(("", format_bytes(max(result.weights.per_rank)), rank_words(result.weights)))
    if result.kv_bytes and result.encoder_tokens:
        rows.append(("encoder", "", f"cross attention holds {result.encoder_tokens:,} positions"))
    scheme = scheme_words(result)
    if scheme:
        rows.append(("format", "", scheme))
    for key, value in result.model.overrides.items():
        rows.append(("what if", "", f"{key} = {value!r}"))
    revision = f" at {result.model.revision[:12]}" if result.model.revision else ""
    rows.append(("engine", "", engine_words(result) + _ENGINE_WORDS.get(result.engine, "")))
    rows.append(("source", "", f"{result.model.source}: {result.model.location}{revision}"))
    return rows


def _mixed(exact: str) -> str:
    """A fraction as whole bytes and a rest: "147,456 1/4"."""
    above, below = (int(part) for part in exact.split("/"))
    return f"{above // below:,} {above % below}/{below}"


def _allocation(result: SizeResult) -> list[tuple[str, str, str]]:
    """What the engine reserves, why it differs, and what its log will say."""
    plan = result.allocation
    if plan is None:
        return []
    alike = len({row.reserved_bytes for row in plan.per_rank}) == 1
    ranks = f" on each of {len(plan.per_rank)} ranks" if len(plan.per_rank) > 1 else ""
    ranks += "" if alike else " at most"
    blocks = ""
    if plan.blocks_are_alike:
        held = plural(plan.reserved_bytes // plan.bytes_per_block, "block")
        blocks = f": {held} × {plan.bytes_per_block:,} bytes"
    rows = [("reserved", format_bytes(plan.reserved_bytes), f"{plan.reserved_bytes:,} bytes{ranks}{blocks}")]
    if plan.blocks_are_alike:
        sizes = dict.fromkeys(f"{group.block_size:,}" for group in plan.groups)
        rows.append(("", "", "blocks of " + " and ".join(sizes) + (" token" if [*sizes] == ["1"] else " tokens")))
    rows += [("", "", reason) for reason in plan.reasons]
    if plan.capacity_tokens is not None and plan.kv_budget_bytes is not None:
        fits = capacity_words(plan)
        if plan.blocks_are_alike:
            fits = f"{plural(plan.num_blocks or 0, 'block')}, {fits}"
        if plan.max_concurrency is not None:
            fits += f", {plan.max_concurrency:.2f} requests of this length"
        rows.append(("budget", format_bytes(plan.kv_budget_bytes), f"{plan.kv_budget_bytes:,} bytes: {fits}"))
    return rows


def _layer_list(screen: Screen, result: SizeResult) -> None:
    """Every layer; neighbours that are alike share a line."""
    if result.per_layer is None:
        return
    screen.line()
    screen.line(one_line(f"{result.model.id}{what_if_words(result)}, layer by layer"), "bold")
    rows: list[Row] = [(("layer", "kind", "holds", "bytes each"), None, "dim")]
    for first, last in _runs(result.per_layer):
        span = str(first.index) if first is last else f"{first.index}–{last.index}"
        for position, state in enumerate(first.states):
            held = held_words(state.kind, state.tokens)
            rows.append((("" if position else span, kind_words(state.kind), held, f"{state.bytes:,}"), None, ""))
    screen.table("rllr", rows)


def _runs(layers: Sequence[LayerRow]) -> list[tuple[LayerRow, LayerRow]]:
    """First and last of every run of equal neighbours."""
    runs: list[tuple[LayerRow, LayerRow]] = []
    for layer in layers:
        if runs and runs[-1][0].states == layer.states:
            runs[-1] = (runs[-1][0], layer)
        else:
            runs.append((layer, layer))
    return runs


def _formulas(screen: Screen, result: SizeResult) -> None:
    if not result.formulas:
        return
    screen.line()
    screen.line(one_line(f"{result.model.id}{what_if_words(result)}, step by step"), "bold")
    for kind, text in formula_lines(result):
        screen.line(Text.assemble("  ", (kind, "cyan"), ": ", text), indent=4)
    naive = naive_words(result)
    if naive:
        screen.line(Text("  " + naive, style="yellow"), indent=4)


def _ladder(screen: Screen, group: Sequence[SizeResult]) -> None:
    """Memory against context for one model."""
    first = group[0]
    screen.line(one_line(f"{first.model.id}: {copies_words(first)}, by context"), "bold")
    largest = max(result.kv_bytes for result in group)
    room = max(6, min(24, screen.console.width - 56))
    planned = first.allocation is not None
    # What an engine reserves takes the place of the exact bytes: these stand below.
    head = ["context", "KV cache", "reserved" if planned else "bytes", "+1 token"]
    if first.fit is not None:
        head[3:] = ["fits", "headroom", "requests at once"]
    rows: list[Row] = [(head, None, "dim")]
    for result in group:
        cells = [
            f"{result.context:,}",
            format_bytes(result.kv_bytes),
            reserved_words(result) if planned else f"{result.kv_bytes:,}",
            format_bytes(result.kv_bytes_per_token),
        ]
        if result.fit is not None:
            fits, headroom, _, most = fit_cells(result)
            cells[3:] = [fits, headroom, most]
            rows.append((cells, None, "" if result.fit.fits else "red"))
        else:
            rows.append((cells, bar(result.kv_bytes, largest, room), ""))
    screen.table("r" * len(head), rows, bold=1)
    screen.line()


def _comparison(screen: Screen, groups: Sequence[Sequence[SizeResult]], missing: Sequence[Missing] = ()) -> None:
    """Several models: one line each, or with several contexts a name and a line for every context; why one is missing, in its
    place."""
    results = [result for group in groups for result in group]
    first = results[0]
    names = _display_names(results, imagined=bool(missing))
    stacked = max(len(group) for group in groups) > 1 or len({result.context for result in results}) > 1
    fixed = any(result.kv_bytes_fixed for result in results)
    where = "" if stacked else f"{first.context:,} tokens × "
    formats = {format_words(result) for result in results}
    cache = f", {formats.pop()} cache" if len(formats) == 1 else ""
    largest = max(result.kv_bytes for result in results)
    longest = 0 if stacked else max(len(name) for name in names.values())
    planned = first.allocation is not None
    fitted = first.fit is not None
    screen.line(
        f"{where}{copies_words(first)}{cache}, engine {engine_words(first)}"
        + ("" if fitted else "; +1 token is for each sequence"),
        "bold",
    )
    own = of_own_structure(results)
    imagined = any(beside_own_words(result, own(result)) for result in results)
    room = min(24, screen.console.width - longest - 48 - 11 * fixed - 15 * planned - 48 * fitted - 16 * imagined)

    def cells(result: SizeResult) -> list[str]:
        row = [f"{result.context:,}" if stacked else names[_key(result)], format_bytes(result.kv_bytes)]
        if planned and not fitted:
            row.append(reserved_words(result))
        if not fitted:
            row.append(format_bytes(result.kv_bytes_per_token))
        if fixed and not fitted:
            row.append(format_bytes(result.kv_bytes_fixed))
        # The weights are the same at every context: once is enough.
        row.append(_weights(result) if not stacked or result is heads[_key(result)] else "")
        return [*row, *([beside_own_words(result, own(result))] * imagined), *(fit_cells(result) if fitted else ())]

    heads = {_key(group[0]): group[0] for group in groups}
    grown = [*["reserved"] * planned, "+1 token", *["fixed"] * fixed]
    parts = (
        ["KV cache", *([] if fitted else grown)],
        ["weights", *["beside its own"] * imagined],
        _FITS if fitted else (),
    )
    head = ["context" if stacked else "model", *(name for part in parts for name in part)]
    rows: list[Row] = [(head, None, "dim")]
    place = 0
    for group in groups:
        if stacked:
            rows.append(([""] * len(head), Text(names[_key(group[0])], style="bold"), ""))
        for result in group:
            style = "red" if result.fit is not None and not result.fit.fits else ""
            rows.append((cells(result), bar(result.kv_bytes, largest, room) if room >= 6 else None, style))
        place += len(group)
        for one in missing:
            if one.after == place:
                name = f"{one.model.rpartition('/')[2] or one.model} {one.name}"
                rows.append(([""] * len(head), Text(one_line(f"{name}: {one.why}"), style="yellow"), "yellow"))
    justify = ("r" if stacked else "l") + "r" * (len(head) - 1)
    screen.tables(1, justify, rows, [len(part) for part in parts if part], bold=1)


def _engines(screen: Screen, results: Sequence[SizeResult]) -> None:
    """Engines side by side: a table for every model and context, and why they differ."""
    questions: dict[tuple[str, str, str, int], list[SizeResult]] = {}
    for result in results:
        model, place, _, structure = _key(result)
        questions.setdefault((model, place, structure, result.context), []).append(result)
    for number, answers in enumerate(questions.values()):
        if number:
            screen.line()
        screen.line(title_words(answers[0]), "bold")
        totals = [_in_memory(result) for result in answers]
        holds = any(result.allocation and result.allocation.capacity_tokens is not None for result in answers)
        fitted = any(result.fit for result in answers)
        more = ("bytes", "budget holds") if holds and not fitted else _FITS if fitted else ("bytes",)
        rows: list[Row] = [(("engine", "format", "in memory", *more), None, "dim")]
        room = min(16, screen.console.width - 60 - 20 * holds - 30 * fitted)
        for result, total in zip(answers, totals, strict=True):
            ranks = len(result.allocation.per_rank) if result.allocation else 1
            each = f"{ranks} × " if ranks > 1 else ""
            cells = [engine_words(result), format_words(result), each + format_bytes(total)]
            cells += fit_cells(result) if fitted else [f"{each}{total:,}"]
            if holds and not fitted:
                cells.append(capacity_words(result.allocation))
            rows.append((cells, bar(total, max(totals), room) if room >= 6 else None, ""))
        screen.table("llr" + "r" * len(more), rows, bold=2)
        for result in answers:
            for reason in result.allocation.reasons if result.allocation else ():
                screen.line(Text.assemble((f"{result.engine}: ", "dim"), reason), indent=len(result.engine) + 2)


def _in_memory(result: SizeResult) -> int:
    """What is reserved ahead, or what is held where nothing is."""
    return result.allocation.reserved_bytes if result.allocation else result.kv_bytes


def _weights(result: SizeResult) -> str:
    return "unknown" if result.weights_bytes is None else format_bytes(result.weights_bytes)


_FITS = ("fits", "headroom", "longest", "at once")

Key = tuple[str, str, str, str]
"""Id, place, cache format and structure: what a group of contexts has in common."""


def _key(result: SizeResult) -> Key:
    return result.model.id, result.model.location, format_words(result), result.what_if or ""


def _display_names(results: Sequence[SizeResult], *, imagined: bool = False) -> dict[Key, str]:
    """Names without organisation, or as much more as it takes to tell them apart."""
    keys = list(dict.fromkeys(_key(result) for result in results))
    formats, structures = (len({key[column] for key in keys}) > 1 for column in (2, 3))
    structures |= imagined
    for name in (
        lambda key: key[0].rpartition("/")[2] or key[0],
        lambda key: key[0],
        lambda key: f"{key[0]} ({key[1]})",
    ):
        names = {
            key: one_line(name(key))
            + _structure(key[3]) * structures
            + (f"{',' * structures} {key[2]}" if formats else "")
            for key in keys
        }
        if len(set(names.values())) == len(keys):
            break
    return names


def _structure(name: str) -> str:
    return f" if {name}" if name else " as it is"

"""The model card of a quantized checkpoint: what was done, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.units import format_bytes

if TYPE_CHECKING:
    from kvctl.weights.report import QuantizeReport, Row


def card(report: QuantizeReport, licence: Sequence[str] = ()) -> str:
    """Markdown, with what the Hub reads at its head."""
    original, row = report.rows
    name = report.model.id
    head = ["---", "library_name: transformers", "tags:", "- quantized", f"- {row.name}"]
    head += licence
    if report.model.source in ("hub", "cache", "catalogue") and "/" in name:
        head += [f"base_model: {name}", "base_model_relation: quantized"]
    lines = [*head, "---", "", f"# {name}, {row.name}", "", f"{name}, its weights quantized by kvctl: {row.title}.", ""]
    lines += ["| | original | this |", "|---|---:|---:|"]
    lines += [f"| {what} | {one} | {other} |" for what, one, other in _facts(original, row)]
    judged = row.judged
    if judged is not None and judged.quality is not None:
        found = judged.quality
        lines += [
            "",
            f"Measured on {found.tokens:,} tokens of text that nothing was searched with, each paired with the original's; "
            f"± is a standard error. The files were reloaded in a fresh process by {judged.by}.",
        ]
    lines += ["", "## How it was made", ""]
    lines += [f"- {words}" for words in _how(report, row)]
    lines += [f"- checked: {words}" for words in row.checked]
    lines += ["", "`kvctl-quantize.json` has all of this for programs. The licence is that of the original model.", ""]
    return "\n".join(lines)


def _facts(original: Row, row: Row) -> list[tuple[str, str, str]]:
    before, after = original.bytes or 0, row.bytes or 0
    out = [
        ("weights, bytes", f"{before:,}", f"{after:,}"),
        ("weights", format_bytes(before), format_bytes(after)),
        ("bits a parameter", f"{original.bits or 0:.2f}", f"{row.bits or 0:.2f}"),
    ]
    own, judged = original.judged, row.judged
    if own is not None and judged is not None and judged.quality is not None:
        found = judged.quality
        change = found.perplexity_change
        out += [
            ("perplexity", f"{own.perplexity:.4g}", f"{judged.perplexity:.4g}"),
            ("change of it", "", f"{change.value:+.2f}%" + ("" if change.error is None else f" ± {change.error:.2g}%")),
            ("divergence (KL), nats a token", "0", f"{found.kl.value:.3g}"),
            ("same likeliest token", "", f"{found.top1.value:.1%}"),
        ]
    return out


def _how(report: QuantizeReport, row: Row) -> list[str]:
    settings = report.settings
    out = [f"format: {row.name}, {row.title}", f"what is not packed: {row.dtype}", f"with: {row.made_with}"]
    if row.group is not None:
        out.append(f"scales shared by {row.group}")
    if row.name == "awq":
        out.append(
            f"searched on: {settings['samples']} samples of {settings['length']} tokens, seed {settings['seed']}, "
            f"from {_texts(settings['calibration'])}"
        )
    return [*out, *report.notes, *row.notes, *(f"broken: {what}" for what in row.broken)]


def _texts(facts: Mapping[str, Any]) -> str:
    """What the samples were drawn from."""
    parts = [str(facts["name"]), *(str(facts[name]) for name in ("config", "split", "revision") if facts.get(name))]
    licence = f" ({facts['licence']})" if facts.get("licence") else ""
    return ", ".join(parts) + licence + (", through the chat template" if facts["chat_template"] else "")

"""The model card of a quantized checkpoint: what was done, and what was measured."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.units import format_bytes

if TYPE_CHECKING:
    from kvctl.measure.quality import Quality
    from kvctl.reports import ModelInfo
    from kvctl.weights.kv_run import KvPart
    from kvctl.weights.report import QuantizeReport, Row

CARD = "README.md"


def card(report: QuantizeReport, licence: Sequence[str] = ()) -> str:
    """Markdown, with what the Hub reads at its head."""
    original, row = report.rows
    name = report.model.id
    lines = [*_head(report.model, row.name, licence), "", f"# {name}, {row.name}", "",
             f"{name}, its weights quantized by kvctl: {row.title}.", ""]  # fmt: skip
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
    if row.caches:
        lines += ["", "## With a smaller KV cache", "", *_table(report.context)]
        lines += [_line(cell.name, cell.kv_bytes, cell.quality) for cell in row.caches]
    lines += ["", "## How it was made", ""]
    lines += [f"- {words}" for words in _how(report, row)]
    lines += [f"- checked: {words}" for words in row.checked]
    lines += ["", "`kvctl-quantize.json` has all of this for programs. The licence is that of the original model.", ""]
    return "\n".join(lines)


def kv_card(model: ModelInfo, part: KvPart, licence: Sequence[str] = ()) -> str:
    """Of a checkpoint whose weights are the original's, with scales of an FP8 cache beside them."""
    lines = [*_head(model, "fp8-kv-cache", licence), "", f"# {model.id}, with scales of an FP8 KV cache", "",
             f"{model.id}, its weights as they were. Beside them lie {part.tensors} scales for keys and values, which kvctl measured "
             f"on {part.calibrated_tokens:,} tokens of text ({part.which}); vLLM and SGLang read them and keep the cache in FP8.", ""]  # fmt: skip
    lines += [*_table(part.context), *(_line(row.name, row.kv_bytes, row.quality) for row in part.rows)]
    found = next((row.quality for row in part.rows if row.quality is not None), None)
    if found is not None:
        lines += ["", f"Measured in {part.dtype} on {found.tokens:,} tokens of text that nothing was searched with, each paired with "
                      "the plain cache's; ± is a standard error."]  # fmt: skip
    lines += ["", "`kvctl-kv-scales.json` has all of this for programs. The licence is that of the original model.", ""]
    return "\n".join(lines)


def licence_of(source: Path) -> list[str]:
    """What the head of a model's card says of its licence, line by line."""
    try:
        lines = (source / CARD).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
    if not lines or lines[0].strip() != "---" or "---" not in [line.strip() for line in lines[1:200]]:
        return []
    end = 1 + [line.strip() for line in lines[1:200]].index("---")
    return [
        line
        for line in lines[1:end]
        if line.startswith(("license:", "license_name:", "license_link:")) and len(line) < 500
    ]


def _head(model: ModelInfo, tag: str, licence: Sequence[str]) -> list[str]:
    head = ["---", "library_name: transformers", "tags:", "- quantized", f"- {tag}", *licence]
    if model.source in ("hub", "cache", "catalogue") and "/" in model.id:
        head += [f"base_model: {model.id}", "base_model_relation: quantized"]
    return [*head, "---"]


def _table(context: int) -> list[str]:
    return [
        f"| KV cache | bytes of {context:,} tokens | perplexity | KL, nats | same likeliest token |",
        "|---|---:|---:|---:|---:|",
    ]


def _line(name: str, held: int, found: Quality | None) -> str:
    if found is None:
        return f"| {name} | {held:,} | | | |"
    change = found.perplexity_change
    error = "" if change.error is None else f" ± {change.error:.2g}%"
    return f"| {name} | {held:,} | {change.value:+.2f}%{error} | {found.kl.value:.3g} | {found.top1.value:.1%} |"


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

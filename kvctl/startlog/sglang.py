"""SGLang's start-up log, 0.4 to 0.5.23; its GB are GiB.

Sources: sglang 0.4.6 to 0.5.23 srt/model_executor/model_runner.py, pool_configurator.py, srt/mem_cache/memory_pool.py,
swa_memory_pool.py, srt/managers/scheduler.py, srt/entrypoints/engine.py.
"""

from __future__ import annotations

import re
from typing import Any

from kvctl.startlog import pairs
from kvctl.startlog.figures import Pool, count, number, whole
from kvctl.startlog.lines import Line
from kvctl.startlog.start import Reader, Start, refused, rule, sizes
from kvctl.units import GIB

_SIZE = r"(-?\d[\d.]*)"
_HALF = GIB * 0.005

KV = re.compile(
    r"(?:\b(Full|SWA) )?KV Cache is allocated\. (?:dtype: torch\.(\w+), )?(?:#tokens: (\d+), )?"
    rf"(?:K size: {_SIZE} GB, V size: {_SIZE} GB|KV size: {_SIZE} GB)"
)
STATES = re.compile(
    rf"Mamba Cache is allocated\. max_mamba_cache_size: (\d+), conv_state size: {_SIZE} ?GB, ssm_state size: {_SIZE} ?GB"
    rf"(?: *,? *intermediate_ssm_state_cache size: {_SIZE} ?GB *,? *intermediate_conv_window_cache size: {_SIZE} ?GB)?"
)
SWA = re.compile(rf"SWAKVPool mem usage: {_SIZE} GB, swa size: (\d+), full size: (\d+)")
LIMITS = re.compile(r"max_total_num_tokens=(\d+)(?:.*?max_running_requests=(\d+))?(?:, context_len=(\d+))?")


def pool(text: str, line: int = 0, where: str = "") -> Pool | None:
    """The pool that a line announces; the same for lines that kvctl predicts."""
    if (match := KV.search(text)) is not None:
        sizes: tuple[tuple[str, str | None], ...] = (
            (("K", match[4]), ("V", match[5])) if match[4] else (("KV", match[6]),)
        )
        return _pool(match[1] or "cache", match[3], sizes, line, where, (match[2],) if match[2] else ())
    if (match := STATES.search(text)) is not None:
        sizes = (("conv", match[2]), ("ssm", match[3]), ("draft ssm", match[4]), ("draft conv", match[5]))
        return _pool("states", match[1], sizes, line, where, ())
    if (match := SWA.search(text)) is not None:
        return _pool("both", match[3], (("total", match[1]),), line, where, (match[2],))
    return None


def _pool(
    kind: str,
    tokens: str | None,
    sizes: tuple[tuple[str, str | None], ...],
    line: int,
    where: str,
    formats: tuple[str, ...],
) -> Pool | None:
    values = [(name, number(text)) for name, text in sizes if text is not None]
    if any(value is None for _, value in values):
        return None
    return Pool(kind, line, where, count(tokens) if tokens else None, None, "", formats,
                tuple((name, (value or 0) * GIB) for name, value in values), _HALF)  # fmt: skip


def _keep(start: Start, match: re.Match[str], line: Line) -> None:
    if (found := pool(line.text, line.number, line.where)) is not None:
        start.pool(found)


def _args(start: Start, match: re.Match[str], line: Line) -> None:
    if not start.args:
        start.args = pairs.settings(line.text[match.end() :])


def _loaded(start: Start, match: re.Match[str], line: Line) -> None:
    # The second model of a rank is the one that drafts.
    draft = any(f.name == "free_after" and f.where == line.where for f in start.figures)
    names = ("free_after_draft", "weights_draft") if draft else ("free_after", "weights")
    sizes(GIB, *names)(start, match, line)


def _limits(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(
        whole("capacity", match[1], "tokens", line.number, line.where),
        whole("requests", match[2], "requests", line.number, line.where) if match[2] else None,
        whole("length", match[3], "tokens", line.number, line.where) if match[3] else None,
    )


def _full(start: Start, match: re.Match[str], line: Line) -> None:
    times = int(start.facts.get("retracted", "0")) + 1
    start.facts["retracted"] = str(times)


def _before(start: Start, match: re.Match[str], line: Line) -> None:
    if not any(f.name == "free_before" and f.where == line.where for f in start.figures):
        sizes(GIB, "free_before")(start, match, line)


class SglangReader(Reader):
    """Finds SGLang's starts."""

    engine = "sglang"
    rules = (
        rule("server_args=", r"server_args=(?:ServerArgs\(|\{)", _args),
        rule("sglang", r"\bsglang(?:==| version:? ?| )v?(0\.\d+\.\d+(?:\.post\d+|rc\d+)?)\b",
             lambda start, match, line: start.facts.setdefault("version", match[1])),
        rule("Load weight begin", rf"Load weight begin\. avail mem={_SIZE} GB", _before),
        rule("Load weight end", rf"Load weight end\..*?avail mem={_SIZE} GB(?:, mem usage={_SIZE} GB)?", _loaded),
        rule("is allocated.", KV.pattern, _keep),
        rule("Mamba Cache", STATES.pattern, _keep),
        rule("SWAKVPool", SWA.pattern, _keep),
        rule("Memory pool end", rf"Memory pool end\. avail mem={_SIZE} GB", sizes(GIB, "free_pool")),
        rule("raph end", rf"Capture .*?graph end\..*?mem usage={_SIZE} GB", sizes(GIB, "graphs")),
        rule("max_total_num_tokens=", LIMITS.pattern, _limits),
        rule("total_rest_memory", rf"total_rest_memory ?=? ?{_SIZE} GB", sizes(GIB, "rest")),
        rule("--mem-fraction-static", r"Not enough memory\. Please try to increase --mem-fraction-static", refused("fraction")),
        rule("KV cache pool is full", r"KV cache pool is full\. Retract requests", _full),
        rule("out of memory. Tried to allocate", r"out of memory\. Tried to allocate", refused("out of memory")),
    )  # fmt: skip

    def begins(self, start: Start | None, line: Line) -> bool:
        if start is None:
            return False
        if "server_args=ServerArgs(" in line.text or "server_args={" in line.text:
            return bool(start.args or start.figures)
        # Without arguments: weights are loaded again after the pools were made.
        return "Load weight begin" in line.text and start.has("capacity") and not start.args and bool(start.pools)

    def is_complete(self, start: Start) -> bool:
        return bool(start.pools) or start.has("capacity") or any(r.kind != "out of memory" for r in start.refusals)


# -- in kvctl's terms -----------------------------------------------------------------------

# Settings and the values that are no news.
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "revision": (), "tp_size": (1,), "pp_size": (1,), "dp_size": (1,), "dcp_size": (1,), "context_length": (), "dtype": ("auto",),
    "kv_cache_dtype": ("auto",), "page_size": (1,), "chunked_prefill_size": (-1,), "max_running_requests": (),
    "mem_fraction_static": (), "max_total_tokens": (), "swa_full_tokens_ratio": (0.8,), "mamba_full_memory_ratio": (0.9,),
    "max_mamba_cache_size": (), "mamba_scheduler_strategy": ("auto", "no_buffer"),
    "mamba_radix_cache_strategy": ("auto", "no_buffer"), "mamba_ssm_dtype": (), "attention_backend": (),
    "speculative_algorithm": (), "speculative_num_draft_tokens": (), "speculative_draft_model_path": (),
    "json_model_override_args": ("{}",),
}  # fmt: skip
_SWITCHES = ("enable_dp_attention", "disable_radix_cache", "disable_hybrid_swa_memory")
_RENAMED = {"nsa_decode_backend": "dsa_decode_backend", "nsa_prefill_backend": "dsa_prefill_backend"}


def model(start: Start) -> str | None:
    """The model as the engine was told."""
    found = start.args.get("model_path")
    return found if isinstance(found, str) and found else None


def settings(start: Start) -> dict[str, Any]:
    """Options by their name without dashes."""
    args, out = start.args, {}
    for name, usual in _SETTINGS.items():
        found = args.get(name)
        if isinstance(found, str | int | float) and not isinstance(found, bool) and found not in usual:
            out[name] = found
    for name in _SWITCHES:
        if args.get(name) is True:
            out[name] = True
    for old, name in _RENAMED.items():
        found = args.get(name) or args.get(old)
        if isinstance(found, str) and found not in ("auto", ""):
            out[name] = found
    draft = out.get("speculative_draft_model_path")
    if draft is not None and draft == args.get("model_path"):
        del out["speculative_draft_model_path"]
    length = next((f for f in start.figures if f.name == "length"), None)
    if "context_length" not in out and length is not None:
        out["context_length"] = int(length.value)
    return out

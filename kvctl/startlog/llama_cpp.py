"""The log of llama.cpp and llama-server, old and new, and of Ollama, which starts the latter.

Sources: llama.cpp b4753 to b11434 src/llama-kv-cache*.cpp, llama-memory-recurrent.cpp, llama-context.cpp, llama-model.cpp,
common/fit.cpp; ollama llm/server.go (to 0.30) and llm/llama_server.go.
"""

from __future__ import annotations

import re
from typing import Any

from kvctl.startlog.figures import UNITS, Pool, count, number, sized
from kvctl.startlog.lines import Line
from kvctl.startlog.start import Reader, Start, fact, rule
from kvctl.units import MIB

_SIZE = r"(\d[\d.]*)"
_HALF = MIB * 0.005

CACHE = re.compile(
    rf"(?:llama_kv_cache\w*|llama_kv_cache_unified): size = *{_SIZE} MiB \( *(\d+) cells, *(\d+) layers(?:, *(\d+)(?:/ *(\d+))? seqs)?\s*\), "
    rf"K \((\w+)\): *{_SIZE} MiB, V \((\w+)\): *{_SIZE} MiB"
)
STATES = re.compile(
    rf"llama_memory_recurrent: size = *{_SIZE} MiB \( *(\d+) cells, *(\d+) layers, *(\d+) seqs(?: +(\d+) rs_seq)?\), "
    rf"R \((\w+)\): *{_SIZE} MiB, S \((\w+)\): *{_SIZE} MiB(?:, P \(\w+\): *{_SIZE} MiB)?"
)
SELF = re.compile(rf"KV self size += *{_SIZE} MiB, K \((\w+)\): *{_SIZE} MiB, V \((\w+)\): *{_SIZE} MiB")


def pool(text: str, line: int = 0, where: str = "") -> Pool | None:
    """The cache that a line announces; the same for lines that kvctl predicts."""
    if (match := CACHE.search(text)) is not None:
        slots = f"{match[4]}/{match[5]}" if match[5] else match[4] or ""
        return _pool(
            "cache", match[2], match[3], slots, (match[6], match[8]), (("K", match[7]), ("V", match[9])), line, where
        )
    if (match := STATES.search(text)) is not None:
        # Draft tokens keep snapshots beside the state.
        snapshots = f"{match[4]}, {match[5]} rs_seq" if match[5] and match[5] != "0" else match[4]
        return _pool(
            "states",
            match[2],
            match[3],
            snapshots,
            (match[6], match[8]),
            (("R", match[7]), ("S", match[9])),
            line,
            where,
        )
    if (match := SELF.search(text)) is not None:
        return _pool("cache", None, None, "", (match[2], match[4]), (("K", match[3]), ("V", match[5])), line, where)
    return None


def _pool(
    kind: str, cells: str | None, layers: str | None, slots: str, formats: tuple[str, ...],
    sizes: tuple[tuple[str, str], ...], line: int, where: str,
) -> Pool | None:  # fmt: skip
    values = [(name, number(text)) for name, text in sizes]
    if any(value is None for _, value in values):
        return None
    return Pool(kind, line, where, count(cells) if cells else None, count(layers) if layers else None, slots, formats,
                tuple((name, (value or 0) * MIB) for name, value in values), _HALF)  # fmt: skip


def _keep(start: Start, match: re.Match[str], line: Line) -> None:
    found = pool(line.text, line.number)
    # A pass that looks whether it fits prints the same lines before.
    if found is not None and not any(kept.same(found) and kept.kind == found.kind for kept in start.pools):
        start.pools.append(found)


def _buffer(start: Start, match: re.Match[str], line: Line) -> None:
    name = {
        "model": "weights",
        "KV": "kv_buffer",
        "RS": "state_buffer",
        "compute": "compute_buffer",
        "output": "output_buffer",
    }[match[2]]
    start.add(sized(name, match[3], MIB, line.number, match[1][:40]))


def _context(name: str) -> Any:
    """Settings in effect: those of the context that the first cache is made for. A second one drafts."""

    def handler(start: Start, match: re.Match[str], line: Line) -> None:
        if name not in start.config or not (start.pools or start.has("kv_buffer")):
            start.config[name] = match[1]

    return handler


def _device(start: Start, match: re.Match[str], line: Line) -> None:
    start.facts.setdefault("device", match[2][:80])
    start.add(sized("device_free", match[3], MIB, line.number, match[1][:40], 0))


def _refused(start: Start, match: re.Match[str], line: Line) -> None:
    start.refuse("out of memory", line)
    if match.lastindex and match[1]:
        start.add(sized("wanted", match[1], MIB, line.number))


def _drafts(start: Start, match: re.Match[str], line: Line) -> None:
    start.facts.setdefault("drafting", match[1][:40])


def _command(start: Start, match: re.Match[str], line: Line) -> None:
    if "--ollama-engine" in match[1]:
        start.notes.append(
            "the model runs in Ollama's own engine, whose cache kvctl does not know; it knows llama-server's"
        )
    start.facts["command"] = match[1].replace("\\\\", "\\")[:8000]


def _ollama(start: Start, match: re.Match[str], line: Line) -> None:
    # Sizes of Ollama's own engine: they are read, and not compared.
    name = {"model weights": "weights", "kv cache": "kv_cache", "compute graph": "compute_buffer"}[match[1]]
    start.add(sized(name, match[3], UNITS[match[4]], line.number, match[2][:40], 1))


def _required(start: Start, match: re.Match[str], line: Line) -> None:
    start.add(sized("kv_estimate", match[1], UNITS[match[2]], line.number, "", 1))


_N = r" += +(\S+)"

RULES = (
    rule("build", r"\bbuild(?:_info)?(?::| =|:? =|) *b?(\d{4,6})\b", fact("build")),
    rule("Listening on", r"Listening on \S+ \(version (\d[\w.+-]*)\)", fact("version")),
    rule("starting llama", r'msg="starting llama[- ](?:server|runner)" cmd="((?:[^"\\]|\\.)*)"', _command),
    rule("memory.required.kv", r'memory\.required\.kv="(\d[\d.]*) (GiB|MiB|KiB|B)"', _required),
    rule(" device=", r'msg="(model weights|kv cache|compute graph)" device=(\S+) size="(\d[\d.]*) (GiB|MiB|KiB|B)"', _ollama),
    rule("loaded meta data", r"loaded meta data with .* from (.+?) \(version", fact("model")),
    rule("general.name", r"general\.name +(?:str)? *= (.+)", fact("name")),
    rule("using device", r"using device (\S+) \((.+?)\)(?: \([\w:.]+\))? - (\d+) MiB free", _device),
    rule("buffer size", rf"(\S+) +(model|KV|RS|compute|output) buffer size = +{_SIZE} MiB", _buffer),
    rule("n_seq_max", r"\bn_seq_max" + _N, _context("n_seq_max")),
    rule("n_ctx ", r"(?<![\w-])n_ctx" + _N, _context("n_ctx")),
    rule("n_ctx_seq", r"\bn_ctx_seq +=" + r" +(\d+)", _context("n_ctx_seq")),
    rule("n_batch", r"\bn_batch" + _N, _context("n_batch")),
    rule("n_ubatch", r"\bn_ubatch" + _N, _context("n_ubatch")),
    rule("flash_attn", r"\bflash_attn" + _N, _context("flash_attn")),
    rule("kv_unified", r"\bkv_unified" + _N, _context("kv_unified")),
    rule("n_rs_seq", r"\bn_rs_seq" + _N, _context("n_rs_seq")),
    rule("n_parallel", r"n_parallel is set to auto", lambda start, match, line: start.config.setdefault("slots", "auto")),
    rule("full-size SWA cache", r"using full-size SWA cache", lambda start, match, line: start.config.setdefault("swa_full", "1")),
    rule("speculative implementation", r"adding speculative implementation '([\w-]+)'", _drafts),
    rule("n_max=", r"n_max=(\d+), n_min=", fact("draft_max")),
    rule("cache_k=", r"cache_k=(\w+), cache_v=\w+", fact("draft_key")),
    rule("cache_k=", r"cache_k=\w+, cache_v=(\w+)", fact("draft_value")),
    rule("size = ", CACHE.pattern, _keep),
    rule("size = ", STATES.pattern, _keep),
    rule("KV self size", SELF.pattern, _keep),
    rule("failed: out of memory", r"(?:allocating (\d[\d.]*) MiB on device \d+: )?\w+ failed: out of memory", _refused),
    rule("failed to allocate", r"failed to allocate buffer for kv cache", _refused),
    rule("unable to allocate", r"unable to allocate \S+ buffer", _refused),
)  # fmt: skip


class LlamaReader(Reader):
    """Finds llama.cpp's and Ollama's starts."""

    engine = "llama.cpp"
    rules = RULES

    def begins(self, start: Start | None, line: Line) -> bool:
        if start is None:
            return False
        if ("starting llama" in line.text and "cmd=" in line.text) or "memory.required.kv" in line.text:
            # The estimate comes before the command.
            return "command" in start.facts or bool(start.pools)
        # The model's file is opened again where it is only looked whether it fits; then no cache was made.
        return (
            "loaded meta data" in line.text
            and (bool(start.pools) or start.has("kv_buffer"))
            and "draft" not in line.text
        )

    def feed(self, line: Line) -> None:
        version = self.current.facts.get("version") if self.current is not None else None
        super().feed(line)
        if version is not None and self.current is not None:
            self.current.facts.setdefault("version", version)

    def is_complete(self, start: Start) -> bool:
        return (
            bool(start.pools)
            or start.has("kv_buffer")
            or start.has("kv_cache")
            or bool(start.refusals and start.config)
        )


# -- in kvctl's terms -----------------------------------------------------------------------


def model(start: Start) -> str | None:
    """The file as it was loaded."""
    return start.facts.get("model")


def settings(start: Start) -> dict[str, Any]:
    """Options of llama-server that lead to what the log says is in effect, by their name without dashes."""
    config = start.config
    out: dict[str, Any] = {}
    cells = next((pool for pool in start.pools if pool.kind == "cache"), None)
    slots = count(config.get("n_seq_max", ""))
    unified = config.get("kv_unified") in ("true", "1")
    context = count(config.get("n_ctx", "")) or 0
    if not context and cells is not None and cells.count:
        context = cells.count * int(cells.slots.partition("/")[2] or 1)
    if context:
        out["ctx-size"] = context
    if slots is None and cells is not None and cells.slots:
        slots = count(cells.slots.partition("/")[0])
        unified = unified or cells.slots.endswith("/1")
    if config.get("slots") != "auto" and slots is not None:
        out["parallel"] = slots
        if unified and slots > 1:
            out["kv-unified"] = True
    for name, option in (("n_batch", "batch-size"), ("n_ubatch", "ubatch-size")):
        if count(config.get(name, "")):
            out[option] = config[name]
    flash = {"1": "on", "enabled": "on", "0": "off", "disabled": "off"}.get(config.get("flash_attn", ""))
    if flash is not None:
        out["flash-attn"] = flash
    if "swa_full" in config:
        out["swa-full"] = True
    if cells is not None and len(cells.formats) == 2:
        out["cache-type-k"], out["cache-type-v"] = cells.formats
    if "mtp" in start.facts.get("drafting", ""):
        out["spec-type"] = "draft-mtp"
        if count(drafted := start.facts.get("draft_max", config.get("n_rs_seq", ""))):
            out["spec-draft-n-max"] = drafted
        for name, option in (("draft_key", "cache-type-k-draft"), ("draft_value", "cache-type-v-draft")):
            if name in start.facts:
                out[option] = start.facts[name]
    return out

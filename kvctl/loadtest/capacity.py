"""How much a server's KV cache holds: as the server declares it, and as `kvctl size` predicts it for the same model and settings.

What the server does not say is None, and so is what would have to be guessed. The prediction is that of `kvctl.size`; where nobody says
how much memory the cache has, the server's own number of blocks or tokens stands in for it, and then only what follows from that is
predicted.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.allocation import Allocation, Serving
from kvctl.errors import KvctlError, UsageError
from kvctl.loadtest import metrics
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.startlog import llama_cpp as llama_log
from kvctl.startlog.explain import explain
from kvctl.startlog.log import StartLog, read_log
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.loadtest.target import Client, Server
    from kvctl.spec import ModelSpec

FIELDS = ("tokens", "bytes", "blocks", "concurrency", "requests")


class Refused(KvctlError):
    """A start that failed for want of room in the cache."""


class Sizing(Record):
    """What is known beforehand of how the server was started."""

    spec: ModelSpec | None = None
    plan: SizePlan | None = None
    log: StartLog | None = None
    """Its start-up log, where that was there before."""
    settings: str = ""
    """Where the settings come from."""
    why: str = ""
    """Why there is no model, or no plan."""


class Side(Record):
    """One of the two; None is not available."""

    tokens: int | None = None
    """That the cache holds, of however many requests."""
    bytes: int | None = None
    """That it takes, on each rank."""
    bytes_within: int = 0
    """Half of the last digit that they are printed with."""
    blocks: int | None = None
    concurrency: float | None = None
    """Requests of the longest length that the server takes."""
    requests: int | None = None
    """Requests of this run's length that are served at once."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in (*FIELDS, "bytes_within")}


class Capacity(Record):
    """Both, side by side."""

    length: int
    """Tokens of a request of this run, its answer included."""
    context: int | None
    """The longest that the server takes."""
    declared: Side
    declared_by: tuple[str, ...]
    predicted: Side
    predicted_for: str | None
    """Model, engine and rules of the prediction; None where there is none."""
    settings: tuple[str, ...]
    """Where its settings come from."""
    notes: tuple[str, ...] = ()
    cells: int | None = None
    """Tokens that llama.cpp's slots share or have together, where that is known."""

    def difference(self, name: str) -> float | None:
        """By how many percent what the server declares is more than what is predicted."""
        declared, predicted = getattr(self.declared, name), getattr(self.predicted, name)
        if (
            name == "bytes"
            and None not in (declared, predicted)
            and abs(declared - predicted) <= self.declared.bytes_within
        ):
            return 0.0
        return None if declared is None or not predicted else 100 * (declared - predicted) / predicted

    def to_dict(self) -> dict[str, Any]:
        return {
            "length": self.length, "context": self.context, "declared": self.declared.to_dict(), "declared_by": list(self.declared_by),
            "predicted": self.predicted.to_dict(), "predicted_for": self.predicted_for, "settings": list(self.settings),
            "difference_percent": {name: self.difference(name) for name in FIELDS}, "notes": list(self.notes),
        }  # fmt: skip


def look(client: Client, server: Server, model: str, length: int, sizing: Sizing, log_path: str | None) -> Capacity:
    """Ask a server that is ready, and `kvctl size`; `log_path` is the log that it writes, where that is ours."""
    notes: list[str] = []
    log = sizing.log or _own_log(log_path)
    declared, by, block = _declared(client, server, log, notes)
    sizing = sizing if sizing.spec is not None or sizing.why else _by_name(model)
    predicted, words = Side(), None
    settings: tuple[str, ...] = ()
    if sizing.spec is None:
        notes.append(sizing.why)
    else:
        notes += sizing.plan.notes if sizing.plan is not None else ()
        try:
            plan = _plan(sizing, server, log, notes)
            if plan.engine.name == "llama.cpp":
                predicted, declared = _of_cells(sizing, plan, server, length, declared)
                settings = (sizing.settings,)
            else:
                predicted, memory = _of_pool(sizing, plan, server, log, length, declared, block)
                settings = tuple(filter(None, (sizing.settings or "the engine's default settings", memory)))
            rules = f"{plan.engine.name}@{plan.engine.version}" if plan.engine.version else plan.engine.name
            words = f"{sizing.spec.id}, {rules}"
        except KvctlError as error:
            notes.append(f"kvctl size predicts nothing for this server: {error.message}")
    return Capacity(length, server.context, declared, tuple(dict.fromkeys(by)), predicted, words, settings, tuple(dict.fromkeys(notes)),
                    declared.tokens if server.engine == "llama.cpp" else None)  # fmt: skip


def _own_log(path: str | None) -> StartLog | None:
    if path is None:
        return None
    try:
        return read_log(path)
    except KvctlError:
        return None  # an engine that says nothing of its cache: transformers


def refused(sizing: Sizing, error: KvctlError, log_path: str) -> KvctlError:
    """The error of a start that failed; where its log says that the cache is the reason, in kvctl's words and with what would fit."""
    if sizing.spec is None or sizing.plan is None:
        return error
    try:
        log = read_log(log_path)
        plan = sizing.plan.replace(serving=log.told(sizing.plan.serving, None))
        found = explain(log, sizing.spec, plan).refused
    except KvctlError:
        return error
    if found is None:
        return error
    return Refused(
        f"{log.engine} did not start: {found.why}",
        hint=f"it fits with {' or '.join(found.fits)}" if found.fits else None,
    )


# -- what the server says -----------------------------------------------------------------------------------


def _declared(
    client: Client, server: Server, log: StartLog | None, notes: list[str]
) -> tuple[Side, list[str], int | None]:
    """What it declares, by what, and tokens in a block."""
    if server.engine == "vllm":
        return _of_vllm(client, log, notes)
    if server.engine == "llama.cpp":
        return (*_of_llama_cpp(server, log), None)
    tokens = _whole(server.facts.get("max_total_num_tokens"))
    by = ["/get_server_info"] if tokens is not None else []
    if tokens is None and (said := _figure(log, "capacity")) is not None:
        tokens, by = said, ["its log"]
    return Side(tokens=tokens), by, _whole(server.facts.get("page_size"))


def _of_vllm(client: Client, log: StartLog | None, notes: list[str]) -> tuple[Side, list[str], int | None]:
    """cache_config_info of /metrics (vllm/v1/metrics/loggers.py; tokens and concurrency since 0.32), else the log."""
    try:
        answer = client.get("/metrics")
        page = metrics.read(answer.text, "vllm") if answer is not None and answer.status_code == 200 else None
    except (KvctlError, ValueError):
        page = None
    info = page.info.get("vllm:cache_config_info", {}) if page is not None else {}
    engines = len(page.series.get("prompt_tokens", {})) if page is not None else 0
    if engines > 1:
        notes.append(f"{plural(engines, 'engine')} behind this server: figures of the cache are those of one")
    blocks, block = _whole(info.get("num_gpu_blocks")), _whole(info.get("block_size"))
    tokens, concurrency = _whole(info.get("kv_cache_size_tokens")), _share(info.get("kv_cache_max_concurrency"))
    by = ["cache_config_info"] if blocks is not None or tokens is not None else []
    if tokens is None and (said := _figure(log, "capacity")) is not None:
        tokens, by = said, [*by, "its log"]
    if tokens is None and blocks is not None and block is not None:
        tokens = blocks * block
    if concurrency is None and log is not None and (figure := log.figure("concurrency")) is not None:
        concurrency, by = figure.value, [*by, "its log"]
    return Side(tokens=tokens, blocks=blocks, concurrency=concurrency), by, block


def _of_llama_cpp(server: Server, log: StartLog | None) -> tuple[Side, list[str]]:
    """Cells and bytes are in the log alone: /slots says how many tokens each slot may take, not whether slots share them."""
    by = ["/props"] if server.slots is not None else []
    tokens, size_, within = None, None, 0.0
    if log is not None and log.pools:
        tokens, size_ = _cells(log.pools), round(sum(pool.total for pool in log.pools))
        within = sum(pool.half * len(pool.sizes) for pool in log.pools)
    buffers = (*log.all("kv_buffer"), *log.all("state_buffer")) if log is not None else ()
    total = sum(part.value for part in buffers)
    # One for each device, rounded less often than keys and values; a pass that looks whether it fits may have printed them before.
    if buffers and (size_ is None or abs(total - size_) <= within + 1):  # of which one is whole bytes
        size_, within = round(total), sum(part.half for part in buffers)
    if size_ is not None:
        by.append("its log")
    if tokens is None and server.slots == 1:
        tokens = server.context
    return Side(tokens=tokens, bytes=size_, bytes_within=round(within)), by


def _cells(pools: Any) -> int | None:
    """Tokens of the widest cache over all streams: of windows there are fewer."""
    cells = [
        pool.count * int(streams)
        for pool in pools
        if pool.kind == "cache" and pool.count and (streams := pool.slots.partition("/")[2] or "1").isdigit()
    ]
    return max(cells, default=None)


# -- what kvctl size says -----------------------------------------------------------------------------------


def _by_name(model: str) -> Sizing:
    """The model that the server names, where the catalogue has it, or it is a path of this machine."""
    from kvctl.model import build_spec
    from kvctl.sources import resolve

    try:
        spec = build_spec(resolve(model) if Path(model).exists() else resolve(model, source="catalogue"))
    except KvctlError:
        return Sizing(
            why=f"what kvctl size predicts is not available: {model[:80]} is not in the catalogue; --size-model MODEL says which it is"
        )
    return Sizing(spec)


def _plan(sizing: Sizing, server: Server, log: StartLog | None, notes: list[str]) -> SizePlan:
    """The settings, with the rules of the version that the server or its log names, where kvctl knows them.

    Raises:
        UsageError: an engine that kvctl size has no rules for, or settings of another one.

    """
    from kvctl.engines import engine as find

    plan = sizing.plan or SizePlan(engine=find(server.engine))
    if plan.engine.name != server.engine:
        raise UsageError(f"its settings are those of {plan.engine.name}, and it is {server.engine}")
    version = (log.rules.partition("@")[2] if log is not None else "") or _known_version(server)
    if version and plan.engine.version != version:
        try:
            plan = plan.replace(engine=find(f"{server.engine}@{version}"))
        except UsageError:
            notes.append(
                f"kvctl size has no rules of {server.engine} {server.version}: those of {plan.engine.version} are taken"
            )
    return plan if log is None else plan.replace(serving=log.told(plan.serving, None))


def _known_version(server: Server) -> str:
    """As `kvctl size` writes it: llama.cpp's build info is b1234-abcdef."""
    version = server.version or ""
    if server.engine == "llama.cpp":
        build = version.partition("-")[0]
        return build if build.removeprefix("b").isdigit() and build.removeprefix("b") not in ("0", "1") else ""
    return version.partition("+")[0]


def _of_pool(
    sizing: Sizing, plan: SizePlan, server: Server, log: StartLog | None, length: int, declared: Side, block: int | None
) -> tuple[Side, str]:
    """A pool that requests draw from, and how much memory it was taken to have.

    Raises:
        KvctlError: kvctl has no plan for this.

    """
    spec = sizing.spec
    assert spec is not None
    context = server.context or (plan.contexts or (0,))[0] or spec.max_context
    if not context:
        raise KvctlError("the longest request that it takes is not known")
    serving, memory, given = _with_memory(plan.serving, log, declared, plan.engine.name)
    if sizing.plan is None and block is not None and serving.block_size is None:
        whole = _allocation(spec, context, plan, serving)
        serving = serving if whole is None or whole.block_size == block else serving.replace(block_size=block)
    whole, own = (_allocation(spec, tokens, plan, serving) for tokens in (context, min(length or context, context)))
    if whole is None or own is None:
        takes = size(spec, length, plan).kv_bytes
        raise KvctlError(
            f"{plan.engine.name} sets no memory aside for its cache; a request of {length:,} tokens takes {takes:,} bytes"
        )
    requests = own.held if own.whole is None else own.whole
    if requests is not None and serving.max_sequences is not None:
        requests = min(requests, serving.max_sequences)
    blocks = whole.num_blocks
    found = Side(
        tokens=whole.reported_capacity, bytes=None if blocks is None else blocks * whole.bytes_per_block or None, blocks=blocks,
        concurrency=whole.max_concurrency if plan.engine.name == "vllm" else None, requests=requests,
    )  # fmt: skip
    if given:  # what was taken from the server is no prediction of it
        found = found.replace(tokens=None, blocks=None)
    # How it is split over GPUs is not known where its settings are not.
    return found if sizing.plan is not None else found.replace(bytes=None), memory


def _with_memory(serving: Serving, log: StartLog | None, declared: Side, engine: str) -> tuple[Serving, str, bool]:
    """With the memory for the cache: as told, as the log says, else as much as the server counts in it; where that comes from, and
    whether the server's own count is taken."""
    if serving.kv_budget is not None or serving.num_blocks is not None or serving.max_tokens is not None:
        return serving, "", False
    budget = log.kv_budget if log is not None else None
    if budget is not None and budget[0] > 0:
        return serving.replace(kv_budget=budget[0]), "memory for the cache as its log says", False
    if engine == "vllm" and declared.blocks is not None:
        return serving.replace(num_blocks=declared.blocks), "the server's own number of blocks", True
    if engine == "sglang" and declared.tokens is not None:
        return serving.replace(max_tokens=declared.tokens), "the server's own number of tokens", True
    return serving, "memory for the cache not known", False


def _allocation(spec: ModelSpec, context: int, plan: SizePlan, serving: Serving) -> Allocation | None:
    return size(spec, context, plan.replace(serving=serving)).allocation


def _of_cells(sizing: Sizing, plan: SizePlan, server: Server, length: int, declared: Side) -> tuple[Side, Side]:
    """llama.cpp: the cells of all slots, as kvctl expects them in its log; and what the server declares, where it takes that to
    understand it.

    Raises:
        KvctlError: kvctl has no plan for this, or nobody says how slots share the cells.

    """
    spec, serving = sizing.spec, plan.serving
    assert spec is not None
    if sizing.plan is None and server.slots != 1:
        raise KvctlError("/props does not say whether slots share their cells; --server-log FILE does")
    total = (plan.contexts or (0,))[0]
    if not total and server.context is not None:
        # /props says a slot's own: of a shared cache that is all of it.
        shared = serving.slots is None or serving.unified
        total = server.context * (1 if shared or server.slots is None else server.slots)
    found = _allocation(spec, total or spec.max_context or 0, plan, serving)
    assert found is not None
    pools = [pool for line in found.log if (pool := llama_log.pool(line)) is not None]
    cells = _cells(pools)
    told = next((pool.slots for pool in pools if pool.kind == "cache"), "")
    slots, _, streams = told.partition("/")
    requests = None
    if cells is not None and length and slots.isdigit() and streams.isdigit():
        requests = min(int(slots), int(streams) * (cells // int(streams) // length))
        if declared.tokens is None and server.context is not None and server.slots is not None:
            declared = declared.replace(tokens=server.context * (server.slots if streams == slots else 1))
    if declared.tokens is not None and server.slots is not None:
        declared = declared.replace(requests=min(server.slots, declared.tokens // length))
    return Side(tokens=cells, bytes=found.reserved_bytes, requests=requests), declared


# -- numbers ------------------------------------------------------------------------------------------------


def _figure(log: StartLog | None, name: str) -> int | None:
    found = None if log is None else log.figure(name)
    return None if found is None else int(found.value)


def _whole(value: Any) -> int | None:
    """A label's number; None for "None" and the like."""
    if isinstance(value, bool) or value is None:
        return None
    text = str(value)
    return int(text) if text.isascii() and text.isdigit() and len(text) <= 20 else None


def _share(value: Any) -> float | None:
    try:
        found = float(str(value))
    except ValueError:
        return None
    return found if 0 <= found < 1e12 else None

"""A start-up log, read: what engine started with which settings, and what it said of memory."""

from __future__ import annotations

import re
import shlex
from itertools import pairwise
from types import ModuleType
from typing import Any

from kvctl.allocation import Serving
from kvctl.errors import SourceError, UsageError
from kvctl.record import Record
from kvctl.startlog import llama_cpp, sglang, tensorrt_llm, vllm
from kvctl.startlog.figures import Figure, Pool, Refusal
from kvctl.startlog.lines import lines
from kvctl.startlog.start import Reader, Start
from kvctl.units import MIB

_OF: dict[str, ModuleType] = {"vllm": vllm, "sglang": sglang, "llama.cpp": llama_cpp, "tensorrt-llm": tensorrt_llm}
_COMMANDS = {"vllm": "vllm serve", "sglang": "python3 -m sglang.launch_server", "llama.cpp": "llama-server",
             "tensorrt-llm": "trtllm-serve"}  # fmt: skip
_BUFFER = 150 * MIB
"""What vLLM's advice leaves free beside graphs (redundancy_buffer_memory)."""


class StartLog(Record):
    """The last complete start of a log."""

    path: str
    engine: str
    """vllm, sglang, llama.cpp, tensorrt-llm or ollama."""
    version: str | None
    """As printed; None where the log does not name it."""
    model: str | None
    """The model as the engine was told: a name, a path or a file."""
    model_name: str | None
    """What the model's own file calls it, where that is printed."""
    engine_args: str
    """A command line with the settings that bear on the cache, for `kvctl.engines.commandline.read`."""
    rules: str
    """NAME or NAME@VERSION for `kvctl.engines.engine`: whose rules the cache follows."""
    device: str
    """gpu or cpu."""
    figures: tuple[Figure, ...]
    pools: tuple[Pool, ...]
    refusal: Refusal | None
    complete: bool
    """Whether the cache's size, or why there is none, is in the log."""
    starts: int
    """How many starts the log has."""
    line: int
    """Where this one begins."""
    notes: tuple[str, ...]
    stated: frozenset[str] = frozenset()
    """Names of the settings that the log states, as the engine has them."""

    def states(self, *names: str) -> bool:
        """Whether the log says what any of these settings was."""
        return not self.stated.isdisjoint(names)

    @property
    def model_names(self) -> tuple[str, ...]:
        """Names that the model may be found under, the surest first: as told, then what its path or its file calls it."""
        names = [self.model] if self.model else []
        parts = [part for part in re.split(r"[/\\\\]", self.model or "") if part]
        hub = next((part for part in parts if part.startswith("models--")), None)
        if hub is not None:
            names.append(hub.removeprefix("models--").replace("--", "/", 1))
        elif len(parts) > 1 and not (self.model or "").endswith(".gguf") and "blobs" not in parts:
            names += ["/".join(parts[-2:]), parts[-1]]
        if self.model_name:
            names.append(self.model_name)
        return tuple(dict.fromkeys(names))

    def all(self, name: str) -> tuple[Figure, ...]:
        """Every value of this name."""
        return tuple(figure for figure in self.figures if figure.name == name)

    def figure(self, name: str) -> Figure | None:
        """The value of this name; of several, that of the engine's first replica that is smallest."""
        found = self.of_one_engine(name)
        return min(found, key=lambda figure: figure.value) if found else None

    def of_one_engine(self, name: str) -> tuple[Figure, ...]:
        """The values of this name, of one engine where several run side by side (data parallelism)."""
        found = self.all(name)
        replicas = {_replica(figure.where) for figure in found}
        if len(replicas) < 2:
            return found
        first = min(replicas)
        return tuple(figure for figure in found if _replica(figure.where) == first)

    @property
    def kv_budget(self) -> tuple[int, int] | None:
        """Bytes for the cache on the poorest rank, from … to: what rounds to the printed text. None: not printed."""
        if (exact := self.exact_budget()) is not None:
            return exact, exact
        if self.engine == "sglang":
            fraction = self.figure("fraction")
            return self.rest(fraction.value) if fraction is not None else None
        found = self.figure("kv_available") or self.figure("available_refused")
        return (int(found.low), int(found.high)) if found is not None else None

    def exact_budget(self) -> int | None:
        """vLLM's advice is to the byte: what is left beside graphs and 150 MiB. Without graphs that is the budget."""
        advised, graphs, shown = self.figure("suggested"), self.figure("graphs"), self.figure("kv_available")
        if advised is None or graphs is None or graphs.value:
            return None
        exact = int(advised.value) + _BUFFER
        return exact if shown is None or shown.low <= exact <= shown.high else None

    def rest(self, fraction: float) -> tuple[int, int] | None:
        """SGLang: free memory after loading, less the share of that before which is left alone, from … to."""
        after, before, used = self.figure("free_after"), self.figure("free_before"), self.figure("weights")
        if after is None or (before is None and used is None):
            return None
        # The least that any rank has counts. What was free before is printed, or is what loading used and the rest.
        first = before or after
        more = 0.0 if before is not None or used is None else used.value
        half = first.half if before is not None or used is None else first.half + used.half
        low = after.low - (first.value + more + half) * (1 - fraction)
        high = after.high - (first.value + more - half) * (1 - fraction)
        return (int(low), int(high)) if high > 0 else None

    def told(self, serving: Serving, budget: int | None) -> Serving:
        """`serving` of the command line, with what no option says: the device, and the memory for the cache."""
        if serving.kv_budget is None and budget is not None:
            serving = serving.replace(kv_budget=budget)
        return serving.replace(device=self.device) if self.device != "gpu" else serving

    def to_dict(self) -> dict[str, Any]:
        names = ("engine", "version", "model", "model_name", "engine_args", "complete", "starts", "line")
        out: dict[str, Any] = {"file": self.path} | {name: getattr(self, name) for name in names}
        budget = self.kv_budget
        return out | {
            "kv_budget_bytes": list(budget) if budget is not None else None,
            "figures": [figure.to_dict() for figure in self.figures],
        }


def _replica(where: str) -> str:
    return next((word for word in where.split() if word.startswith("DP")), "")


def read_log(path: str) -> StartLog:
    """Read the last complete start of the log at `path`; "-" is standard input.

    Raises:
        SourceError: no such file, no text, or nothing that an engine prints of its memory.

    """
    readers: tuple[Reader, ...] = (
        vllm.VllmReader(), sglang.SglangReader(), llama_cpp.LlamaReader(), tensorrt_llm.TrtReader()
    )  # fmt: skip
    for line in lines(path):
        for reader in readers:
            reader.feed(line)
    found = [(reader, *ended) for reader in readers if (ended := reader.finish()) is not None]
    if not found:
        raise SourceError(
            f"{path[:200]}: no start of an engine in it",
            hint="--from-log knows what vLLM, SGLang, llama.cpp, TensorRT-LLM and Ollama print of their memory",
        )
    # A complete start counts before one that is cut off; of several the last.
    reader, start, complete = max(
        found, key=lambda item: (item[2], len(item[1].figures) + len(item[1].pools) > 0, item[1].last)
    )
    return _log(path, reader, start, complete)


def _log(path: str, reader: Reader, start: Start, complete: bool) -> StartLog:
    engine, module = reader.engine, _OF[reader.engine]
    notes = list(start.notes)
    if reader.count > 1:
        notes.append(f"{reader.count} starts in the log: the last {'complete ' if complete else ''}one is taken")
    if not complete:
        notes.append("the log ends before it says how large the cache is")
    model, version = module.model(start), start.facts.get("version")
    settings = module.settings(start)
    if engine == "sglang":
        _fraction(start, settings)
    command = " ".join([_COMMANDS[engine], *_words(engine, settings, model)])
    rules = engine
    if "command" in start.facts:
        engine, command, version = "ollama", _ollama(start, settings), start.facts.get("version")
    elif engine == "llama.cpp":
        version = start.facts.get("build") and f"b{start.facts['build']}"
    if engine != "ollama":
        rules = _rules(engine, version, notes)
    if retracted := start.facts.get("retracted"):
        notes.append(f"the cache ran full {int(retracted):,} times: requests were retracted and computed anew")
    return StartLog(
        path=path,
        engine=engine,
        version=version,
        model=model,
        model_name=start.facts.get("name"),
        engine_args=command,
        rules=rules,
        device="cpu" if start.config.get("device_config") == "cpu" or start.facts.get("pool") == "CPU" else "gpu",
        figures=tuple(start.figures),
        pools=tuple(start.pools),
        refusal=start.refusals[-1] if start.refusals and not _went_on(start) else None,
        complete=complete,
        starts=reader.count,
        line=start.line,
        notes=tuple(notes),
        stated=frozenset(settings) | frozenset(start.config) | frozenset(start.args),
    )


def _went_on(start: Start) -> bool:
    """Whether the cache was made after all: the error came from elsewhere, or before another try."""
    made = [figure.line for figure in start.figures if figure.name == "capacity"] + [pool.line for pool in start.pools]
    return bool(made) and max(made) > max(refusal.line for refusal in start.refusals)


def _fraction(start: Start, settings: dict[str, Any]) -> None:
    share = settings.get("mem_fraction_static")
    if isinstance(share, int | float) and 0 < share <= 1:
        start.figures.append(Figure("fraction", float(share), 0, "", start.line, "", f"{share:g}"))


def _rules(engine: str, version: str | None, notes: list[str]) -> str:
    from kvctl.engines import engine as find

    if version is None:
        if engine != "tensorrt-llm":
            notes.append(f"the log does not name {engine}'s version: the newest rules known are used")
        return engine
    plain = version.partition("+")[0] if engine == "sglang" else version
    try:
        find(f"{engine}@{plain}")
    except UsageError as error:
        notes.append(f"{engine} {version}: {error.message.partition(': ')[2]}; the newest rules known are used")
        return engine
    return f"{engine}@{plain}"


def _words(engine: str, settings: dict[str, Any], model: str | None) -> list[str]:
    """Words of a command line, for a shell."""
    import json

    words = [] if model is None or model.startswith("-") else [shlex.quote(model)]
    if words and engine == "sglang":
        words.insert(0, "--model-path")
    elif words and engine == "llama.cpp":
        words.insert(0, "-m")
    for name, value in settings.items():
        option = f"--{name}" if engine == "tensorrt-llm" else f"--{name.replace('_', '-')}"
        if value is True:
            words.append(option)
        elif value is False:
            words.append(f"--no-{option[2:]}")
        else:
            words += [option, shlex.quote(json.dumps(value) if isinstance(value, dict) else str(value))]
    return words


# Options of Ollama's own runner that llama-server has under another name.
_RUNNER = {"--ctx-size": "-c", "--parallel": "-np", "--batch-size": "-b", "--kv-cache-type": "-ctk"}


def _ollama(start: Start, settings: dict[str, Any]) -> str:
    """The llama-server that Ollama starts, or one that does as its older runner."""
    try:
        words = shlex.split(start.facts["command"], posix=True)
    except ValueError:
        words = start.facts["command"].split()
    given = dict(pairwise(words))
    out: list[str] = []
    for long, short in _RUNNER.items():
        found = given.get(long) or given.get(short)
        if found is not None and not found.startswith("-"):
            out += [short, shlex.quote(found)]
    for name in ("-ub", "-ctk", "-ctv", "--cache-type-k", "--cache-type-v", "--spec-type", "--spec-draft-n-max"):
        if name in given and not given[name].startswith("-"):
            out += [name, shlex.quote(given[name])]
    if "--kv-cache-type" in given:
        out += ["-ctv", shlex.quote(given["--kv-cache-type"])]
    if (flash := settings.get("flash-attn")) is not None:
        out += ["-fa", flash]
    return " ".join(
        ["llama-server", *(["-m", shlex.quote(start.facts["model"])] if "model" in start.facts else []), *out]
    )

"""Engines: how an implementation stores what the architecture needs.

Adding one: a row in `ENGINES`; for one that plans its memory ahead a module here, and beside that one, `memory`, for
what it takes of a device.
First is the default.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import TYPE_CHECKING, Protocol, cast

from kvctl.errors import UsageError
from kvctl.formats import FP16, CacheFormat, cache_format, plain
from kvctl.record import Record
from kvctl.spec import Retention

if TYPE_CHECKING:
    from types import ModuleType

    from kvctl.allocation import Allocation, Part, Place, Serving, Shortage
    from kvctl.spec import Formats, ModelSpec


@cache
def _module(name: str) -> ModuleType:
    """A module of this package, loaded when first asked for."""
    from importlib import import_module

    return import_module(name, __name__)


class Planner(Protocol):
    """What a module of an engine that plans ahead offers."""

    def plan(
        self, spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving, version: str | None
    ) -> Allocation | None:
        """What the engine reserves for requests of `context` tokens; None where it allocates as it goes."""

    def kv_dtype(self, name: str, option: str, version: str | None) -> CacheFormat:
        """The cache format that `name` means to a version; unknown ones list what there is."""

    def check_version(self, version: str) -> None:
        """Refuses a version whose rules are not known."""


class Memory(Protocol):
    """What an engine's `memory` module offers; all of it is about one rank, on a device of which CUDA sees `device_bytes`."""

    def overheads(
        self, spec: ModelSpec, serving: Serving, *, dtype_bytes: int, device_bytes: int, gpu_name: str | None,
        version: str | None, context: int, free_bytes: int | None = None,
    ) -> tuple[Part, ...]:  # fmt: skip
        """What it takes beside weights and cache; `context` is the longest prompt, `free_bytes` what is free before it starts
        (None: all)."""

    def kv_budget(
        self, *, device_bytes: int, free_bytes: int, weights_bytes: int, parts: Sequence[Part], serving: Serving,
        version: str | None, spec: ModelSpec,
    ) -> int:  # fmt: skip
        """Bytes that are left for the cache; less than nothing where weights alone do not fit."""

    def left(self, serving: Serving, version: str | None) -> str:
        """Why it leaves some of the memory alone."""

    def start_refusal(
        self, free_bytes: int, device_bytes: int, serving: Serving, version: str | None
    ) -> str | None:  # fmt: skip
        """Why it would not begin to load; None where it would."""

    def started(
        self, spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None, version: str | None, context: int
    ) -> Serving:  # fmt: skip
        """The options, with those that it chooses for a device."""

    def places(self, spec: ModelSpec, weights_bytes: int, free: Sequence[int], serving: Serving) -> tuple[Place, ...]:
        """What lies on each of several devices; only of engines whose requests are slots, which divide layers."""

    def shortage(
        self, spec: ModelSpec, serving: Serving, *, before: int, weights_bytes: int, device_bytes: int, version: str | None
    ) -> Shortage | None:  # fmt: skip
        """What a share of the memory that it is told falls short of, with `before` bytes free before the weights."""

    def plan_refusal(
        self, allocation: Allocation, spec: ModelSpec, serving: Serving, *, device_bytes: int, gpu_name: str | None,
        version: str | None, context: int,
    ) -> str | None:  # fmt: skip
        """Why it does not start although its cache holds a request; None where it does."""

    def default_context(self, device_bytes: Sequence[int], trained: int | None) -> int | None:
        """The length that it takes on devices with so much memory without being told; None where that says nothing."""


class Engine(Record):
    """Rules that turn layer states into allocated bytes."""

    name: str
    version: str | None
    retention: Retention
    beams_share_cross: bool
    """Whether all beams of a sequence read one copy of the encoder's keys and values."""
    quantizes: bool
    """Whether keys and values may be kept in another format than the model's dtype."""
    summary: str
    module: str = ""
    """Where its rules are, for one that reserves memory ahead."""
    auto_fp32: bool = True
    """Whether a model whose config says fp32 runs so without being told."""
    follows_checkpoint: bool = False
    """Whether a cache format that the checkpoint names is taken without being told."""
    cache_format: CacheFormat | None = None
    """What keys and values are kept in without being told; None is the model's dtype."""
    smaller_cache: str = ""
    """A cache format of about half the size, in its own word; empty where it has none."""
    splits: bool = False
    """Whether it cuts every layer over ranks, or gives stages of layers to them."""
    slots: str = ""
    """Where requests are slots: whether one length is for all of them ("shared") or for each ("own")."""
    rows: bool = False
    """Whether the sequences of a batch are rows of one tensor, each beam one of them."""
    beside: bool = False
    """Whether it reserves some of the cache beside its pool, whatever the workload."""

    @property
    def plans(self) -> bool:
        """Whether it reserves memory ahead."""
        return bool(self.module)

    @property
    def planner(self) -> Planner:
        """The module with its rules, loaded when first asked for."""
        return cast("Planner", _module(self.module))

    @property
    def memory(self) -> Memory:
        """The module that says what it takes on a GPU beside weights and cache, loaded when first asked for."""
        own = {"": ".usual", ".ollama": ".ollama_memory"}.get(self.module, f"{self.module}.memory")
        return cast("Memory", _module(own))

    def by_request(self, serving: Serving) -> bool:
        """Whether it reserves for requests: beams are none, and positions of media are part of their length."""
        return self.plans and (not self.rows or serving.cache_implementation == "paged")

    def plan(self, spec: ModelSpec, context: int, sequences: int, fmt: Formats, serving: Serving) -> Allocation | None:
        """What it reserves for such requests; None where it allocates as it goes."""
        return self.planner.plan(spec, context, sequences, fmt, serving, self.version) if self.plans else None

    def kv_dtype(self, name: str, option: str) -> CacheFormat:
        """The cache format that `name` means to this engine."""
        return self.planner.kv_dtype(name, option, self.version) if self.plans else cache_format(name, option=option)


IDEAL = Engine(
    name="ideal",
    version=None,
    retention=Retention(window_slack=0, conv_slack=1),
    beams_share_cross=True,
    quantizes=True,
    summary="what the architecture needs, without any engine's rounding",
    smaller_cache="fp8",
)

# Source: transformers 5.24 cache_utils.py. DynamicSlidingWindowLayer keeps window - 1
# positions; LinearAttentionLayer keeps as many columns as the kernel has; generate()
# expands the encoder's output once a beam before the first cross attention.
TRANSFORMERS = Engine(
    name="transformers",
    version="5.24",
    retention=Retention(window_slack=1, conv_slack=0),
    beams_share_cross=False,
    quantizes=False,
    summary="bytes of every tensor in transformers' cache: DynamicCache, or the one that --cache-implementation names",
    module=".transformers",
    rows=True,
)

VLLM = Engine(
    name="vllm",
    version="0.33",
    retention=IDEAL.retention,
    beams_share_cross=True,
    quantizes=True,
    summary="what vLLM's planner reserves: blocks, groups and the capacity that its log prints",
    module=".vllm",
    splits=True,
    auto_fp32=False,
    follows_checkpoint=True,
    smaller_cache="fp8",
)

LLAMA_CPP = Engine(
    name="llama.cpp",
    version="b11434",
    retention=IDEAL.retention,
    beams_share_cross=True,
    quantizes=True,
    summary="the cells that llama.cpp allocates, as its load log prints them",
    module=".llama_cpp",
    slots="shared",
    cache_format=plain(FP16).replace(name="f16"),
    smaller_cache="q8_0",
)

TENSORRT_LLM = Engine(
    name="tensorrt-llm",
    version="1.2",
    retention=IDEAL.retention,
    beams_share_cross=True,
    quantizes=True,
    summary="the blocks that TensorRT-LLM (PyTorch) allocates, as its start-up log prints them",
    module=".tensorrt_llm",
    splits=True,
    beside=True,
    follows_checkpoint=True,
    smaller_cache="fp8",
)

OLLAMA = LLAMA_CPP.replace(
    name="ollama",
    module=".ollama",
    slots="own",
    version="0.34",
    summary="the cells of the llama-server that Ollama starts, and what Ollama expects before it does",
)

SGLANG = Engine(
    name="sglang",
    version="0.5.23",
    retention=IDEAL.retention,
    beams_share_cross=True,
    quantizes=True,
    summary="the pools that SGLang allocates: tokens, state slots and the sizes that its log prints",
    module=".sglang",
    splits=True,
    auto_fp32=False,
    smaller_cache="fp8_e4m3",
)

ENGINES: tuple[Engine, ...] = (IDEAL, TRANSFORMERS, VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, OLLAMA)


def engine(name: str) -> Engine:
    """Look up NAME or NAME@VERSION; unknown ones list what there is."""
    plain, at, version = name.lower().partition("@")
    for candidate in ENGINES:
        if candidate.name == plain:
            if not at:
                return candidate
            if not candidate.plans:
                raise UsageError(f"--engine: {plain} has one set of rules here; it takes no version")
            candidate.planner.check_version(version)
            version = version.removeprefix("v")
            return candidate.replace(version=f"b{version}" if plain == "llama.cpp" and version.isdigit() else version)
    raise UsageError(f"--engine: unknown engine {name!r}", hint="one of " + ", ".join(e.name for e in ENGINES))

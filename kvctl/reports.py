"""Reports: frozen results with a schema id; bytes are integers, `to_dict` is the JSON."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl import __version__
from kvctl.allocation import Allocation, Part
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.replay import Replay


class StateRow(Record):
    """One kind of state over all layers that hold it."""

    kind: str
    count: int
    """Layers."""
    tokens: int
    """Positions held for one sequence; 0 for states of a fixed size."""
    bytes: int

    def to_dict(self) -> dict[str, Any]:
        return {"kind": self.kind, "count": self.count, "tokens": self.tokens, "bytes": self.bytes}


class LayerRow(Record):
    """One layer, with the states it holds."""

    index: int
    states: tuple[StateRow, ...]

    @property
    def bytes(self) -> int:
        return sum(state.bytes for state in self.states)

    def to_dict(self) -> dict[str, Any]:
        first = self.states[0]
        return {
            "index": self.index,
            "kind": first.kind,
            "tokens": first.tokens,
            "bytes": self.bytes,
            "states": [{"kind": s.kind, "tokens": s.tokens, "bytes": s.bytes} for s in self.states],
        }


class ModelInfo(Record):
    """Which model, and where the facts came from."""

    id: str
    model_type: str
    source: str
    location: str
    revision: str | None
    overrides: Mapping[str, Any]
    notes: tuple[str, ...]
    max_context: int | None

    def to_dict(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "model_type": self.model_type,
            "source": self.source,
            "location": self.location,
            "revision": self.revision,
            "overrides": dict(self.overrides),
            "notes": list(self.notes),
            "max_context": self.max_context,
        }


class Formula(Record):
    """How the bytes of one group of equal layers come about, with numbers put in."""

    layers: int
    kind: str
    text: str
    bytes: int


class WeightsInfo(Record):
    """The weights: what is known of them, and how."""

    bytes: int | None
    parameters: int | None
    source: str
    dtype: str | None = None
    """What they are stored in: bf16, or the format that they are quantised to."""
    scheme: str | None = None
    """The quantisation in words."""
    per_rank: tuple[int, ...] | None = None
    """Bytes on each rank, tensor-parallel ranks of the first pipeline stage first."""
    rules: str | None = None
    """Whose sharding that follows."""

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {name: getattr(self, name) for name in self._fields[:5]}
        if self.per_rank is not None:
            out |= {"per_rank": list(self.per_rank), "rules": self.rules}
        return out


class RankFit(Record):
    """One rank's memory, in bytes."""

    rank: int
    device: str
    device_bytes: int
    weights_bytes: int
    kv_bytes: int
    overhead_bytes: int
    """What the engine takes beside weights and cache."""
    headroom_bytes: int
    """What is left of the memory for the cache; less than nothing where it does not fit."""


class Fit(Record):
    """Whether a workload fits on the hardware; bytes are those of the rank that decides."""

    fits: bool
    why: str
    """What stands in the way; empty where it fits."""
    devices: tuple[str, ...]
    device_bytes: int
    """What the device shows applications; the parts, weights, cache and headroom add up to it."""
    weights_bytes: int
    kv_bytes: int
    """The cache of this workload."""
    overhead_bytes: int
    """All of `parts`."""
    headroom_bytes: int
    kv_budget_bytes: int
    """Memory for the cache."""
    capacity_tokens: int | None
    max_context: int | None
    """Most tokens in each of so many requests; None where the length makes no difference."""
    max_concurrency: int
    """Most requests of this length at once."""
    bottleneck_rank: int
    parts: tuple[Part, ...]
    ranks: tuple[RankFit, ...]
    estimated: tuple[str, ...]
    notes: tuple[str, ...] = ()
    advice: tuple[str, ...] = ()
    """Changes with which it would fit."""

    @property
    def close(self) -> bool:
        """Whether estimates that are off by a sixth turn the answer around."""
        guessed = sum(part.bytes for part in self.parts if part.estimated)
        return 6 * abs(self.headroom_bytes) < guessed

    def to_dict(self) -> dict[str, Any]:
        names = ("fits", "device_bytes", "weights_bytes", "kv_bytes", "overhead_bytes", "headroom_bytes", "max_context",
                 "max_concurrency", "bottleneck_rank", "kv_budget_bytes", "capacity_tokens")  # fmt: skip
        out: dict[str, Any] = {name: getattr(self, name) for name in names}
        return out | {
            "close": self.close,
            "estimated": list(self.estimated),
            "why": self.why or None,
            "advice": list(self.advice),
            "parts": [{name: getattr(part, name) for name in part._fields} for part in self.parts],
            "ranks": [{name: getattr(rank, name) for name in rank._fields} for rank in self.ranks],
        }


class SizeResult(Record):
    """The cache of one model for one workload under one engine's rules."""

    model: ModelInfo
    engine: str
    engine_version: str | None
    context: int
    sequences: int
    beams: int
    encoder_tokens: int
    image_tokens: int
    audio_tokens: int
    dtype: str
    k_dtype: str
    v_dtype: str
    k_scheme: str
    v_scheme: str
    kv_bytes: int
    kv_bytes_per_token: int
    kv_bytes_per_token_exact: str | None
    kv_bytes_fixed: int
    layers: tuple[StateRow, ...]
    per_layer: tuple[LayerRow, ...] | None
    weights: WeightsInfo | None
    naive_bytes: int | None
    formulas: tuple[Formula, ...]
    warnings: tuple[str, ...] = ()
    allocation: Allocation | None = None
    fit: Fit | None = None
    replay: Replay | None = None
    technique: str | None = None
    """What makes its keys and values smaller."""
    what_if: str | None = None
    """The structure that its attention is imagined to have; None is its own."""

    @property
    def weights_bytes(self) -> int | None:
        return self.weights.bytes if self.weights else None

    @property
    def beyond_device(self) -> bool:
        """Whether a budget that is told would hold the workload, and the device has not got it."""
        fit = self.fit
        if fit is None or fit.fits or fit.max_concurrency < self.sequences:
            return False
        return fit.max_context is None or fit.max_context >= self.context

    @property
    def holds(self) -> bool:
        """Whether it fits, and no request of a replay was refused."""
        return self.fit is not None and self.fit.fits and (self.replay is None or not self.replay.policies[-1].rejected)

    @property
    def weights_parameters(self) -> int | None:
        return self.weights.parameters if self.weights else None

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "model": self.model.to_dict(),
            "engine": {"name": self.engine, "version": self.engine_version},
            "technique": self.technique,
            "what_if": self.what_if,
            "context": self.context,
            "sequences": self.sequences,
            "beams": self.beams,
            "encoder_tokens": self.encoder_tokens,
            "image_tokens": self.image_tokens,
            "audio_tokens": self.audio_tokens,
            "dtype": self.dtype,
            "k_dtype": self.k_dtype,
            "v_dtype": self.v_dtype,
            "k_scheme": self.k_scheme,
            "v_scheme": self.v_scheme,
            "kv_bytes": self.kv_bytes,
            "kv_bytes_per_token": self.kv_bytes_per_token,
            "kv_bytes_fixed": self.kv_bytes_fixed,
            "layers": [row.to_dict() for row in self.layers],
            "weights": None,
            "naive_kv_bytes": self.naive_bytes,
            "warnings": list(self.warnings),
        }
        if self.kv_bytes_per_token_exact is not None:
            out["kv_bytes_per_token_exact"] = self.kv_bytes_per_token_exact
        if self.weights is not None:
            out["weights"] = self.weights.to_dict()
        if self.allocation is not None:
            out["allocation"] = self.allocation.to_dict()
        if self.fit is not None:
            out["fit"] = self.fit.to_dict()
        if self.replay is not None:
            out["replay"] = self.replay.to_dict()
        if self.per_layer is not None:
            out["per_layer"] = [row.to_dict() for row in self.per_layer]
        if self.formulas:
            out["formulas"] = [
                {"layers": f.layers, "kind": f.kind, "text": f.text, "bytes": f.bytes} for f in self.formulas
            ]
        return out


class Missing(Record):
    """A row of a comparison that cannot be had."""

    model: str
    name: str
    """What was asked of it: "if mla:512+64"."""
    why: str
    after: int
    """How many results stand before its place."""

    @property
    def words(self) -> str:
        """On one line."""
        return f"{self.model} {self.name}: {self.why}"


class SizeReport(Record):
    """Everything one `kvctl size` run answers."""

    results: tuple[SizeResult, ...]
    refused: tuple[str, ...] = ()
    """Engines that were asked and gave no answer, with the reason."""
    missing: tuple[Missing, ...] = ()
    log: Any = None
    """A start-up log, explained (`kvctl.startlog.LogReport`)."""
    schema: str = "kvctl.size/1"
    version: str = __version__

    def to_dict(self) -> dict[str, Any]:
        out: dict[str, Any] = {
            "schema": self.schema,
            "kvctl_version": self.version,
            "results": [result.to_dict() for result in self.results],
        }
        if self.log is not None:
            out["log"] = self.log.to_dict()
        if self.refused or self.missing:
            out["refused"] = [*self.refused, *(one.words for one in self.missing)]
        return out

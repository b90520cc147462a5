"""A model that is to be loaded, and one that is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.measure.fill import local
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.thin import Thinned
    from kvctl.spec import ModelSpec

ATTENTIONS = ("sdpa", "eager", "flash_attention_2")


class Wanted(Record):
    """How a model is to be loaded."""

    random: bool = False
    """Random weights instead of the model's own."""
    layers: int | None = None
    """Keep so many layers of each distinct kind; random weights only."""
    dtype: DType | None = None
    device: str = "cpu"
    device_map: str | Mapping[str, str] | None = None
    """accelerate's word, or a device for every part of the model."""
    attention: str | None = None
    tensor_parallel: int = 1
    trust_remote_code: bool = False
    seed: int = 0
    revision: str | None = None

    @property
    def attention_setting(self) -> dict[str, Any]:
        """As transformers takes it."""
        return {} if self.attention is None else {"attn_implementation": self.attention}


def _nothing() -> None:
    """What waiting for other ranks is without any."""


class Loaded(Record):
    """A model that can be run, and what it is."""

    model: Any
    spec: ModelSpec
    """Of what runs: of the kept layers alone, where not all are kept."""
    device: str
    """Where token ids have to be."""
    weights_bytes: int
    thinned: Thinned | None = None
    tokenizer_path: str | None = None
    """What a tokenizer can be loaded from; None with random weights."""
    gguf_file: str | None = None
    notes: tuple[str, ...] = ()
    ranks: int = 1
    """Tensor-parallel ranks, of which this process is one."""
    line_up: Callable[[], None] = _nothing
    """Waits until every rank has come to the same place."""
    devices: tuple[str, ...] = ()
    """Where it computes; empty for `device` alone."""


def weights_bytes(model: Any) -> int:
    """Bytes of all parameters and buffers on this rank; memory that several share counts once."""
    storages: dict[tuple[str, int], int] = {}
    for tensor in map(local, (*model.parameters(), *model.buffers())):
        if tensor.is_meta:  # it lies elsewhere until its layer's turn comes (accelerate's offloading)
            storages["meta", id(tensor)] = tensor.numel() * tensor.element_size()
        else:
            storage = tensor.untyped_storage()
            storages[str(tensor.device), storage.data_ptr()] = storage.nbytes()
    return sum(storages.values())

"""The lines that llama.cpp logs of its caches, character by character.

Source: llama.cpp b11434 src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp.
"""

from __future__ import annotations

import struct

from kvctl.engines.llama_cpp_storage import Cache, Storage
from kvctl.spec import Formats

MIB = 2**20


def _mib(size: int) -> str:
    """A size as llama.cpp prints it: through a 32-bit float."""
    (rounded,) = struct.unpack("f", struct.pack("f", size))
    return f"{rounded / MIB:7.2f} MiB"


def created(storage: Storage, cache: Cache, cells: int) -> list[str]:
    """The line before those of a cache, where a model has several."""
    if storage.indexed:
        which = "indexer" if cache.kind == "indexer" else "main"
        return [f"llama_kv_cache_{storage.indexed}: creating {which} KV cache, size = {cells} cells"]
    if any(cache.reach for cache in storage.caches):
        which = "    SWA" if cache.reach else "non-SWA"
        return [f"llama_kv_cache_iswa: creating {which} KV cache, size = {cells} cells"]
    return []


def sized(cache: Cache, cells: int, streams: int, slots: int, fmt: Formats) -> str:
    """What a cache takes."""
    k, v = (cells * streams * row for row in (cache.k_row, cache.v_row))
    return (
        f"llama_kv_cache: size = {_mib(k + v)} ({cells:6d} cells, {cache.layers:3d} layers, {slots:2d}/{streams} seqs), "
        f"K ({fmt.key.name}): {_mib(k)}, V ({fmt.value.name}): {_mib(v)}"
    )


def recurrent(storage: Storage, slots: int, layers: int) -> str:
    """What the states of all slots take; the line counts all layers of the model."""
    r, s = storage.shift_bytes * slots, storage.state_bytes * slots
    return (
        f"llama_memory_recurrent: size = {_mib(r + s)} ({slots:6d} cells, {layers:3d} layers, {slots:2d} seqs  0 rs_seq), "
        f"R (f32): {_mib(r)}, S (f32): {_mib(s)}, P (f32): {_mib(0)}"
    )

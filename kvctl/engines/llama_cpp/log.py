"""The lines that llama.cpp logs of its caches, character by character.

Source: llama.cpp b11434 src/llama-kv-cache*.cpp, src/llama-memory-recurrent.cpp.
"""

from __future__ import annotations

import struct

from kvctl.engines.llama_cpp.builds import Rules
from kvctl.engines.llama_cpp.storage import Cache, Compressor, Storage
from kvctl.spec import Formats
from kvctl.units import MIB


def _mib(size: int) -> str:
    """A size as llama.cpp prints it: through a 32-bit float."""
    (rounded,) = struct.unpack("f", struct.pack("f", size))
    return f"{rounded / MIB:7.2f} MiB"


def created(rules: Rules, storage: Storage, cache: Cache, cells: int) -> list[str]:
    """The line before those of a cache, where a model has several."""
    if cache.ratio > 1:
        kind = (
            "lightning-indexer"
            if cache.kind == "indexer"
            else "CSA compressed"
            if cache.ratio == 4
            else "HCA compressed"
        )
        return [f"{rules.name}_dsv4: creating DSV4 {kind} KV cache, size = {cells} cells"]
    if storage.indexed:
        which = "indexer" if cache.kind == "indexer" else "main"
        return [f"{rules.name}_{storage.indexed}: creating {which} KV cache, size = {cells} cells"]
    if any(cache.reach for cache in storage.caches):
        which = "    SWA" if cache.reach else "non-SWA"
        return [f"{rules.name}_iswa: creating {which} KV cache, size = {cells} cells"]
    return []


def sized(rules: Rules, cache: Cache, cells: int, streams: int, slots: int, fmt: Formats) -> str:
    """What a cache takes."""
    k, v = (cells * streams * row for row in (cache.k_row, cache.v_row))
    sequences = f"{slots:2d}/{streams}" if rules.streams else f"{slots:2d}"
    names = cache.drafts or (fmt.key.name, fmt.value.name)
    return (
        f"{rules.name}: size = {_mib(k + v)} ({cells:6d} cells, {cache.layers:3d} layers, {sequences} seqs), "
        f"K ({names[0]}): {_mib(k)}, V ({names[1]}): {_mib(v)}"
    )


def recurrent(rules: Rules, storage: Storage, slots: int, layers: int) -> str:
    """What the states of all slots take; the line counts all layers of the model."""
    copies = slots * (1 + storage.snapshots)
    r, s = storage.shift_bytes * copies, storage.state_bytes * copies
    kept, last = (
        (f" {storage.snapshots:2d} rs_seq" if rules.recurrent_log else ""),
        (f", P (f32): {_mib(0)}" if rules.recurrent_log > 1 else ""),
    )
    return (
        f"llama_memory_recurrent: size = {_mib(r + s)} ({slots:6d} cells, {layers:3d} layers, {slots:2d} seqs{kept}), "
        f"R (f32): {_mib(r)}, S (f32): {_mib(s)}{last}"
    )


def self_size(rules: Rules, storage: Storage, cells: int, slots: int, fmt: Formats) -> str:
    """The one line of builds with one cache for everything; states stand where keys and values do."""
    if storage.caches:
        k, v = (sum(getattr(cache, row) for cache in storage.caches) * cells for row in ("k_row", "v_row"))
        names = (fmt.key.name, fmt.value.name)
    else:
        k, v, names = storage.shift_bytes * slots, storage.state_bytes * slots, ("f32", "f32")
    return f"{rules.one_cache}: KV self size  = {_mib(k + v)}, K ({names[0]}): {_mib(k)}, V ({names[1]}): {_mib(v)}"


def compressor(tail: Compressor, streams: int) -> str:
    """What the state of a compressor takes."""
    return (
        f"llama_dsv4_comp_state: {tail.name} ratio = {tail.ratio}, state = {tail.rows} x {tail.width}, "
        f"streams = {streams}, rs_seq = 0, layers = {tail.layers}, size = {_mib(tail.bytes * streams)}"
    )

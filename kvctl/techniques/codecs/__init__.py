"""How a cached row is packed into bytes: grouped integers, small floats, llama.cpp's blocks.

A codec's record says what it takes, to the byte, without torch; its kernel packs and unpacks tensors.
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.techniques.codecs.base import Codec, Kernel
from kvctl.techniques.codecs.blocks import GGML_TYPES, GgmlBlocks
from kvctl.techniques.codecs.floats import Fp8, Microscaled, PerTokenHead
from kvctl.techniques.codecs.integers import Grouped, grouped

__all__ = [
    "CODECS",
    "Codec",
    "Fp8",
    "GgmlBlocks",
    "Grouped",
    "Kernel",
    "Microscaled",
    "PerTokenHead",
    "codec",
    "grouped",
]

CODECS: dict[str, Codec] = {
    one.name: one
    for one in (
        grouped(8),
        grouped(4),
        grouped(2),
        Fp8("fp8"),
        Fp8("fp8_e5m2", form="e5m2"),
        PerTokenHead("fp8_per_token_head", form="fp8"),
        PerTokenHead("int8_per_token_head", form="int8"),
        PerTokenHead("int4_per_token_head", form="int4"),
        Microscaled("mxfp8"),
        Microscaled("mxfp4"),
        Microscaled("nvfp4"),
        *(GgmlBlocks(name) for name in GGML_TYPES),
    )
}
"""The codecs that have a name of their own, as `kvctl.formats` and the engines spell them."""


def codec(name: str) -> Codec:
    """The codec of that name; raises UsageError that lists them."""
    key = {"fp8_e4m3": "fp8"}.get(name, name)
    if key not in CODECS:
        raise UsageError(f"unknown codec {name[:40]!r}", hint="all: " + ", ".join(CODECS))
    return CODECS[key]

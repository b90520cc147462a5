"""llama.cpp's cache types: blocks of 32 elements, byte for byte what ggml's reference quantizers write."""

from __future__ import annotations

from kvctl.formats import cache_format
from kvctl.techniques.codecs.base import Codec, Kernel, refuse

GGML_TYPES = ("q8_0", "q5_1", "q5_0", "q4_1", "q4_0", "iq4_nl")
BLOCK = 32


class GgmlBlocks(Codec):
    """One of `GGML_TYPES`, by name. Blocks run within a head where 32 divides it, else along the row of all heads."""

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        return tokens * cache_format(self.name).row_bytes(heads * dim)

    def check(self, heads: int, dim: int) -> None:
        if heads * dim % BLOCK:
            raise refuse(
                self.name,
                heads,
                dim,
                f"a row of {heads * dim} fills no whole blocks of {BLOCK}",
                "llama.cpp refuses it too: use int8 or int4",
            )

    def kernel(self) -> Kernel:
        from kvctl.techniques.codecs.block_kernels import GgmlKernel

        return GgmlKernel(self)

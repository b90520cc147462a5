"""Small floats: fp8 by a cast, vLLM's formats with a scale for each token and head, MXFP8, MXFP4 and NVFP4.

Sources: vLLM's cache kernels (triton_reshape_and_cache_flash.py, int4_per_token_head.py); OCP Microscaling
Formats 1.0; NVIDIA's description of NVFP4 (e2m1 elements, an e4m3 scale per 16, one fp32 scale a tensor).
"""

from __future__ import annotations

from kvctl.formats import cache_format
from kvctl.techniques.codecs.base import Codec, Kernel, refuse


class Fp8(Codec):
    """One byte an element, saturating, as vLLM casts; `scales` are static and kept with the weights.

    `scales`: one for all heads (1.0: the plain cast) or one a head. x is stored as the cast of x / scale.
    NaN stays NaN, Inf saturates, element by element.

    `calibrated`: one scale for the tensor instead, as vLLM's --calculate-kv-scales has it: the largest finite absolute value of
    the first tokens that are packed (a prompt's, of all sequences) over the largest number of the format. A kernel keeps it.
    """

    form: str = "e4m3"
    """e4m3 or e5m2."""
    scales: tuple[float, ...] = (1.0,)
    calibrated: bool = False

    @property
    def beside(self) -> int:
        return 4 if self.calibrated else 0

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        return tokens * heads * dim

    def check(self, heads: int, dim: int) -> None:
        if len(self.scales) not in (1, heads) or not all(0 < scale < float("inf") for scale in self.scales):
            raise refuse(self.name, heads, dim, f"{len(self.scales)} scales", "one positive scale, or one a head")

    def kernel(self) -> Kernel:
        from kvctl.techniques.codecs.float_kernels import Fp8Kernel

        return Fp8Kernel(self)


class PerTokenHead(Codec):
    """vLLM's *_per_token_head formats: codes and one fp32 scale for each token and head.

    fp8: e4m3, scale amax / 448. int8: amax / 127, rounding half away from zero. int4: asymmetric with a 4-bit zero
    point in the lowest bits of the scale; vLLM rotates before it (a randomized Hadamard transform): compose with a
    rotation to see that quality.
    """

    form: str = "fp8"
    """fp8, int8 or int4."""

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        return tokens * heads * ((dim // 2 if self.form == "int4" else dim) + 4)

    def check(self, heads: int, dim: int) -> None:
        if self.form == "int4" and dim % 2:
            raise refuse(self.name, heads, dim, "two elements share a byte", "an even head size")

    def kernel(self) -> Kernel:
        from kvctl.techniques.codecs.float_kernels import PerTokenHeadKernel

        return PerTokenHeadKernel(self)


class Microscaled(Codec):
    """mxfp8 (e4m3), mxfp4 (e2m1): an e8m0 scale per 32; nvfp4: an e4m3 scale per 16.

    `tensor_scale` is NVFP4's fp32 scale of the whole tensor, kept with the weights: amax / (6 * 448) of what is
    to come, 1.0 uncalibrated.
    """

    tensor_scale: float = 1.0

    @property
    def block(self) -> int:
        """Elements that share a scale."""
        return cache_format(self.name).block

    def bytes(self, tokens: int, heads: int, dim: int, itemsize: int) -> int:
        return tokens * heads * cache_format(self.name).row_bytes(dim)

    def check(self, heads: int, dim: int) -> None:
        if dim % self.block:
            raise refuse(
                self.name,
                heads,
                dim,
                f"blocks of {self.block} do not divide a head",
                "another format, such as fp8_per_token_head or int8",
            )

    def kernel(self) -> Kernel:
        from kvctl.techniques.codecs.float_kernels import MicroscaledKernel

        return MicroscaledKernel(self)

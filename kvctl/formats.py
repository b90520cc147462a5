"""Number formats: what one row of cached elements really takes, scales included.

Sources: torch element sizes; ggml block structures (ggml-common.h: QK8_0, QK4_0, ...);
OCP Microscaling Formats 1.0 (MXFP8, MXFP4); NVIDIA NVFP4 (e2m1 with an e4m3 scale per 16).
"""

from __future__ import annotations

from kvctl.errors import UsageError
from kvctl.record import Record


class DType(Record):
    """An unquantised element type: `bytes` an element."""

    name: str
    bytes: int


FP32 = DType("fp32", 4)
BF16 = DType("bf16", 2)
FP16 = DType("fp16", 2)
INT64 = DType("int64", 8)

MODEL_DTYPES = (FP32, BF16, FP16)
TORCH_NAMES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""What torch calls the model dtypes."""

_DTYPE_ALIASES = {
    "fp32": FP32, "float32": FP32, "float": FP32, "f32": FP32,
    "bf16": BF16, "bfloat16": BF16,
    "fp16": FP16, "float16": FP16, "half": FP16, "f16": FP16,
}  # fmt: skip


def model_dtype(name: str) -> DType | None:
    """The model dtype that `name` spells (torch's names and short ones), or None."""
    return _DTYPE_ALIASES.get(name.lower().removeprefix("torch."))


class CacheFormat(Record):
    """How keys or values are stored: `block_bytes` for every `block` elements of a row.

    A row is what one token holds in one layer, all KV heads together; a row that does
    not fill its last block still takes all of it. `scheme` says it in words.
    """

    name: str
    block: int
    block_bytes: int
    scheme: str
    head_bytes: int = 0
    """Extra bytes for every token and KV head (a scale of its own)."""
    values: CacheFormat | None = None
    """The format of values, where the same name stands for another one there."""

    def row_bytes(self, elements: int, heads: int = 1) -> int:
        """Bytes of one token's row of `elements`, spread over `heads` KV heads."""
        if not elements:
            return 0
        return -(-elements // self.block) * self.block_bytes + heads * self.head_bytes

    @property
    def bits(self) -> float:
        """Bits an element in full blocks, without per-head scales."""
        return 8 * self.block_bytes / self.block


def plain(dtype: DType) -> CacheFormat:
    """The format of a cache that keeps the elements as they are."""
    return CacheFormat(dtype.name, 1, dtype.bytes, f"{dtype.bytes} bytes an element")


CACHE_FORMATS: tuple[CacheFormat, ...] = (
    plain(FP32),
    plain(BF16),
    plain(FP16),
    CacheFormat("fp8", 1, 1, "1 byte an element; one scale a tensor, kept with the weights"),
    CacheFormat("fp8_per_token_head", 1, 1, "1 byte an element + a 4-byte scale for each token and KV head", 4),
    CacheFormat("mxfp8", 32, 32 + 1, "33 bytes per 32 elements: 8-bit floats and one e8m0 scale"),
    CacheFormat("nvfp4", 16, 8 + 1, "9 bytes per 16 elements: e2m1 and one e4m3 scale; one scale a tensor, kept with the weights"),
    CacheFormat("mxfp4", 32, 16 + 1, "17 bytes per 32 elements: e2m1 and one e8m0 scale"),
    CacheFormat("int8", 64, 64 + 2 + 2, "68 bytes per 64 elements: 8-bit with a 16-bit scale and zero (8.5 bits)"),
    CacheFormat("int8_per_token_head", 1, 1, "1 byte an element + a 4-byte scale for each token and KV head", 4),
    CacheFormat("int4", 64, 32 + 2 + 2, "36 bytes per 64 elements: 4-bit with a 16-bit scale and zero (4.5 bits)"),
    CacheFormat("int2", 64, 16 + 2 + 2, "20 bytes per 64 elements: 2-bit with a 16-bit scale and zero (2.5 bits)"),
    CacheFormat("q8_0", 32, 32 + 2, "34 bytes per 32 elements: 8-bit and an fp16 scale"),
    CacheFormat("q5_1", 32, 16 + 4 + 2 + 2, "24 bytes per 32 elements: 5-bit, an fp16 scale and minimum"),
    CacheFormat("q5_0", 32, 16 + 4 + 2, "22 bytes per 32 elements: 5-bit and an fp16 scale"),
    CacheFormat("q4_1", 32, 16 + 2 + 2, "20 bytes per 32 elements: 4-bit, an fp16 scale and minimum"),
    CacheFormat("q4_0", 32, 16 + 2, "18 bytes per 32 elements: 4-bit and an fp16 scale"),
    CacheFormat("iq4_nl", 32, 16 + 2, "18 bytes per 32 elements: 4-bit code book and an fp16 scale"),
)  # fmt: skip

_FORMAT_ALIASES = {
    **{alias: dtype.name for alias, dtype in _DTYPE_ALIASES.items()},
    "fp8_e4m3": "fp8", "fp8_e5m2": "fp8", "float8_e4m3fn": "fp8", "float8_e5m2": "fp8", "fp8_inc": "fp8",
}  # fmt: skip
_BY_NAME = {fmt.name: fmt for fmt in CACHE_FORMATS}


def cache_format(name: str, *, option: str = "--kv-dtype") -> CacheFormat:
    """Look a cache format up by name or alias; unknown names list what there is."""
    key = name.lower().removeprefix("torch.")
    fmt = _BY_NAME.get(_FORMAT_ALIASES.get(key, key))
    if fmt is None:
        import difflib

        near = difflib.get_close_matches(key[:40], _BY_NAME, 3)
        raise UsageError(
            f"{option}: unknown cache format {name[:40]!r}",
            hint=(f"nearest: {', '.join(near)}; " if near else "") + "all: auto, " + ", ".join(_BY_NAME),
        )
    return fmt

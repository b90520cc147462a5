"""What bitsandbytes' tensors mean, read by other means than they were written: the judge of packed files.

Nothing here is shared with bitsandbytes. The values of NF4 are those of QLoRA (Dettmers et al. 2023, appendix E);
FP4's are a sign, two bits of exponent and one of mantissa, as bitsandbytes documents them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from kvctl.errors import SourceError

NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
)  # fmt: skip
_HALF = (0.0, 0.0052083333, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
FP4 = (*_HALF, *(-value for value in _HALF))
BOOKS = {"nf4": NF4, "fp4": FP4}
BLOCK, NESTED = 64, 256
FARTHEST = {kind: max(b - a for a, b in zip(sorted(book), sorted(book)[1:], strict=False)) / 2
            for kind, book in BOOKS.items()}  # fmt: skip
"""How far a weight may be from what stands for it, in its block's largest: half the widest gap."""


def words(blob: Any) -> Mapping[str, Any]:
    """What bitsandbytes notes beside a layer (numpy uint8)."""
    try:
        found = json.loads(bytes(blob.tobytes()))
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise SourceError("a quant_state is no JSON", hint="the file is not what was written: quantize again")
    return found


def absmax(parts: Mapping[str, Any], facts: Mapping[str, Any]) -> Any:
    """The largest of each block of 64 weights, float32 (numpy); `parts` are a layer's tensors by the ends of their names."""
    import numpy as np

    stored = parts["absmax"].astype(np.int64)
    if "nested_absmax" not in parts:
        return parts["absmax"]
    of = np.arange(len(stored)) // NESTED
    return (parts["nested_quant_map"][stored] * parts["nested_absmax"][of] + np.float32(facts["nested_offset"])).astype(
        np.float32
    )


def rounding(parts: Mapping[str, Any], blocks: int) -> Any:
    """How far each block's stored largest may be from the true one (numpy): nothing, where they are not in 8 bits."""
    import numpy as np

    if "nested_absmax" not in parts:
        return np.zeros(blocks, dtype=np.float32)
    gap = np.diff(np.sort(parts["nested_quant_map"])).max() / 2
    return 1.02 * gap * parts["nested_absmax"][np.arange(blocks) // NESTED]


def four_bits(packed: Any, scales: Any, kind: str, begin: int, count: int) -> Any:
    """Weights float32 from `begin`, which is even, of a layer's packed bytes (numpy): the upper half of a byte is first."""
    import numpy as np

    data = packed.reshape(-1)[begin // 2 : (begin + count + 1) // 2]
    codes = np.empty(2 * len(data), dtype=np.uint8)
    codes[::2], codes[1::2] = data >> 4, data & 15
    of = (begin + np.arange(count)) // BLOCK
    return np.asarray(BOOKS[kind], dtype=np.float32)[codes[:count]] * scales[of]


def int8(packed: Any, scales: Any) -> Any:
    """Weights float32 [rows, inputs] of whole rows and the largest of each (numpy)."""
    import numpy as np

    return packed.astype(np.float32) * (scales.astype(np.float32)[:, None] / np.float32(127))

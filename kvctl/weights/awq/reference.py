"""What AWQ tensors mean, read slowly and by other means than they were written: the judge of packed files.

Nothing here is shared with the packer, nor with any kernel.
"""

from __future__ import annotations

from typing import Any

# Where output k of eight lies: the inverse of the order in which they are written, as bit offsets.
_SHIFTS = (0, 16, 4, 20, 8, 24, 12, 28)


def unpack(words: Any) -> Any:
    """Codes uint8 [rows, 8 * columns] of int32 words [rows, columns] (numpy)."""
    import numpy as np

    bits = np.ascontiguousarray(words).view(np.uint32)
    codes = np.empty((bits.shape[0], bits.shape[1] * 8), dtype=np.uint8)
    for k, shift in enumerate(_SHIFTS):
        codes[:, k::8] = (bits >> np.uint32(shift)) & np.uint32(15)
    return codes


def dequantize(qweight: Any, qzeros: Any, scales: Any) -> Any:
    """Weights float32 [outputs, inputs] of a layer's three tensors (numpy)."""
    import numpy as np

    codes, zeros = unpack(qweight), unpack(qzeros)
    group = codes.shape[0] // zeros.shape[0]
    of = np.arange(codes.shape[0]) // group
    steps = codes.astype(np.int16) - zeros.astype(np.int16)[of]
    return np.ascontiguousarray((steps.astype(np.float32) * scales.astype(np.float32)[of]).T)

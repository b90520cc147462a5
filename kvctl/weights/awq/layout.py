"""The layout of AutoAWQ's GEMM checkpoints, which vLLM and transformers read.

A linear layer [outputs, inputs] is stored transposed: `qweight` int32 [inputs, outputs / 8], `qzeros` int32
[inputs / group, outputs / 8] and `scales` float16 [inputs / group, outputs]; a weight is (code - zero) * scale. Eight
codes share an int32, in the order in which GPUs unpack them: output 8j + ORDER[k] lies in bits 4k to 4k + 3.
(AutoAWQ 0.2.9, awq/modules/linear/gemm.py and awq/utils/packing_utils.py.)
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, UsageError

if TYPE_CHECKING:
    import torch

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
BITS = 4
PER_WORD = 32 // BITS
GROUPS = (128, 64, 32)
_RANKS = range(1, 17)


def pack(codes: torch.Tensor) -> torch.Tensor:
    """Codes uint8 [rows, outputs] as int32 [rows, outputs / 8]."""
    import torch

    rows, columns = codes.shape
    words = torch.zeros(rows, columns // PER_WORD, dtype=torch.int64)
    by_word = codes.reshape(rows, columns // PER_WORD, PER_WORD).to(torch.int64)
    for place, output in enumerate(ORDER):
        words |= by_word[:, :, output] << (BITS * place)
    # The upper half of what 32 bits hold are negative numbers.
    return torch.where(words >= 1 << 31, words - (1 << 32), words).to(torch.int32)


def packed(codes: torch.Tensor, zeros: torch.Tensor, scales: torch.Tensor) -> dict[str, torch.Tensor]:
    """The three tensors of a layer from codes [outputs, inputs], zeros and scales [outputs, inputs / group]."""
    return {
        "qweight": pack(codes.T.contiguous()),
        "qzeros": pack(zeros.T.contiguous()),
        "scales": scales.T.contiguous(),
    }


def choose_group(inputs: Iterable[int], wanted: int | None = None) -> int:
    """How many inputs share a scale, for layers with so many inputs: one number holds for all of them.

    Raises:
        UsageError: the one that was asked for does not divide all.
        ConfigError: none does.

    """
    widths = sorted(set(inputs))
    if wanted is None:
        for group in GROUPS:
            if all(width % group == 0 for width in widths):
                return group
        raise ConfigError(f"no group of {', '.join(map(str, GROUPS))} divides inputs of {_listed(widths, GROUPS[-1])}",
                          hint="nf4, fp4 and int8 have no such groups")  # fmt: skip
    if wanted not in GROUPS:
        raise UsageError(f"groups of {wanted} inputs: readers of AWQ know {', '.join(map(str, GROUPS))}")
    if any(width % wanted for width in widths):
        fits = next((group for group in GROUPS if all(width % group == 0 for width in widths)), None)
        raise UsageError(f"groups of {wanted} do not divide inputs of {_listed(widths, wanted)}",
                         hint=f"groups of {fits} do" if fits else "nf4, fp4 and int8 have no such groups")  # fmt: skip
    return wanted


def _listed(widths: Iterable[int], group: int) -> str:
    return ", ".join(f"{width:,}" for width in widths if width % group)


def ranks_that_fit(cut: Iterable[int], group: int) -> tuple[int, ...]:
    """Tensor-parallel sizes that leave whole groups of the inputs that ranks share (those of o_proj and down_proj)."""
    widths = set(cut)
    return tuple(ranks for ranks in _RANKS if all(width % (ranks * group) == 0 for width in widths))


def quantization_config(group: int, plain: Iterable[str]) -> dict[str, Any]:
    """What config.json says; `plain` names modules that are not packed.

    Readers look for these names anywhere in a module's: they have to be whole ones.
    """
    return {
        "quant_method": "awq",
        "version": "gemm",
        "bits": BITS,
        "group_size": group,
        "zero_point": True,
        "modules_to_not_convert": list(plain) or None,
    }

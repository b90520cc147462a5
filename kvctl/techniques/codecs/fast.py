"""One-pass loops where numba is installed; without it, or for what they do not serve, torch's passes give the same bits."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import torch

Tensor = Any
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.uint16, torch.uint8: torch.uint8}
STEP = 32
"""Elements that the loops take at once."""
_UNTRIED = (0, 70)
SHARE = 1 << 17
"""Elements below which another thread costs more than it takes off."""


@cache
def loops() -> Any:
    """The module of compiled loops; None without numba, or with one whose inner parts nobody has tried."""
    try:
        import numba

        if not (0, 61) <= tuple(int(part) for part in numba.__version__.split(".")[:2]) < _UNTRIED:
            return None
        from kvctl.techniques.codecs import loops as found
    except (ImportError, ValueError):  # ImportError is also numba's word for a numpy that it does not know
        return None
    return found


def serves(x: Tensor, size: int) -> bool:
    """Whether the loops take these elements in groups of `size`."""
    return bool(x.is_cpu and x.numel() and size % STEP == 0 and loops() is not None)


def given(x: Tensor) -> Tensor:
    """Elements as the loops take them: fp32 or bf16, one behind the other."""
    return (x if x.dtype in (torch.float32, torch.bfloat16) else x.float()).contiguous()


def made(dtype: Any) -> Any:
    """The type that the loops write for one that is wanted."""
    return torch.bfloat16 if dtype == torch.bfloat16 else torch.float32


def flat(x: Tensor) -> Any:
    """numpy's view of the bits of a contiguous tensor."""
    return x.detach().view(BITS[x.dtype]).numpy().reshape(-1)


def column(x: Tensor) -> Any:
    """numpy's view of the bits of one dimension."""
    return x.detach().view(BITS[x.dtype]).numpy()


@cache
def helpers(process: int, count: int) -> ThreadPoolExecutor:
    """Threads besides this one; those of a parent process are not there."""
    return ThreadPoolExecutor(count, thread_name_prefix="kvctl-codec")


def run(loop: Callable[..., None], arrays: tuple[Any, ...], rows: int, elements: int, multiple: int = 1) -> None:
    """The loop over all rows, on as many threads as torch has."""
    threads = max(1, min(torch.get_num_threads(), elements // SHARE))
    share = -(-rows // threads // multiple) * multiple
    starts = list(range(share, rows, share))
    others = [helpers(os.getpid(), threads - 1).submit(loop, *arrays, at, min(at + share, rows)) for at in starts]
    loop(*arrays, 0, min(share, rows))
    for other in others:
        other.result()


def encode(
    form: str, rows: Tensor, width: int, records: Tensor, place: int, scale: Tensor, minimum: Tensor | None
) -> None:
    """Pack rows [groups, size] into records [groups, bytes] at byte `place`, scales and minima [groups] besides."""
    kind, size = loops(), rows.shape[-1]
    loop = kind.encoder(getattr(kind, form), size, width, records.shape[-1], place)
    numbers = column(scale)
    arrays = (flat(given(rows)), flat(records), numbers, numbers if minimum is None else column(minimum))
    run(loop, arrays, rows.shape[0], rows.numel(), kind.ROWS)


def decode(form: str, size: int, width: int, records: Tensor, place: int, scale: Tensor, minimum: Tensor | None, dtype: Any) -> Tensor:  # fmt: skip
    """The reverse of `encode`: rows [groups, size] of `dtype`."""
    kind = loops()
    rows = torch.empty((records.shape[0], size), dtype=made(dtype))
    loop = kind.decoder(getattr(kind, form), size, width, records.shape[-1], place)
    numbers = column(scale)
    arrays = (flat(records.contiguous()), numbers, numbers if minimum is None else column(minimum), flat(rows))
    run(loop, arrays, rows.shape[0], rows.numel(), kind.ROWS)
    return rows.to(dtype)


def encode_channels(form: str, x: Tensor, width: int, packed: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    """Pack x [groups, tokens, dim] into bytes [groups, tokens * width / 8, dim], scales and minima [groups, dim]."""
    kind = loops()
    loop = kind.channel_encoder(getattr(kind, form), x.shape[-2], x.shape[-1], width)
    numbers = flat(scale)
    arrays = (flat(given(x)), flat(packed), numbers, numbers if minimum is None else flat(minimum))
    run(loop, arrays, x.shape[0], x.numel())


def decode_channels(form: str, x: Tensor, width: int, packed: Tensor, scale: Tensor, minimum: Tensor | None) -> None:
    """The reverse of `encode_channels`, into x."""
    kind = loops()
    loop = kind.channel_decoder(getattr(kind, form), x.shape[-2], x.shape[-1], width)
    numbers = flat(scale.contiguous())
    arrays = (flat(packed.contiguous()), numbers, numbers if minimum is None else flat(minimum.contiguous()), flat(x))
    run(loop, arrays, x.shape[0], x.numel())


def cast(x: Tensor) -> Tensor:
    """Bytes of e4m3."""
    packed = torch.empty(x.shape, dtype=torch.uint8)
    run(loops().cast, (flat(given(x)), flat(packed)), x.numel() // STEP, x.numel())
    return packed


def uncast(packed: Tensor, dtype: Any) -> Tensor:
    """The reverse of `cast`."""
    x = torch.empty(packed.shape, dtype=made(dtype))
    run(loops().uncast, (flat(packed.contiguous()), flat(x)), x.numel() // STEP, x.numel())
    return x.to(dtype)

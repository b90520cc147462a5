"""The Hadamard rotation (QuaRot, arXiv 2404.00456): spreads outliers over all channels, and is its own inverse."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

Tensor = Any
MATRIX = 256
"""Up to this size a product with the matrix is faster than the butterfly."""


def rotated_width(dim: int) -> int:
    """Channels that are rotated together: the largest power of two that divides `dim`."""
    return dim & -dim


@lru_cache(maxsize=16)
def _matrix(width: int, device: Any) -> Tensor:
    import torch

    matrix = torch.ones(1, 1, dtype=torch.float64)
    while matrix.shape[0] < width:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return (matrix / width**0.5).to(device=device, dtype=torch.float32)


def rotate(x: Tensor) -> Tensor:
    """x [..., dim] times the orthonormal Hadamard matrix, in fp32 inside, of x's dtype.

    Rotating twice gives x back up to rounding. Where dim is no power of two, neighbouring blocks of
    `rotated_width` channels are rotated each by itself.
    """
    width = rotated_width(x.shape[-1])
    if width == 1:
        return x
    y = x.float().reshape(*x.shape[:-1], -1, width)
    if width <= MATRIX:
        return (y @ _matrix(width, x.device)).reshape(x.shape).to(x.dtype)
    return _butterfly(y, width).reshape(x.shape).to(x.dtype)


def _butterfly(y: Tensor, width: int) -> Tensor:
    """The fast Walsh-Hadamard transform of the last dimension."""
    import torch

    step = 1
    while step < width:
        pairs = y.unflatten(-1, (-1, 2, step))
        first, second = pairs[..., 0, :], pairs[..., 1, :]
        y = torch.stack((first + second, first - second), -2).flatten(-3)
        step *= 2
    return y / width**0.5

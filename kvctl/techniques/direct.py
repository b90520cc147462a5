"""Attention of one new token over rows as they are stored. Imported where torch is.

A step of decoding reads every row once. Handing all of them out unpacked, keys and values side by side with what lies
around them, moves several times the bytes that packing has saved; here they are unpacked piece by piece, in fp32, and
summed up at once. CPUs gain twice: their bf16 attention for a single query is slower than unpacking.
"""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import Tensor

    from kvctl.techniques.caches import Rows

_ABOUT = frozenset({
    torch.Tensor.shape.__get__, torch.Tensor.dtype.__get__, torch.Tensor.device.__get__, torch.Tensor.ndim.__get__,
    torch.Tensor.size, torch.Tensor.dim,
})  # fmt: skip
"""What can be told of rows without unpacking them."""


class Stored(torch.Tensor):  # type: ignore[misc]
    """Rows [batch, heads, tokens, dim] that are unpacked when anything but `attention` works with them. There is no memory behind
    them: what does not know them finds nothing that could pass for rows."""

    _rows: Rows
    _unpacked: Tensor | None
    _held: int

    @staticmethod
    def of(rows: Rows) -> Stored:
        """All that are held now."""
        like = rows.newest
        assert like is not None
        shape = (like.shape[0], like.shape[1], len(rows), like.shape[3])
        out: Stored = torch.Tensor._make_wrapper_subclass(Stored, shape, dtype=like.dtype, device=like.device)
        out._rows, out._unpacked, out._held = rows, None, len(rows)
        return out

    def rows(self) -> Rows:
        """Where they are.

        Raises:
            RuntimeError: other tokens have joined them since.

        """
        if len(self._rows) != self._held:
            raise RuntimeError(f"rows of {self._held} tokens were kept, and {len(self._rows)} are held by now")
        return self._rows

    def unpacked(self) -> Tensor:
        """A plain tensor; see `rows`."""
        if self._unpacked is None:
            self._unpacked = self.rows().read()
        return self._unpacked

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Iterable[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """See torch: called instead of any function that is given such rows."""
        if func in _ABOUT:
            return super().__torch_function__(func, types, args, kwargs or {})
        return func(*_plain(args), **_plain(kwargs or {}))

    __torch_dispatch__ = __torch_function__


def _plain(given: Any) -> Any:
    if isinstance(given, Stored):
        return given.unpacked()
    if isinstance(given, tuple | list):
        return type(given)(_plain(each) for each in given)
    return {name: _plain(each) for name, each in given.items()} if isinstance(given, dict) else given


def without_autocast(device: str) -> contextlib.AbstractContextManager[Any]:
    """Operations in the types of their operands, whatever autocast would have: it knows neither codes nor scales."""
    return torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else contextlib.nullcontext()


def attention(query: Tensor, keys: Rows, values: Rows, scaling: float) -> Tensor:
    """Of a query [batch, query heads, 1, dim] over all rows [batch, heads, tokens, dim]: [batch, 1, query heads, value dim]."""
    with without_autocast("cpu"):
        return _attention(query, keys, values, scaling)


def _attention(query: Tensor, keys: Rows, values: Rows, scaling: float) -> Tensor:
    from kvctl.techniques.codecs.hadamard import rotate

    batch, heads = query.shape[0], keys.heads
    asked = query.reshape(batch * heads, query.shape[1] // heads, query.shape[-1]).float() * scaling
    turned = rotate(asked) if keys.rotated else asked  # of two rotated rows the product is that of the rows
    scores = [torch.bmm(turned if packed else asked, rows.transpose(1, 2)) for rows, packed in keys.pieces()]
    weights = torch.cat(scores, -1).softmax(-1)
    out, start = None, 0
    for rows, packed in values.pieces():
        part = torch.bmm(weights[:, :, start : start + rows.shape[1]], rows)
        part = rotate(part) if packed and values.rotated else part
        out = part if out is None else out.add_(part)
        start += rows.shape[1]
    assert out is not None
    return out.to(query.dtype).reshape(batch, 1, query.shape[1], -1)

"""The model changed before it runs: KV heads joined to fewer, as in grouped-query attention (Ainslie et al., 2023, arXiv
2305.13245). The keys' and values' projections of every group of heads are averaged; the paper trains on after that, and
nothing here does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.structure import pooled

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec
    from kvctl.techniques.options import Options


class Convert(Record):
    """So many KV heads in every layer."""

    heads: int

    @property
    def name(self) -> str:
        return f"gqa:{self.heads}"

    def predicted(self, spec: ModelSpec, engine: str) -> ModelSpec:
        """The model as it is then.

        Raises:
            UsageError: they do not divide a layer's KV heads.
            ConfigError: it keeps no keys and values of heads.

        """
        return pooled(spec, self.heads, self.name, engine)

    def apply(self, model: Any, spec: ModelSpec) -> Callable[[], None]:
        """Change `model`, which `spec` tells of; what changes it back, exactly. Imports torch.

        Raises:
            ConfigError: its attention is not one that kvctl knows how to change; it is as it was.

        """
        from kvctl.techniques.torch_convert import joined

        return joined(model, spec, self.heads, self.name)


def build(options: Options) -> Convert:
    """`gqa:1`."""
    text = options.first("")
    if not text:
        raise UsageError("gqa: how many KV heads are to stay is not said", hint="gqa:1, or gqa:4")
    if not text.isascii() or not text.isdecimal() or not int(text[:9]) > 0:
        raise UsageError(f"gqa:{text[:40]} is no number of KV heads", hint="gqa:1, or gqa:4")
    return Convert(int(text[:9]))

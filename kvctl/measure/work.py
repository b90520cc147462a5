"""Counting what a pass does on its operations: floating-point work, and the weights that it reads."""

from __future__ import annotations

from typing import Any

from kvctl.measure.fill import local
from kvctl.record import Record


class Counted(Record):
    """Of one pass."""

    flops: int
    """Multiplications and additions of matrix products, attention and convolutions."""
    weight_bytes: int
    """Parameters that were read, each byte once; of an embedding the rows that were looked up."""


class WorkCounter:
    """A context in which operations are counted; slow, so never around a pass that is timed."""

    def __init__(self, model: Any) -> None:
        self._parameters = {
            tensor.untyped_storage().data_ptr()
            for tensor in map(local, (*model.parameters(), *model.buffers()))
            if tensor.numel()
        }

    def __enter__(self) -> WorkCounter:
        from torch.utils.flop_counter import FlopCounterMode

        self._flops: Any = FlopCounterMode(display=False, custom_mapping=_formulas())
        self._reads: Any = _reads_mode()(self._parameters)
        self._reads.__enter__()
        self._flops.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._flops.__exit__(*error)
        self._reads.__exit__(*error)

    def counted(self) -> Counted:
        """What was counted up to now."""
        return Counted(int(self._flops.get_total_flops()), _covered(self._reads.ranges) + self._reads.rows)


def _formulas() -> dict[Any, Any]:
    """Operations that torch's own counter does not know, by the shapes of what they take."""
    import torch
    from torch.utils.flop_counter import sdpa_flop_count

    def grouped(tokens: Any, weights: Any, *_: Any, **__: Any) -> int:
        return 2 * int(tokens[0]) * int(weights[-2]) * int(weights[-1])

    def attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
        return int(sdpa_flop_count(query, key, value))

    found = {}
    for library, name, formula in (
        ("aten", "_grouped_mm", grouped),
        ("transformers", "grouped_mm_fallback", grouped),
        ("aten", "_scaled_dot_product_flash_attention_for_cpu", attention),
    ):
        operation = getattr(getattr(torch.ops, library), name, None)
        if operation is not None:
            found[operation] = formula
    return found


def _reads_mode() -> Any:
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    aten = torch.ops.aten
    views = {"view", "t", "transpose", "permute", "slice", "select", "expand", "unsqueeze", "squeeze", "detach", "alias",
             "_unsafe_view", "reshape", "split", "chunk", "unbind", "as_strided", "_to_copy_noop"}  # fmt: skip

    class Reads(TorchDispatchMode):  # type: ignore[misc]
        """Byte ranges of parameters that operations take in; views of them read nothing yet."""

        def __init__(self, parameters: set[int]) -> None:
            super().__init__()
            self.parameters = parameters
            self.ranges: dict[int, list[tuple[int, int]]] = {}
            self.rows = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            name = func._schema.name.partition("::")[2]
            if name not in views:
                if func._overloadpacket is aten.embedding or name in ("index_select", "index"):
                    self._looked_up(args)
                else:
                    for value in (*args, *(kwargs or {}).values()):
                        for tensor in value if isinstance(value, (list, tuple)) else (value,):
                            if isinstance(tensor, torch.Tensor):
                                self._whole(local(tensor), args, name)
            return func(*args, **(kwargs or {}))

        def _own(self, tensor: Any) -> bool:
            return tensor.device.type != "meta" and tensor.untyped_storage().data_ptr() in self.parameters

        def _whole(self, tensor: Any, args: Any, name: str) -> None:
            if not self._own(tensor) or not tensor.numel():
                return
            # A shared tensor's repeats are one in memory.
            extent = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            size = min(extent, tensor.numel()) * tensor.element_size()
            if "grouped_mm" in name and tensor.dim() == 3:
                size = size * _groups_used(args) // tensor.shape[0]
                self.rows += size
                return
            self.ranges.setdefault(tensor.untyped_storage().data_ptr(), []).append(
                (tensor.data_ptr(), tensor.data_ptr() + size)
            )

        def _looked_up(self, args: Any) -> None:
            table = local(args[0])
            if isinstance(table, torch.Tensor) and self._own(table) and table.dim() > 1:
                picks = args[1][0] if isinstance(args[1], (list, tuple)) else args[-1] if len(args) > 2 else args[1]
                if isinstance(picks, torch.Tensor) and picks.dtype != torch.bool:
                    self.rows += local(picks).unique().numel() * table[0].numel() * table.element_size()

    def _groups_used(args: Any) -> int:
        """Groups that have rows: the ends of the groups stand in the last tensor of whole numbers."""
        ends = next((a for a in reversed(args) if isinstance(a, torch.Tensor) and a.dtype == torch.int32), None)
        if ends is None:
            return 0
        return int((torch.diff(ends, prepend=ends.new_zeros(1)) > 0).sum())

    return Reads


def _covered(ranges: dict[int, list[tuple[int, int]]]) -> int:
    """Bytes in any of the ranges."""
    total = 0
    for spans in ranges.values():
        end = 0
        for low, high in sorted(spans):
            total += max(0, high - max(low, end))
            end = max(end, high)
    return total

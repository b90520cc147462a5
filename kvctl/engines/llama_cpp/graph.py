"""ggml's graphs as far as their memory goes: tensors in the order of execution, and the allocator that reuses it.

Source: llama.cpp b11434 ggml/src/ggml.c (ggml_visit_parents_graph), ggml/src/ggml-alloc.c (which operations write
into their argument, when a tensor is let go, best fit among the free blocks).
"""

from __future__ import annotations

from collections.abc import Iterable


class Tensor:
    """A node of a graph: bytes, what it reads, and whether it lies in memory of its own."""

    __slots__ = ("children", "held", "inplace", "kept", "offset", "root", "shape", "size", "sources", "views")

    def __init__(
        self,
        size: int,
        sources: Iterable[Tensor] = (),
        *,
        inplace: bool = False,
        root: Tensor | None = None,
        kept: bool = False,
        shape: tuple[int, ...] = (),
    ) -> None:
        self.size, self.sources, self.inplace, self.root, self.kept = size, tuple(sources), inplace, root, kept
        self.shape = shape
        """Tensors of one shape may take each other's place; empty for views that are not contiguous."""
        self.children = self.views = 0
        self.offset = -1
        self.held = False


class Graph:
    """Nodes in the order in which they run."""

    def __init__(self) -> None:
        self.leaves: list[Tensor] = []
        self.nodes: list[Tensor] = []
        self._seen: set[int] = set()

    def expand(self, tensor: Tensor) -> None:
        """Add what `tensor` needs, and then it."""
        if id(tensor) in self._seen:
            return
        self._seen.add(id(tensor))
        for source in tensor.sources:
            self.expand(source)
        (self.nodes if tensor.sources else self.leaves).append(tensor)

    def peak(self, alignment: int) -> int:
        """Bytes of the buffer that holds the graph; it can be asked once."""
        memory = _Memory(alignment)
        for leaf in self.leaves:
            _allocate(leaf, memory)
        for node in self.nodes:
            if node.root is not None:
                node.root.views += 1
            for source in node.sources:
                source.children += 1
        for node in self.nodes:
            _allocate(node, memory)
            for source in node.sources:
                source.children -= 1
                if source.children == 0 and source.views == 0:
                    _let_go(source, memory)
        return memory.most


def _allocate(tensor: Tensor, memory: _Memory) -> None:
    if tensor.held or tensor.root is not None or not tensor.size:
        return
    tensor.held = True
    if tensor.inplace:
        for parent in tensor.sources:
            # Views hold no memory of their own, and are never written into.
            if (
                parent.root is None
                and parent.held
                and not parent.kept
                and parent.children == 1
                and not parent.views
                and (parent.shape == tensor.shape)
            ):
                tensor.offset, parent.held = parent.offset, False
                memory.free(tensor.offset + memory.pad(tensor.size), memory.pad(parent.size) - memory.pad(tensor.size))
                return
    tensor.offset = memory.allocate(tensor.size)


def _let_go(tensor: Tensor, memory: _Memory) -> None:
    if tensor.root is not None:
        base = tensor.root
        base.views -= 1
        if base.views or base.children:
            return
        tensor = base
    if tensor.held and not tensor.kept:
        tensor.held = False
        memory.free(tensor.offset, memory.pad(tensor.size))


class _Memory:
    """Free blocks, sorted by offset; the last has no end."""

    def __init__(self, alignment: int) -> None:
        self.alignment, self.most = alignment, 0
        self.blocks: list[list[int]] = [[0, 2**62]]

    def pad(self, size: int) -> int:
        return -(-size // self.alignment) * self.alignment

    def allocate(self, size: int) -> int:
        size = self.pad(size)
        fitting = [block for block in self.blocks[:-1] if block[1] >= size]
        # Of equal ones the last, as in the original's loop.
        block = min(reversed(fitting), key=lambda block: block[1], default=self.blocks[-1])
        offset = block[0]
        block[0] += size
        block[1] -= size
        if not block[1]:
            self.blocks.remove(block)
        self.most = max(self.most, offset + size)
        return offset

    def free(self, offset: int, size: int) -> None:
        if size <= 0:
            return
        at = next((i for i, block in enumerate(self.blocks) if block[0] > offset), len(self.blocks))
        self.blocks.insert(at, [offset, size])
        for left in (at, at - 1):
            if 0 <= left < len(self.blocks) - 1 and sum(self.blocks[left]) == self.blocks[left + 1][0]:
                self.blocks[left][1] += self.blocks.pop(left + 1)[1]

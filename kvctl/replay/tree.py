"""Blocks of prompts that later requests may find: a radix tree with reference counts.

A node is a run of blocks with one parent and no branch. Nodes that nobody holds stay until their blocks are needed;
of these the one released longest ago goes first, and of one release the deepest, from its end, a block at a time.
A node is never released after its parent (whoever holds it holds the parent too), so that the first in that order
is always a leaf. This is the order of vLLM's queue of free blocks and of SGLang's eviction of leaves.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable

Keys = tuple[Hashable, ...]


class Node:
    """Blocks `start` to `end` (exclusive) of the prompts that lead here, and the keys of the units that they touch."""

    __slots__ = ("children", "end", "holders", "keys", "parent", "start")

    def __init__(self, parent: Node | None, keys: Keys, start: int, end: int, holders: int) -> None:
        self.parent = parent
        self.keys = keys
        self.start = start
        self.end = end
        self.holders = holders
        self.children: dict[Hashable, Node] = {}


class Tree:
    """Keys name units of `per_unit` blocks each; equal keys at equal places below equal parents are equal tokens."""

    def __init__(self, per_unit: int) -> None:
        self.per_unit = per_unit
        self.root = Node(None, (), 0, 0, 1)
        self._unheld: OrderedDict[Node, None] = OrderedDict()

    def match(self, keys: Keys, limit: int) -> tuple[Node, Node | None, int]:
        """The last node that matches in full, the child that matches in part, and the blocks matched in all."""
        node, at, per_unit = self.root, 0, self.per_unit
        while at < limit:
            unit = at // per_unit
            child = node.children.get(keys[unit])
            if child is None:
                break
            own, reach = child.keys, child.end
            if keys[unit : unit + len(own)] != own:
                alike = 1
                for one, other in zip(own[1:], keys[unit + 1 :], strict=False):
                    if one != other:
                        break
                    alike += 1
                reach = min(reach, (unit + alike) * per_unit)
            at = min(reach, limit)
            if at < child.end:
                return node, child, at
            node = child
        return node, None, at

    def unheld(self, found: tuple[Node, Node | None, int]) -> int:
        """Blocks of a match that nobody holds."""
        node: Node | None
        node, inner, at = found
        count = at - inner.start if inner is not None and not inner.holders else 0
        while node is not None and not node.holders:
            count += node.end - node.start
            node = node.parent
        return count

    def hold(self, found: tuple[Node, Node | None, int]) -> tuple[Node, int]:
        """Hold all blocks of a match: the node that ends there, and how many of them nobody had held."""
        last, inner, at = found
        if inner is not None:
            last = self._split(inner, at)
        gained = 0
        node: Node | None = last
        while node is not None:
            if not node.holders:
                gained += node.end - node.start
                self._unheld.pop(node, None)
            node.holders += 1
            node = node.parent
        return last, gained

    def _split(self, node: Node, at: int) -> Node:
        """A new node for the blocks before `at`; the old one keeps the rest, its place in the queue and its name."""
        assert node.parent is not None
        first = node.start // self.per_unit
        upper = Node(node.parent, node.keys[: -(-at // self.per_unit) - first], node.start, at, node.holders)
        node.parent.children[node.keys[0]] = upper
        node.keys = node.keys[at // self.per_unit - first :]
        node.start, node.parent = at, upper
        upper.children[node.keys[0]] = node
        return upper

    def add(self, parent: Node, keys: Keys, end: int) -> Node:
        """New blocks after `parent`, held once; their parents must be held already."""
        start = parent.end
        node = Node(parent, keys[start // self.per_unit : -(-end // self.per_unit)], start, end, 1)
        parent.children[node.keys[0]] = node
        return node

    def release(self, last: Node) -> int:
        """Let go of the blocks up to `last`; how many nobody holds any more."""
        count = 0
        node: Node | None = last
        while node is not None:
            node.holders -= 1
            if not node.holders:
                count += node.end - node.start
                self._unheld[node] = None
            node = node.parent
        return count

    def evict(self, count: int) -> None:
        """Forget so many blocks of those that nobody holds; there must be as many."""
        unheld = self._unheld
        while count:
            node = next(iter(unheld))
            parent = node.parent
            assert parent is not None
            size = node.end - node.start
            if size > count:
                node.end -= count
                node.keys = node.keys[: -(-node.end // self.per_unit) - node.start // self.per_unit]
                return
            del unheld[node]
            del parent.children[node.keys[0]]
            node.parent = None
            count -= size

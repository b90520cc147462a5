"""Prompts that are in the cache, to be found by their tokens: a radix tree (SGLang's RadixAttention, arXiv 2312.07104).

Only whole blocks can be found. A node is a run of blocks without a branch; the tree holds each of its blocks once, so
what nobody else holds stays until it is needed. Then leaves go that were used longest ago, from their ends, a block
at a time.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from kvctl.techniques.paging.blocks import Blocks

Page = tuple[int, ...]


class Node:
    """Blocks in a row, and the tokens of each."""

    __slots__ = ("blocks", "children", "pages", "parent", "used")

    def __init__(self, parent: Node | None, pages: list[Page], blocks: list[int], used: int) -> None:
        self.parent, self.pages, self.blocks, self.used = parent, pages, blocks, used
        self.children: dict[Page, Node] = {}


class Radix:
    """An index over blocks of `size` tokens."""

    def __init__(self, blocks: Blocks, size: int) -> None:
        self.blocks, self.size = blocks, size
        self._root = Node(None, [], [], 0)
        self._clock = 0
        self.evicted = 0

    def find(self, tokens: Sequence[int]) -> list[int]:
        """Blocks of the longest prefix that is there, in whole blocks. At least the last token is never found: somebody
        has to compute what comes after it."""
        node, found = self._root, list[int]()
        self._clock += 1
        for node in self._path(self._pages(tokens, max(len(tokens) - 1, 0))):
            found += node.blocks
        return found

    def insert(self, tokens: Sequence[int], blocks: Sequence[int]) -> int:
        """Whole blocks of a sequence can be found from now on; how many were new. Where equal tokens are there already,
        those stay."""
        pages = self._pages(tokens, len(tokens))
        self._clock += 1
        node = self._root
        known = 0
        for node in self._path(pages):
            known += len(node.pages)
        if known < len(pages):
            own = list(blocks[known : len(pages)])
            self.blocks.hold(own)
            node.children[pages[known]] = Node(node, pages[known:], own, self._clock)
        return len(pages) - known

    def evict(self, number: int) -> None:
        """Set so many blocks free that nobody else holds, or as many as there are."""
        leaves = [(node.used, id(node), node) for node in self._nodes() if not node.children]
        heapq.heapify(leaves)
        while number > 0 and leaves:
            _, _, node = heapq.heappop(leaves)
            while number > 0 and node.blocks and self.blocks.holders(node.blocks[-1]) == 1:
                first = node.pages[0]
                node.pages.pop()
                self.blocks.drop([node.blocks.pop()])
                self.evicted += 1
                number -= 1
            if not node.blocks:
                parent = node.parent
                assert parent is not None
                del parent.children[first]
                if parent.parent is not None and not parent.children:
                    heapq.heappush(leaves, (parent.used, id(parent), parent))

    def clear(self) -> None:
        """Let go of everything."""
        for node in self._nodes():
            self.blocks.drop(node.blocks)
        self._root.children.clear()

    def __len__(self) -> int:
        """Blocks that it holds."""
        return sum(len(node.blocks) for node in self._nodes())

    def _pages(self, tokens: Sequence[int], most: int) -> list[Page]:
        size = self.size
        return [tuple(tokens[at : at + size]) for at in range(0, most - size + 1, size)]

    def _path(self, pages: list[Page]) -> list[Node]:
        """Nodes from the root on that match in full; one that matches in part is cut in two. All count as used now."""
        node, out, at = self._root, list[Node](), 0
        while at < len(pages) and (child := node.children.get(pages[at])) is not None:
            alike = 1
            while alike < len(child.pages) and at + alike < len(pages) and child.pages[alike] == pages[at + alike]:
                alike += 1
            if alike < len(child.pages):
                child = self._cut(child, alike)
            child.used = self._clock
            out.append(child)
            node, at = child, at + alike
        return out

    def _cut(self, node: Node, at: int) -> Node:
        """A node of the first `at` blocks, above one of the rest."""
        parent = node.parent
        assert parent is not None
        head = Node(parent, node.pages[:at], node.blocks[:at], node.used)
        parent.children[head.pages[0]] = head
        node.pages, node.blocks, node.parent = node.pages[at:], node.blocks[at:], head
        head.children[node.pages[0]] = node
        return head

    def _nodes(self) -> list[Node]:
        out, stack = list[Node](), list(self._root.children.values())
        while stack:
            node = stack.pop()
            out.append(node)
            stack += node.children.values()
        return out

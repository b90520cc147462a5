"""What sharing prefixes comes to: what was measured, in integers and seconds; ratios are derived and say what of."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.measure.statistics import Ratio, Sample

POLICIES = ("contiguous", "contiguous-pow2", "paged", "prefix")


class SharingAsked(Record):
    """Requests whose prompts begin alike."""

    context: int
    """Tokens of the longest prompt; the others are up to one block shorter, so that last blocks are full to all degrees."""
    share: float
    """Of the longest prompt, what all have in common."""
    requests: int = 8
    block: int = 16
    decode: int = 64
    repeat: int = 3
    branches: int = 4
    """Continuations of one prompt."""

    @property
    def common(self) -> int:
        """Tokens that all prompts begin with."""
        return max(round(self.share * self.context), 1)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each prompt."""
        step = max(self.block // self.requests, 1)
        least = min(self.common + 1, self.context)
        return tuple(max(self.context - at * step % self.block, least) for at in range(self.requests))


class Held(Record):
    """The memory of all requests at once, after their last tokens, as one policy lays it out."""

    policy: str
    bytes: int
    """Of tensors that are there; for contiguous policies, which nobody runs, calculated."""
    predicted_bytes: int | None
    """None where `bytes` are calculated themselves."""
    slots: int
    """Room for tokens."""
    stored: int
    """Tokens in it; of a shared block once."""
    blocks: int | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether the bytes are as predicted."""
        return None if self.predicted_bytes is None else self.bytes == self.predicted_bytes

    @property
    def unused(self) -> int:
        """Slots that are never filled: internal waste."""
        return self.slots - self.stored

    def to_dict(self) -> dict[str, Any]:
        return {
            "policy": self.policy, "bytes": self.bytes, "predicted_bytes": self.predicted_bytes, "agrees": self.agrees,
            "blocks": self.blocks, "slots": self.slots, "stored_tokens": self.stored, "unused_slots": self.unused,
            "utilization": self.stored / self.slots, "waste": self.unused / self.slots,
        }  # fmt: skip


class Alike(Record):
    """Logits through one cache beside those through the plain one, of the same tokens."""

    policy: str
    compared: int
    """Distributions: of the last token of each prompt, and of each token after it."""
    same: int
    """Of these, with the same likeliest token."""
    difference: float
    """The largest of a logit."""
    largest: float
    """The largest logit of the plain cache, for comparison."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Forked(Record):
    """Several continuations of one prompt, which share its blocks and copy what they write into."""

    tokens: int
    """Of the prompt."""
    branches: int
    decode: int
    copied: int
    """Blocks that were copied."""
    expected_copied: int
    """All but one branch copy the last block, where it is not full."""
    blocks: int
    expected_blocks: int
    separate_blocks: int
    """If nothing were shared."""
    alike: Alike

    @property
    def agrees(self) -> bool:
        return (self.copied, self.blocks) == (self.expected_copied, self.expected_blocks)

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields} | {
            "agrees": self.agrees, "alike": self.alike.to_dict(),
        }  # fmt: skip


class FirstToken(Record):
    """Time to the first token of the same prompts, with and without their common part in the cache, in turn."""

    cold: Sample
    cached: Sample
    ratio: Ratio
    """Cached over cold."""

    def to_dict(self) -> dict[str, Any]:
        return {"cold": self.cold.to_dict(), "cached": self.cached.to_dict(), "ratio": self.ratio.to_dict()}


class PrefillWork(Record):
    """Floating-point operations of one prefill, counted on its operations."""

    cold_flops: int
    cached_flops: int

    @property
    def saved(self) -> float:
        """Share that the cache spared."""
        return 1 - self.cached_flops / self.cold_flops

    def to_dict(self) -> dict[str, Any]:
        return {"cold_flops": self.cold_flops, "cached_flops": self.cached_flops, "saved": self.saved}


class Sharing(Record):
    """All that was measured of requests whose prompts begin alike."""

    asked: SharingAsked
    held: tuple[Held, ...] = ()
    alike: tuple[Alike, ...] = ()
    hits: tuple[int, ...] = ()
    """Tokens of each prompt that were found."""
    expected_hits: tuple[int, ...] = ()
    """By comparing each prompt with all before it, token by token."""
    forked: Forked | None = None
    work: PrefillWork | None = None
    first_token: FirstToken | None = None
    interrupted: bool = False

    @property
    def agrees(self) -> bool | None:
        """Whether bytes, hits and copies are as predicted; None where nothing was measured to its end."""
        if not self.held:
            return None
        return (
            all(held.agrees is not False for held in self.held)
            and self.hits == self.expected_hits
            and (self.forked is None or self.forked.agrees)
        )

    @property
    def queried(self) -> int:
        """Prompt tokens of all requests."""
        return sum(self.asked.lengths)

    @property
    def hit_rate(self) -> float:
        """Prompt tokens that were found, and not computed."""
        return sum(self.hits) / self.queried

    def to_dict(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "agrees": self.agrees, "interrupted": self.interrupted,
            "settings": {name: getattr(asked, name) for name in asked._fields} | {"common": asked.common},
            "lengths": list(asked.lengths), "policies": [held.to_dict() for held in self.held],
            "queried_tokens": self.queried, "hit_tokens": sum(self.hits), "expected_hit_tokens": sum(self.expected_hits),
            "hit_rate": self.hit_rate, "alike": [one.to_dict() for one in self.alike],
            "fork": None if self.forked is None else self.forked.to_dict(),
            "work": None if self.work is None else self.work.to_dict(),
            "ttft": None if self.first_token is None else self.first_token.to_dict(),
        }  # fmt: skip

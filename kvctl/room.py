"""The memory that every rank of an engine has for the cache, and what a workload asks of it.

Every rank has a device, its share of the weights, what the engine takes beside them (`Part`s, by the engine's `memory`
module) and a budget for the cache. The rank with the poorest budget decides.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from typing import TYPE_CHECKING, Any

from kvctl.allocation import Allocation, Part, Serving, Shortage
from kvctl.errors import ConfigError, KvctlError
from kvctl.ranks import Hardware, Layout
from kvctl.record import Record
from kvctl.search import largest
from kvctl.units import MAX_TOKENS, format_bytes, plural

if TYPE_CHECKING:
    from kvctl.engines import Engine
    from kvctl.hardware import Device
    from kvctl.spec import ModelSpec

Held = Callable[[int, int, Serving], tuple[int, Allocation | None]]
"""(tokens, sequences, how the engine is started) to bytes that a rank holds, and the engine's plan where it has one."""

MOST_REQUESTS = 2**31


class Rank(Record):
    """One rank's memory: what is there, and what is left of it for the cache."""

    device: Device
    weights: int
    parts: tuple[Part, ...]
    budget: int

    @property
    def taken(self) -> int:
        """Bytes of weights and of what the engine takes beside the cache."""
        return self.weights + sum(part.bytes for part in self.parts)

    @property
    def free(self) -> int:
        """Bytes of the device that nobody else holds."""
        return self.device.available_bytes


class Load(Record):
    """What a workload asks of the ranks, and whether they hold it."""

    ranks: tuple[Rank, ...]
    bottleneck: int
    """The rank that decides."""
    budget: int
    """Bytes for the cache that the engine can count on: of the poorest rank, or over all where layers are divided."""
    kv: tuple[int, ...]
    """Bytes of the cache on every rank."""
    allocation: Allocation | None
    fits: bool
    why: str
    """What stands in the way, in words; empty where nothing does."""
    admitted: bool = True
    """Whether the engine takes so much with the memory it counts on: where that is told, whatever the device has."""

    @property
    def pool(self) -> bool:
        """Whether the engine reserves its whole budget, whatever the load."""
        return self.allocation is not None and self.allocation.held is not None

    def reserved(self, index: int) -> int:
        """Bytes that a rank takes for the cache."""
        return max(self.ranks[index].budget, 0) if self.pool else self.kv[index]


class Room:
    """The memory for the cache of one model in one engine, on given devices."""

    def __init__(
        self,
        spec: ModelSpec,
        engine: Engine,
        dtype_bytes: int,
        laid: Layout,
        hardware: Hardware,
        weights: tuple[int, ...],
        shares: tuple[Fraction, ...],
        held: Held,
        guesses: tuple[str, ...] = (),
        more: tuple[dict[str, Any], ...] = (),
    ) -> None:
        """`weights` are bytes of every rank (repeated over replicas); `shares` the parts of the cache that devices
        hold where layers are divided over them, empty where an engine's plan is that of a rank; `guesses` what is estimated of either; `more` what the engine's `overheads` are told of every device."""
        self.spec, self.engine, self.dtype_bytes = spec, engine, dtype_bytes
        self.laid, self.hardware, self.held = laid, hardware, held
        self.weights, self.shares, self.guesses, self.more = weights, shares, guesses, more
        self._beside: tuple[int, ...] | None = None
        self._rank_of: dict[tuple[Any, ...], Rank] = {}
        self._longest: dict[int, int | None] = {}
        self._loads: dict[tuple[int, int], Load | None] = {}

    def ranks(self, context: int, sequences: int) -> tuple[Rank, ...]:
        """Every rank's memory for requests of at most `context` tokens."""
        beside = self._beside_pool(context) or (0,)
        if self.engine.rows and self.laid.serving.cache_implementation != "paged":
            context *= sequences  # prompts of a batch run through the model together
        return tuple(
            self._rank(device, self.weights[index % len(self.weights)], beside[index % len(beside)], context,
                       self.more[index] if self.more else {})
            for index, device in enumerate(self.laid.devices)
        )  # fmt: skip

    def _beside_pool(self, context: int) -> tuple[int, ...]:
        """Bytes of the cache on every rank that are none of the pool's budget, whatever the workload."""
        if not self.engine.beside:
            return ()
        if self._beside is None:
            _, allocation = self.held(context, 1, self.laid.serving.replace(kv_budget=None))
            self._beside = allocation.beside if allocation is not None else ()
        return self._beside

    def _rank(self, device: Device, weights: int, beside: int, context: int, more: dict[str, Any]) -> Rank:
        serving, total = self.laid.serving, device.cuda_bytes
        free = device.available_bytes
        key = (device.name, total, free, weights, beside, context, *more.values())
        if key in self._rank_of:
            found = self._rank_of[key]  # devices of a kind are asked once
            return found if found.device is device else found.replace(device=device)
        memory = self.engine.memory
        parts: tuple[Part, ...] = ()
        if self.hardware.overhead is not None:
            parts = (Part("overhead", self.hardware.overhead, False, "measured, as given"),)
        elif serving.device != "cpu" or not self.engine.splits:
            parts = memory.overheads(
                self.spec, serving, dtype_bytes=self.dtype_bytes, device_bytes=total, gpu_name=device.name,
                version=self.engine.version, context=context, free_bytes=free, **more,
            )  # fmt: skip
        if device.kind == "cpu":
            parts = tuple(part for part in parts if part.name != "runtime")  # that of a GPU
        if beside:
            parts += (Part("recurrent states", beside, True, "for as many sequences as a batch may have"),)
        if serving.kv_budget is not None:
            budget = serving.kv_budget
        elif serving.device == "cpu" and self.engine.splits:
            raise ConfigError(f"how much memory {self.engine.name} leaves the cache on a CPU is not known",
                              hint="--kv-budget says how much")  # fmt: skip
        else:
            budget = memory.kv_budget(
                device_bytes=total, free_bytes=free, weights_bytes=weights, parts=parts, serving=serving,
                version=self.engine.version, spec=self.spec,
            )  # fmt: skip
        self._rank_of[key] = Rank(device, weights, parts, budget)
        return self._rank_of[key]

    def load(self, context: int, sequences: int) -> Load:
        """Whether `sequences` requests of `context` tokens fit."""
        ranks = self.ranks(context, sequences)
        each = -(-sequences // self.laid.replicas)
        budget, poorest = self._budget(ranks, context, each)
        told = self._started(context).replace(kv_budget=budget if budget > 0 else None)
        need, allocation = self.held(context, each, told)
        if self.shares:
            kv = tuple(-(-need * share.numerator // share.denominator) for share in self.shares)
        elif allocation is not None:
            rows = allocation.per_rank
            beside = allocation.beside or (0,) * len(rows)
            pooled = [row.reserved_bytes - other for row, other in zip(rows, beside, strict=True)]
            kv = tuple(pooled[index % len(pooled)] for index in range(len(ranks)))
        else:
            kv = (need,) * len(ranks)
        short = _shortage(budget, need, each, allocation, context, told)
        found = Load(ranks, poorest, budget, kv, allocation, True, "")
        if found.pool and not short:
            # What pools have for padding beside their budget is none of the workload's.
            kv = tuple(min(size, max(rank.budget, 0)) for size, rank in zip(kv, ranks, strict=True))
            found = found.replace(kv=kv)
        if self.laid.serving.kv_budget is not None:  # all ranks are told the same: the one with least beside it decides
            poorest = min(range(len(ranks)), key=lambda i: ranks[i].free - ranks[i].taken - found.reserved(i))
            found = found.replace(bottleneck=poorest)
        lacking = self._refusal(found) or self.overridden(allocation, ranks[poorest])
        why = lacking or short or self._plan_refusal(allocation, ranks[poorest], context)
        told_budget = found.pool and self.laid.serving.kv_budget is not None
        return found.replace(fits=not why, why=why, admitted=not (short if told_budget else why))

    def _started(self, context: int) -> Serving:
        """The engine's options, with what it chooses for the first device."""
        memory, device = self.engine.memory, self.laid.devices[0]
        if self.laid.serving.device == "cpu":
            return self.laid.serving
        return memory.started(
            self.spec, self.laid.serving, device_bytes=device.cuda_bytes, gpu_name=device.name,
            version=self.engine.version, context=context,
        )  # fmt: skip

    def _budget(self, ranks: tuple[Rank, ...], context: int, sequences: int) -> tuple[int, int]:
        """The memory for the cache that all ranks together allow, and the rank that allows least."""
        budgets = [rank.budget for rank in ranks]
        poorest = min(range(len(ranks)), key=lambda index: budgets[index])
        if budgets[poorest] <= 0:
            return budgets[poorest], poorest
        if self.shares:
            # What the device can hold of its share decides for the whole.
            wholes = [
                budget * share.denominator // share.numerator if share else MAX_TOKENS
                for budget, share in zip(budgets, self.shares, strict=True)
            ]
            poorest = min(range(len(ranks)), key=lambda index: wholes[index])
            return wholes[poorest], poorest
        if min(budgets) == max(budgets):
            return budgets[poorest], poorest
        _, allocation = self.held(context, sequences, self._started(context).replace(kv_budget=None))
        sizes = [row.bytes_per_block for row in allocation.per_rank] if allocation is not None else [0]
        if min(sizes) == max(sizes) or not min(sizes):
            return budgets[poorest], poorest
        # Stages hold blocks of several sizes: the one with the fewest blocks decides, and engines count in the widest.
        counts = [budget // sizes[index % len(sizes)] for index, budget in enumerate(budgets)]
        poorest = min(range(len(ranks)), key=lambda index: counts[index])
        return counts[poorest] * max(sizes), poorest

    def _refusal(self, load: Load) -> str:
        """Why the device has not the memory that the engine counts on; empty where it has."""
        poorest, budget = load.bottleneck, load.budget
        rank = load.ranks[poorest]
        where = f"rank {poorest}" if len(load.ranks) > 1 else rank.device.name
        if rank.device.free_bytes is not None:
            refusal = self.engine.memory.start_refusal(
                rank.free, rank.device.cuda_bytes, self.laid.serving, self.engine.version
            )
            if refusal:
                return refusal
        if rank.weights >= rank.free:
            return f"weights of {format_bytes(rank.weights)} are more than the {format_bytes(rank.free)} of {where}"
        if budget <= 0 and (short := self.shortage(rank)) is not None and short.when == "start":
            return f"{short.message}; {short.hint}"
        if budget <= 0:
            return (f"weights of {format_bytes(rank.weights)} and {format_bytes(rank.taken - rank.weights)} beside them "
                    f"leave no memory for the cache on {where}")  # fmt: skip
        told = self.laid.serving.kv_budget is not None
        reserves = load.reserved(poorest) if load.pool or told else 0
        if rank.taken + reserves > rank.free:
            what = "a budget" if load.pool else "a cache"
            return (f"{what} of {format_bytes(reserves)} beside {format_bytes(rank.taken)} is more than the "
                    f"{format_bytes(rank.free)} of {where}")  # fmt: skip
        return ""

    def overridden(self, allocation: Allocation | None, rank: Rank) -> str:
        """Why blocks whose number is told do not fit; empty where it is not told, or they do."""
        told = self.laid.serving.num_blocks
        if told is None or allocation is None or not allocation.bytes_per_block:
            return ""
        size = told * allocation.bytes_per_block
        if size <= rank.budget:
            return ""
        return f"{told:,} blocks take {format_bytes(size)}, and {format_bytes(max(0, rank.budget))} are left for them"

    def _plan_refusal(self, allocation: Allocation | None, rank: Rank, context: int) -> str:
        """Why an engine whose cache would do refuses to start; empty where it starts."""
        if allocation is None or self.laid.serving.device == "cpu":
            return ""
        found = self.engine.memory.plan_refusal(
            allocation, self.spec, self.laid.serving, device_bytes=rank.device.cuda_bytes, gpu_name=rank.device.name,
            version=self.engine.version, context=context,
        )  # fmt: skip
        return found or ""

    def shortage(self, rank: Rank) -> Shortage | None:
        """What an engine that is told a share of the memory will run short of, and when; None where it is nothing."""
        memory, device = self.engine.memory, rank.device
        if self.laid.serving.kv_budget is not None or self.hardware.overhead is not None:
            return None
        before = rank.free - sum(part.bytes for part in rank.parts if part.name == "runtime")
        return memory.shortage(self.spec, self.laid.serving, before=before, weights_bytes=rank.weights,
                               device_bytes=device.cuda_bytes, version=self.engine.version)  # fmt: skip

    def plain_warnings(self, context: int, sequences: int) -> tuple[str, ...]:
        """What an engine's plan warns of without a budget."""
        told = self._started(context).replace(kv_budget=None, utilization=None)
        _, allocation = self.held(context, sequences, told)
        return allocation.warnings if allocation is not None else ()

    def left_words(self) -> str:
        """Why the engine leaves memory alone."""
        if self.laid.serving.kv_budget is not None:
            return "nothing asks for it"
        return self.engine.memory.left(self.laid.serving, self.engine.version)

    # -- how much more ------------------------------------------------------------------------

    def longest(self, sequences: int, guess: int, block: int) -> int | None:
        """Most tokens in each of `sequences` requests, 0 where none fit; None where the length makes no difference.

        `guess` and `block` (tokens that are allocated together) make the search short.
        """
        if sequences not in self._longest:
            found = None
            if self._admits(MAX_TOKENS, sequences):
                most = self._loads[MAX_TOKENS, sequences]
                if most is not None and most.allocation is not None and most.allocation.longest_sequence < MAX_TOKENS:
                    found = most.allocation.longest_sequence  # the engine lowers what it is asked for
            else:
                guess = self._line(sequences, min(max(guess, 1), MAX_TOKENS), block)
                found = largest(lambda tokens: self._admits(tokens, sequences), guess, MAX_TOKENS, block)
            self._longest[sequences] = found
        return self._longest[sequences]

    def _line(self, sequences: int, guess: int, block: int) -> int:
        """A better guess at the longest context: long contexts take memory along a line."""
        points = [point for tokens in (guess, 2 * guess) if (point := self._point(tokens, sequences))]
        for _ in range(4):
            if len(points) < 2 or points[-1][1] == points[-2][1]:
                break
            (x0, y0, _), (x1, y1, budget) = points[-2:]
            guess = min(max(x1 + (budget - y1) * (x1 - x0) // (y1 - y0), 1), MAX_TOKENS)
            if abs(guess - x1) <= block or (point := self._point(guess, sequences)) is None:
                break
            points.append(point)
        return guess

    def _point(self, tokens: int, sequences: int) -> tuple[int, int, int] | None:
        """Tokens, bytes of the cache on the rank that decides, and what it has for them."""
        load = self._load(tokens, sequences)
        return (tokens, load.kv[load.bottleneck], load.ranks[load.bottleneck].budget) if load is not None else None

    def most(self, context: int, sequences: int, load: Load) -> int:
        """Most requests of `context` tokens at once."""
        if load.pool and load.allocation is not None and load.allocation.held is not None:
            started = load.budget > 0 and self._admits(context, 1)
            most = self.laid.serving.max_sequences if self.engine.name == "vllm" else None
            held = load.allocation.held if most is None else min(load.allocation.held, most)
            return held * self.laid.replicas if started else 0
        each = max(1, load.kv[load.bottleneck] // sequences)
        guess = load.ranks[load.bottleneck].budget // each
        return largest(lambda count: self._admits(context, count), guess, MOST_REQUESTS)

    def _admits(self, context: int, sequences: int) -> bool:
        load = self._load(context, sequences)
        return load is not None and load.admitted

    def _load(self, context: int, sequences: int) -> Load | None:
        """None for a length or a number that the engine refuses."""
        key = context, sequences
        if key not in self._loads:
            try:
                self._loads[key] = self.load(context, sequences)
            except KvctlError:
                self._loads[key] = None
        return self._loads[key]


def _shortage(
    budget: int, need: int, sequences: int, allocation: Allocation | None, context: int, serving: Serving
) -> str:
    """Why the memory for the cache does not hold so many requests; empty where it does."""
    if allocation is not None and allocation.held is not None:
        told = serving.num_blocks is not None or serving.max_tokens is not None
        has = f"holds {allocation.capacity_tokens or 0:,} tokens" if told else f"has {format_bytes(budget)}"
        if allocation.held == 0:
            return f"the cache {has}, too little for one request of {context:,} tokens"
        if allocation.held < sequences:
            return f"the cache {has}: {plural(allocation.held, 'request')} of {context:,} tokens, not {sequences:,}"
    elif need > budget:
        return f"the cache takes {format_bytes(need)}, and {format_bytes(budget)} are left for it"
    return ""

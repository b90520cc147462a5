"""Which ways to serve a model fit, what they hold, and why the others do not.

Every one is asked of `kvctl size`'s own rules (SizePlan, Question, Room): nothing here knows how large a cache is. What they
have in common is worked out once: weights by format and split, layouts of the cache by split and format (`kvctl.kept`); and
where the weights alone are more than the GPUs have, nothing else is asked.
"""

from __future__ import annotations

from collections.abc import Iterator

from kvctl.allocation import MOST_SLOTS, Part, Serving
from kvctl.engines import Engine
from kvctl.errors import KvctlError
from kvctl.formats import BF16, FP32, CacheFormat, DType
from kvctl.ranks import Hardware
from kvctl.recommend import space, takes
from kvctl.recommend.checkpoints import Checkpoint, checkpoints, gguf_types
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.request import Ask
from kvctl.recommend.space import Split
from kvctl.record import Record
from kvctl.room import Load, Room
from kvctl.size import SizePlan, completed, prepare
from kvctl.units import format_bytes, plural

MOST_BATCHED = 256
"""Requests of one server where a rate is asked for, and nobody says how many come at once: what engines take on GPUs of
less than 70 GiB without being told, and more than most caches hold."""


class Stack(Record):
    """Where the memory of the fullest GPU goes, in bytes."""

    device: int
    """What applications see."""
    weights: int
    parts: tuple[Part, ...]
    """What the engine takes beside weights and cache."""
    kv: int
    """Of the requests at once that are promised, at their longest."""
    pool: int
    """That the engine reserves for them."""

    @property
    def headroom(self) -> int:
        """What nothing is promised of."""
        return self.device - self.weights - sum(part.bytes for part in self.parts) - self.pool


class Candidate(Record):
    """A deployment that starts and holds at least one request."""

    deployment: Deployment
    checkpoint: Checkpoint
    split: Split
    stack: Stack
    capacity: int | None
    """Tokens of all replicas' pools; None where an engine allocates for the workload."""
    at_once: int
    """Requests of the longest length that all replicas hold at once, of those that are let in."""
    usual_at_once: int
    """And of the usual length."""
    asked: int | None
    """Requests at once that were asked for; None for a rate."""
    native: bool
    """Whether tensor cores compute in the weights' format."""
    notes: tuple[str, ...] = ()

    @property
    def queues(self) -> bool:
        """Whether some of the usual requests wait for others to end."""
        return self.asked is not None and self.usual_at_once < self.asked


class Rejection(Record):
    """A reason, what it stands in the way of, and how often."""

    kind: str
    """engine, format, refused (the engine does not take the split), unknown, weights or cache."""
    engine: str
    weights: str
    kv_dtype: str
    gpus: int
    """Of one server."""
    why: str
    count: int = 1


class Found(Record):
    """What a search found, in the order of the space."""

    candidates: tuple[Candidate, ...]
    rejections: tuple[Rejection, ...]
    """One for each engine, format of weights and kind of reason: the one on most GPUs, with how many it stands for."""
    tried: int

    @property
    def holding(self) -> tuple[Candidate, ...]:
        """Candidates with which no request waits."""
        return tuple(one for one in self.candidates if not one.queues)


def search(ask: Ask) -> Found:
    """Every deployment of the space that fits."""
    return Search(ask).run()


class Search:
    """One request's space, walked."""

    def __init__(self, ask: Ask) -> None:
        # Once, so that what is kept of the model is found again.
        self.ask = ask = ask.replace(spec=completed(ask.spec))
        dtype = ask.spec.dtype
        self.dtype = BF16 if not isinstance(dtype, DType) or dtype is FP32 else dtype
        self.rejected: dict[tuple[str, str, str], Rejection] = {}
        self.tried = 0

    def run(self) -> Found:
        return Found(tuple(self.walk()), tuple(self.rejected.values()), self.tried)

    def walk(self) -> Iterator[Candidate]:
        """Candidates one after another, as they are found."""
        for engine in self.ask.engines:
            yield from self._of_engine(engine)

    def _of_engine(self, engine: Engine) -> Iterator[Candidate]:
        ask = self.ask
        why = takes.runs(engine, ask.device)
        offered = gguf_types(ask.spec) if engine.slots else checkpoints(ask.spec)
        considered = space.weights(engine, ask.device, offered)
        if why or not considered:
            why = why or (f"{engine.name} takes none of the formats that {ask.spec.id} is to be had in on {ask.device.name}"
                          if offered else f"no format of {ask.spec.id} is known that {engine.name} reads")  # fmt: skip
            self._reject("engine" if why else "format", engine, "", "", 0, why)
            return
        for checkpoint in considered:
            yield from self._of_weights(engine, checkpoint)

    def _of_weights(self, engine: Engine, checkpoint: Checkpoint) -> Iterator[Candidate]:
        least: int | None = None
        names = takes.caches(engine, self.ask.device, self.ask.spec)
        try:
            least = self._loaded(engine, checkpoint)
        except KvctlError as error:
            self._reject("unknown", engine, checkpoint.weights, "", 0, error.message)
            return
        enough: set[tuple[str, int]] = set()
        for split in space.splits(engine, self.ask):
            many = len(names) * len(space.replicas(split, self.ask))
            ranks, free = max(split.ranks, 1), self.ask.device.available_bytes
            if least is not None and -(-least // ranks) >= free:
                self._reject("weights", engine, checkpoint.weights, "", ranks, (
                    f"weights of {format_bytes(least)} on {plural(ranks, 'GPU')}: {format_bytes(-(-least // ranks))} each, "
                    f"and {self.ask.device.name} has {format_bytes(free)}"), many)  # fmt: skip
                continue
            for name in names:
                yield from self._of_cache(engine, checkpoint, split, name, enough)

    def _loaded(self, engine: Engine, checkpoint: Checkpoint) -> int | None:
        """Bytes of the weights on one rank that has all of them; None where only a plan says it."""
        if not engine.splits or not self.ask.gpus:
            return None
        from kvctl.weigh import weigh

        info = weigh(self.ask.spec, (1, 1, False, 1, ()), self.dtype, checkpoint.sized, [], by_rank=True, assume=True)
        return info.per_rank[0] if info is not None and info.per_rank is not None else None

    def _of_cache(
        self, engine: Engine, checkpoint: Checkpoint, split: Split, name: str, enough: set[tuple[str, int]]
    ) -> Iterator[Candidate]:
        """Batches and replicas, most of these first: each then has least to do.

        `enough`: formats of the cache and numbers of replicas (0: any) with which fewer GPUs hold all.
        """
        asked, first = self.ask.concurrency, True
        if (name, 0) in enough and space.staged(split, self.ask):
            return
        for count in reversed(space.replicas(split, self.ask)):
            if engine.slots and (name, count) in enough:
                continue
            requests = MOST_BATCHED if asked is None else -(-asked // count)
            if asked is not None and -(-asked // requests) < count:
                continue  # fewer replicas have as much to do
            found = []
            for batch in space.batches(engine, self.ask, requests):
                self.tried += 1
                one = self.fit(engine, checkpoint, split, name, batch, count)
                if isinstance(one, Rejection):
                    self._reject(one.kind, engine, checkpoint.weights, name, split.ranks, one.why)
                else:
                    found.append(one)
            if all(one.queues for one in found):
                # Fewer replicas hold less. Where not even the most hold all, these are what there is.
                if first:
                    yield from found
                return
            first = False
            enough |= {(name, count), (name, 0)}
            yield from found

    def again(self, candidate: Candidate) -> Candidate | Rejection:
        """A candidate of another request as this one's: the same way to serve, with limits of its own."""
        deployment = candidate.deployment
        batch = deployment.serving.max_batched
        return self.fit(
            deployment.engine, candidate.checkpoint, candidate.split, deployment.kv_dtype, batch, deployment.replicas
        )

    def fit(
        self, engine: Engine, checkpoint: Checkpoint, split: Split, kv_dtype: str, batch: int | None, replicas: int
    ) -> Candidate | Rejection:
        """One deployment with its limits filled in, or why there is none."""
        ask = self.ask
        asked = None if ask.concurrency is None else -(-ask.concurrency // replicas)
        tried = _Try(self, engine, checkpoint, split, kv_dtype, batch)
        try:
            if kv_dtype != "auto":
                tried.key = engine.kv_dtype(kv_dtype, "--kv-cache-dtype")
            if engine.slots:
                return tried.slots(asked, replicas)
            return tried.pool(asked, replicas)
        except KvctlError as error:
            return tried.rejection("refused", error.message)

    def _reject(self, kind: str, engine: Engine, weights: str, kv: str, gpus: int, why: str, count: int = 1) -> None:
        key = kind, engine.name, weights
        before = self.rejected.get(key)
        if before is None or gpus > before.gpus:
            self.rejected[key] = Rejection(
                kind, engine.name, weights, kv, gpus, why, count + (before.count if before is not None else 0)
            )
        else:
            self.rejected[key] = before.replace(count=before.count + count)


class _Try:
    """One engine, format of weights and of the cache, split and batch."""

    def __init__(
        self, search: Search, engine: Engine, checkpoint: Checkpoint, split: Split, kv_dtype: str, batch: int | None
    ) -> None:
        self.ask, self.spec, self.dtype = search.ask, search.ask.spec, search.dtype
        self.engine, self.checkpoint, self.split = engine, checkpoint, split
        self.kv_dtype, self.batch = kv_dtype, batch
        self.key: CacheFormat | None = None

    @property
    def workers(self) -> int:
        """Ranks of one server that each have a pool for requests of their own."""
        return self.split.data

    def rejection(self, kind: str, why: str) -> Rejection:
        return Rejection(kind, self.engine.name, self.checkpoint.weights, self.kv_dtype, self.split.ranks, why)

    def room(self, serving: Serving, context: int) -> Room:
        """The memory of one server that is started so."""
        device, count = self.ask.device, max(self.split.ranks, 1)
        plan = SizePlan(
            engine=self.engine,
            contexts=(context,),
            serving=serving,
            weights_dtype=self.checkpoint.sized,
            hardware=Hardware((device,) * count),
            key=self.key,
            value=None if self.key is None else self.key.values or self.key,
        )
        room = prepare(self.spec, plan).room
        assert room is not None
        return room

    # -- engines with a pool ----------------------------------------------------------------

    def serving(self, requests: int) -> Serving:
        """How one server is started for so many requests at once."""
        split, name = self.split, self.engine.name
        attends = split.data > 1 and name != "vllm"
        each = -(-requests // self.workers)
        return Serving(
            device="gpu" if split.gpus else "cpu",
            tensor_parallel=split.tensor,
            pipeline_parallel=split.pipeline if split.pipeline > 1 else None,
            data_parallel=split.data if split.data > 1 and name != "tensorrt-llm" else None,
            decode_context_parallel=split.dealt if split.dealt > 1 else None,
            expert_parallel=split.data > 1,
            attention_dp=attends,
            # SGLang shares the number out over its workers; the others count for each.
            max_sequences=each * self.workers if name == "sglang" else each,
            max_batched=self.batch,
        )

    def pool(self, asked: int | None, replicas: int) -> Candidate | Rejection:
        """vLLM, SGLang and TensorRT-LLM: a share of the memory is told, and what it leaves is the pool."""
        if not self.split.gpus:
            return self._on_host(asked, replicas)
        context, requests = self.ask.context, asked or MOST_BATCHED
        serving = self._shared(self.serving(requests))
        room = self.room(serving, context)
        load = room.load(context, 1)
        held, usual = self._held(room, load)
        if load.why or not held:
            return self.rejection("weights" if load.budget <= 0 else "cache", self._why(load, requests))
        if usual < requests:
            # More than fit would only push each other out: they wait instead.
            requests = usual
            serving = self._shared(self.serving(requests))
            room = self.room(serving, context)
            load = room.load(context, 1)
            held, usual = self._held(room, load)
            if load.why or not held:
                return self.rejection("weights" if load.budget <= 0 else "cache", self._why(load, requests))
        serving = self._told(room, load)
        return self._candidate(load, serving, min(held, requests), min(usual, requests), replicas)

    def _shared(self, serving: Serving) -> Serving:
        """With the share of the memory that the engine takes, named."""
        device = self.ask.device
        if self.engine.name == "sglang":
            from kvctl.engines.sglang.memory import usual_share

            return serving.replace(utilization=usual_share(self.spec, serving, device.cuda_bytes, self.engine.version))
        if self.engine.name == "vllm":
            from kvctl.engines.vllm.start import highest_utilization, utilization

            share = utilization(serving, self.engine.version)
            if device.free_bytes is not None:
                share = min(share, highest_utilization(device.free_bytes, device.cuda_bytes))
            return serving.replace(utilization=share)
        return serving.replace(utilization=0.9)  # of what is free after loading, TensorRT-LLM's own

    def _held(self, room: Room, load: Load) -> tuple[int, int]:
        """Requests of the longest and of the usual length that one server's pools hold."""
        allocation = load.allocation
        if load.budget <= 0 or allocation is None or not allocation.held:
            return 0, 0
        held = (allocation.held if allocation.whole is None else allocation.whole) * self.workers
        usual = self.ask.prompt + self.ask.answer
        if usual == self.ask.context:
            return held, held
        serving = room.laid.serving.replace(kv_budget=load.budget)
        _, shorter = room.held(usual, 1, serving)
        if shorter is None or not shorter.held:
            return held, held
        return held, max(held, (shorter.held if shorter.whole is None else shorter.whole) * self.workers)

    def _told(self, room: Room, load: Load) -> Serving:
        """The options, with the bytes of the cache where the engine takes them: whole blocks, of the poorest rank."""
        serving, allocation = room.laid.serving, load.allocation
        if (
            self.engine.name != "vllm"
            or allocation is None
            or not allocation.bytes_per_block
            or allocation.num_blocks is None
        ):
            return serving
        if self.split.pipeline > 1:
            return serving  # stages have blocks of several sizes: one number of bytes would not fill them all
        return serving.replace(kv_budget=allocation.num_blocks * allocation.bytes_per_block)

    def _why(self, load: Load, requests: int) -> str:
        """Why not one request fits, with the arithmetic."""
        rank = load.ranks[load.bottleneck]
        need = ""
        if load.allocation is not None and load.budget > 0:
            each = load.kv[load.bottleneck]
            beside = sum(part.bytes for part in rank.parts)
            need = (f": {format_bytes(rank.weights)} of weights and {format_bytes(beside)} beside them leave "
                    f"{format_bytes(load.budget)}, and one request of {self.ask.context:,} tokens takes {format_bytes(each)}")  # fmt: skip
        return (load.why or "the cache holds not one request") + need

    def _on_host(self, asked: int | None, replicas: int) -> Candidate | Rejection:
        """A server on a host, which is told how much memory its cache takes: what the requests need and a block that is set
        aside."""
        context, requests = self.ask.context, asked or 1
        plain = self.serving(requests)
        formats = self.room(plain.replace(kv_budget=1), context)
        _, allocation = formats.held(context, 1, plain)
        assert allocation is not None
        free = self.ask.device.available_bytes - formats.weights[0]
        size = allocation.blocks_per_request * allocation.bytes_per_block
        requests = min(requests, (free - allocation.bytes_per_block) // size)
        if requests < 1:
            return self.rejection("cache", (
                f"one request of {context:,} tokens takes {format_bytes(size)}, and weights of "
                f"{format_bytes(formats.weights[0])} leave {format_bytes(max(0, free))} of {self.ask.device.name}"))  # fmt: skip
        serving = self.serving(requests).replace(kv_budget=requests * size + allocation.bytes_per_block)
        room = self.room(serving, context)
        load = room.load(context, 1)
        if load.why:
            return self.rejection("cache", load.why)
        held, usual = self._held(room, load)
        return self._candidate(load, serving, min(held, requests), min(usual, requests), replicas)

    # -- engines with slots -----------------------------------------------------------------

    def slots(self, asked: int | None, replicas: int) -> Candidate | Rejection:
        """llama.cpp and Ollama: a slot of the longest length for each request."""
        wanted = min(asked or MOST_SLOTS, MOST_SLOTS)
        first: Load | None = None
        count = wanted
        while count:
            serving = Serving(
                device="gpu" if self.split.gpus else "cpu", slots=count, unified=False, flash_attention=True
            )
            total = self.ask.context if self.engine.slots == "own" else count * self.length
            room = self.room(serving, total)
            load = room.load(total, 1)
            first = first or load
            if load.fits:
                return self._candidate(load, serving, count, count, replicas)
            if load.budget <= 0:
                break
            # Slots take equal parts of the cache, and a few bytes more beside it: so many can fit at most.
            taken = load.allocation.reserved_bytes if load.allocation is not None else 0
            count = min(count - 1, count * load.budget // max(taken, 1))
        assert first is not None
        rank = load.ranks[load.bottleneck]
        kind = "weights" if rank.weights >= rank.free or load.budget <= 0 else "cache"
        return self.rejection(kind, load.why)

    @property
    def length(self) -> int:
        """Tokens of a slot: llama.cpp has whole 256ths."""
        return -(-self.ask.context // 256) * 256

    # -- what comes out ---------------------------------------------------------------------

    def _candidate(self, load: Load, serving: Serving, held: int, usual: int, replicas: int) -> Candidate:
        ask, split, rank = self.ask, self.split, load.ranks[load.bottleneck]
        asked = ask.concurrency
        how = takes.weights(self.engine, ask.device, self.checkpoint.weights)
        deployment = Deployment(
            base=ask.spec.id,
            model=self.checkpoint.name,
            engine=self.engine,
            serving=serving,
            context=ask.context,
            device=ask.device,
            weights=self.checkpoint.weights,
            made=self.checkpoint.made,
            dtype="auto" if self.engine.slots else takes.dtype(ask.spec, ask.device),
            kv_dtype=self.kv_dtype,
            gpus=split.gpus,
            nodes=split.nodes,
            replicas=replicas,
        )
        each = load.kv[load.bottleneck]
        if not self.engine.slots:
            each *= -(-held // self.workers)
        stack = Stack(rank.device.cuda_bytes, rank.weights, rank.parts, each, max(each, load.reserved(load.bottleneck)))
        allocation = load.allocation
        capacity = None
        if allocation is not None and allocation.capacity_tokens is not None and load.pool:
            capacity = allocation.capacity_tokens * self.workers * replicas
        return Candidate(
            deployment=deployment,
            checkpoint=self.checkpoint,
            split=split,
            stack=stack,
            capacity=capacity,
            at_once=min(held * replicas, asked) if asked is not None else held * replicas,
            usual_at_once=min(usual * replicas, asked) if asked is not None else usual * replicas,
            asked=asked,
            native=how is not None and takes.computes(how, ask.device),
            notes=tuple(self._notes(held, usual, stack, load, replicas)),
        )

    def _notes(self, held: int, usual: int, stack: Stack, load: Load, replicas: int) -> Iterator[str]:
        asked = self.ask.concurrency
        if not self.split.gpus and not self.engine.slots:
            yield f"what {self.engine.name} takes of a host beside weights and cache is not known"
        if asked is not None and usual * replicas < asked:
            wanted, beside = -(-asked // replicas), sum(part.bytes for part in stack.parts)
            each = load.kv[load.bottleneck] // (held if self.engine.slots else 1)
            yield (f"{plural(wanted, 'request')} of {self.ask.context:,} tokens take {format_bytes(-(-wanted // self.workers) * each)}, "
                   f"and {format_bytes(stack.weights)} of weights and {format_bytes(beside)} beside them leave "
                   f"{format_bytes(max(load.budget, 0))} of {format_bytes(stack.device)}: {usual * replicas:,} requests run at once, "
                   f"and {asked - usual * replicas:,} wait")  # fmt: skip
        if held < usual:
            yield (f"all as long as {self.ask.context:,} tokens, {held * replicas:,} run at once: of {usual * replicas:,} usual ones "
                   "some may be pushed out and start again")  # fmt: skip

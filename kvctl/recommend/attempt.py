"""One way to serve a model, asked of kvctl size's own rules (SizePlan, Question, Room): does it fit, and what does it hold?"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvctl.allocation import MOST_SLOTS, Part, Serving
from kvctl.engines import Engine
from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.formats import CacheFormat
from kvctl.ranks import Hardware
from kvctl.recommend import takes
from kvctl.recommend.candidate import Candidate, Rejection, Stack
from kvctl.recommend.checkpoints import Checkpoint
from kvctl.recommend.deployment import Deployment
from kvctl.recommend.request import Ask
from kvctl.recommend.space import Split, experts
from kvctl.record import Record
from kvctl.room import Load, Rank, Room
from kvctl.size import SizePlan, prepare
from kvctl.spec import Attention, LatentAttention
from kvctl.units import GIB, format_bytes, plural

HOST_PROCESSES = {"vllm": round(1.85 * GIB)}
"""Bytes that an engine's processes take of a host beside weights and cache. vLLM 0.32 for CPUs with SmolLM2-135M: 2.13 GiB at its peak,
0.25 of it weights and 0.04 cache; larger models take more for activations."""
_BLOCK = 128
"""Weights of a side of a block that has one scale, in checkpoints of 8-bit floats in blocks."""
MOST_BATCHED = 256
"""Requests of one server where a rate is asked for, and nobody says how many come at once: what engines take on GPUs of
less than 70 GiB without being told, and more than most caches hold."""


class Server(Record):
    """One server that starts, and what it holds."""

    room: Room
    load: Load
    serving: Serving
    held: int
    """Requests of the longest length at once."""
    usual: int
    """And of the usual length."""


class Attempt:
    """One engine, format of weights and of the cache, split and batch."""

    def __init__(
        self, ask: Ask, engine: Engine, checkpoint: Checkpoint, split: Split, kv_dtype: str, batch: int | None,
        more: Mapping[str, int],
    ) -> None:  # fmt: skip
        """`more` are settings of its start beside those that follow from the rest."""
        self.ask, self.spec = ask, ask.spec
        self.engine, self.checkpoint, self.split = engine, checkpoint, split
        self.kv_dtype, self.batch, self.more = kv_dtype, batch, more
        self.key: CacheFormat | None = None
        self.beside: tuple[Part, ...] = ()
        """What is taken of a host that no rule of the engine's counts."""

    @property
    def workers(self) -> int:
        """Ranks of one server that each have a pool for requests of their own."""
        return self.split.data

    def rejection(self, kind: str, why: str) -> Rejection:
        return Rejection(kind, self.engine.name, self.checkpoint.weights, self.kv_dtype, self.split.ranks, why)

    def _sized(self, serving: Serving) -> str | None:
        """The format that weights are counted in: beside a budget for the cache nothing is assumed of what no source says."""
        known = self.spec.weights is not None and self.spec.weights.bytes is not None
        if self.checkpoint.sized is None and serving.kv_budget is not None and not known:
            return self.checkpoint.weights
        return self.checkpoint.sized

    def room(self, serving: Serving, context: int) -> Room:
        """The memory of one server that is started so."""
        device, count = self.ask.device, max(self.split.ranks, 1)
        plan = SizePlan(
            engine=self.engine,
            contexts=(context,),
            serving=serving,
            weights_dtype=self._sized(serving),
            hardware=Hardware((device,) * count),
            key=self.key,
            value=None if self.key is None else self.key.values or self.key,
        )
        room = prepare(self.spec, plan).room
        assert room is not None
        return room

    def _uneven(self) -> str:
        """Why SGLang does not start with experts in blocks of 8-bit floats: each rank's part of one has whole blocks (0.5.23,
        layers/quantization/fp8.py)."""
        from kvctl.engines.widths import EXPERT_WIDTHS, first

        if self.engine.name != "sglang" or self.checkpoint.weights != "fp8-block" or not experts(self.spec):
            return ""
        names = (*EXPERT_WIDTHS, "intermediate_size")
        width, ranks = first(text_fields(Fields(self.spec.config)), names), self.split.tensor
        if not width or width % (_BLOCK * ranks) == 0:
            return ""
        return f"sglang keeps blocks of {_BLOCK} whole: experts of {width:,} do not divide into such on {ranks} ranks"

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
            expert_parallel=split.data > 1 and name == "vllm",
            attention_dp=attends,
            # SGLang shares the number out over its workers; the others count for each.
            max_sequences=each * self.workers if name == "sglang" else each,
            max_batched=self.batch,
            # As every engine has it for such a model; of attention-free ones vLLM keeps no prefixes unless it is told to.
            prefix_caching=self.spec.keeps(Attention, LatentAttention),
        ).replace(**self.more)

    def server(self, asked: int | None) -> Server | Rejection:
        """One server for so many requests at once, or why there is none."""
        if why := self._uneven():
            return self.rejection("refused", why)
        return self._slots(asked) if self.engine.slots else self._pool(asked)

    def _pool(self, asked: int | None) -> Server | Rejection:
        """vLLM, SGLang and TensorRT-LLM: a share of the memory is told, and what it leaves is the pool."""
        if not self.split.gpus:
            return self._on_host(asked)
        context, requests = self.ask.context, asked or MOST_BATCHED
        tried: set[int] = set()
        while True:
            serving = self._shared(self.serving(requests))
            room = self.room(serving, context)
            load = room.load(context, 1)
            held, usual = self._held(room, load)
            if load.why or not held:
                return self.rejection("weights" if load.budget <= 0 else "cache", self._why(load))
            tried.add(requests)
            # More than fit would only push each other out: they wait instead; and a smaller batch leaves more for the cache.
            fitting = min(usual, asked or MOST_BATCHED)
            if fitting == requests or (fitting > requests and fitting in tried):
                break
            requests = fitting
        serving = self._told(room, load)
        return Server(room, load, serving, min(held, requests), min(usual, requests))

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

    def _why(self, load: Load) -> str:
        """Why not one request fits."""
        if load.allocation is None or load.budget <= 0:
            return load.why
        return self._arithmetic(load.ranks[load.bottleneck], load.kv[load.bottleneck])

    def _arithmetic(self, rank: Rank, each: int) -> str:
        """What is left of a GPU for requests that take so much of it each."""
        beside = sum(part.bytes for part in rank.parts)
        return (f"{format_bytes(rank.weights)} of weights and {format_bytes(beside)} beside them leave the cache "
                f"{format_bytes(max(rank.budget, 0))} of {format_bytes(rank.device.cuda_bytes)}, and one request of "
                f"{self.ask.context:,} tokens takes {format_bytes(each)}")  # fmt: skip

    def _on_host(self, asked: int | None) -> Server | Rejection:
        """A server on a host, which is told how much memory its cache takes: what the requests need and a block that is set
        aside."""
        context, requests = self.ask.context, asked or 1
        plain = self._shared(self.serving(requests))
        formats = self.room(plain.replace(kv_budget=1), context)
        _, allocation = formats.held(context, 1, plain)
        assert allocation is not None
        self.beside = (
            Part(
                "processes",
                HOST_PROCESSES.get(self.engine.name, 0),
                True,
                "what its processes had in tests, with torch",
            ),
        )
        beside = self.beside[0].bytes
        free = self.ask.device.available_bytes - formats.weights[0] - beside
        size = allocation.blocks_per_request * allocation.bytes_per_block
        requests = min(requests, (free - allocation.bytes_per_block) // size)
        if requests < 1:
            return self.rejection("cache", (
                f"one request of {context:,} tokens takes {format_bytes(size)}, and weights of "
                f"{format_bytes(formats.weights[0])} and {format_bytes(beside)} of its processes leave {format_bytes(max(0, free))} of "
                f"{self.ask.device.name}"))  # fmt: skip
        serving = self._shared(self.serving(requests)).replace(kv_budget=requests * size + allocation.bytes_per_block)
        room = self.room(serving, context)
        load = room.load(context, 1)
        if load.why:
            return self.rejection("cache", load.why)
        held, usual = self._held(room, load)
        return Server(room, load, serving, min(held, requests), min(usual, requests))

    # -- engines with slots -----------------------------------------------------------------

    def _slots(self, asked: int | None) -> Server | Rejection:
        """llama.cpp and Ollama: a slot of the longest length for each request."""
        wanted = min(asked or MOST_SLOTS, MOST_SLOTS)
        count = wanted
        why, kind = "", "cache"
        while count:
            serving = Serving(
                device="gpu" if self.split.gpus else "cpu",
                slots=count,
                flash_attention=True,
                unified=False if self.engine.slots == "shared" else None,
            ).replace(**self.more)
            total = self.ask.context if self.engine.slots == "own" else count * self.length
            room = self.room(serving, total)
            load = room.load(total, 1)
            rank = load.ranks[load.bottleneck]
            if load.fits:
                return Server(room, load, serving, count, count)
            why = load.why
            if load.budget <= 0 or rank.weights >= rank.free:
                kind = "weights"
                break
            # Slots take equal parts of the cache, and a few bytes more beside it: so many can fit at most.
            each = load.kv[load.bottleneck] // count
            why = self._arithmetic(rank, each)
            count = min(count - 1, rank.budget // max(each, 1))
        return self.rejection(kind, why)

    @property
    def length(self) -> int:
        """Tokens of a slot: llama.cpp has whole 256ths."""
        return -(-self.ask.context // 256) * 256

    # -- what comes out ---------------------------------------------------------------------

    def _offloaded(self, room: Room) -> int:
        """Bytes of the weights that the GPUs have not."""
        serving = room.laid.serving
        if serving.cpu_offload is not None:
            return serving.cpu_offload * self.split.ranks
        if serving.gpu_layers is None:
            return 0
        whole = self.room(serving.replace(gpu_layers=None), self.length)
        return sum(whole.weights) - sum(room.weights)

    def _explicit(self, serving: Serving, load: Load) -> Serving:
        """The options, with those named that the plan took as the engine's defaults: the same start, whatever the next version's are."""
        if self.engine.slots == "shared":
            # llama-server's own batches; a host that weights lie in has no memory to spare for earlier prompts.
            kept = serving.prompt_cache
            if kept is None:
                kept = 8192 if self.split.gpus and serving.gpu_layers is None else 0
            return serving.replace(batch=serving.batch or 2048, ubatch=serving.ubatch or 512, prompt_cache=kept)
        if self.engine.slots:
            return serving
        found, size = load.allocation, serving.block_size
        if size is None and found is not None and len(found.groups) == 1:  # those of hybrids follow from their states
            size = found.block_size or None
        return serving.replace(block_size=size)

    def candidate(self, server: Server, replicas: int) -> Candidate:
        """So many such servers side by side."""
        room, load, serving, held, usual = server.room, server.load, server.serving, server.held, server.usual
        ask, split, rank = self.ask, self.split, load.ranks[load.bottleneck]
        asked = ask.concurrency
        how = takes.weights(self.engine, ask.device, self.checkpoint.weights)
        deployment = Deployment(
            base=ask.spec.id,
            model=self.checkpoint.loads,
            engine=self.engine,
            serving=self._explicit(serving, load),
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
        parts = (*rank.parts, *self.beside)
        stack = Stack(rank.device.cuda_bytes, rank.weights, parts, each, max(each, load.reserved(load.bottleneck)))
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
            offloaded=self._offloaded(room),
            native=how is not None and takes.computes(how, ask.device),
            notes=(*self._notes(held, usual, stack, load, replicas), *_doubts(room, load)),
        )

    def _notes(self, held: int, usual: int, stack: Stack, load: Load, replicas: int) -> Iterator[str]:
        asked = self.ask.concurrency
        if not self.split.gpus and not self.engine.slots:
            seen = (
                f", but for {format_bytes(self.beside[0].bytes)} of processes with a small model"
                if self.beside and self.beside[0].bytes
                else ""
            )
            yield f"what {self.engine.name} takes of a host beside weights and cache is not known{seen}"
        if asked is not None and usual * replicas < asked:
            wanted, beside = -(-asked // replicas), sum(part.bytes for part in stack.parts)
            each = load.kv[load.bottleneck] // (held if self.engine.slots else 1)
            yield (f"{plural(wanted, 'request')} of {self.ask.context:,} tokens take {format_bytes(-(-wanted // self.workers) * each)}, "
                   f"and {format_bytes(stack.weights)} of weights and {format_bytes(beside)} beside them leave "
                   f"{format_bytes(max(load.ranks[load.bottleneck].budget, 0))} of {format_bytes(stack.device)}: {usual * replicas:,} requests run at once, "
                   f"and {asked - usual * replicas:,} wait")  # fmt: skip
        if held < usual:
            yield (f"all as long as {self.ask.context:,} tokens, {held * replicas:,} run at once: of {usual * replicas:,} usual ones "
                   "some may be pushed out and start again")  # fmt: skip


def _doubts(room: Room, load: Load) -> Iterator[str]:
    """What `kvctl size` would warn of, and what it had to assume of the weights."""
    if load.allocation is not None:
        yield from load.allocation.warnings
    for guess in room.guesses:
        if "as if" in guess or "equal share" in guess:
            yield f"estimated: {guess}"

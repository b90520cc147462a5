"""Which ways to serve a model fit, and why the others do not.

Every one is asked of `kvctl size`'s own rules: nothing here knows how large a cache is. What they have in common is worked
out once: weights by format and split, layouts of the cache by split and format (`kvctl.kept`); and where the weights alone
are more than the GPUs have, nothing else is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from kvctl.engines import Engine
from kvctl.errors import ConfigError, KvctlError
from kvctl.formats import BF16, FP32, DType
from kvctl.recommend import space, takes
from kvctl.recommend.attempt import MOST_BATCHED, Attempt, Server
from kvctl.recommend.candidate import Candidate, Found, Rejection
from kvctl.recommend.checkpoints import Checkpoint, checkpoints, gguf_types, unknown_storage
from kvctl.recommend.request import Ask
from kvctl.recommend.space import Split
from kvctl.search import last
from kvctl.size import completed
from kvctl.units import GIB, format_bytes, plural


def search(ask: Ask) -> Found:
    """Every deployment of the space that fits."""
    return Search(ask).run()


class Search:
    """One request's space, walked."""

    def __init__(self, ask: Ask, *, widest: bool = False) -> None:
        """`widest`: as many replicas alone as there is room for; with fewer each has more to do."""
        self.widest = widest
        # Once, so that what is kept of the model is found again.
        self.ask = ask = ask.replace(spec=completed(ask.spec))
        dtype = ask.spec.dtype
        self.dtype = BF16 if not isinstance(dtype, DType) or dtype is FP32 else dtype
        self.rejected: dict[tuple[str, str, str], Rejection] = {}
        self.tried = 0
        self._servers: dict[tuple[object, ...], tuple[Attempt, Server | Rejection]] = {}
        """However many stand side by side, one that is asked for as much is the same."""

    def run(self) -> Found:
        return Found(tuple(self.walk()), tuple(self.rejected.values()), self.tried)

    def walk(self) -> Iterator[Candidate]:
        """Candidates one after another, as they are found."""
        for engine in self.ask.engines:
            yield from self._of_engine(engine)

    def _of_engine(self, engine: Engine) -> Iterator[Candidate]:
        ask = self.ask
        why = takes.runs(engine, ask.device) or takes.computes_in(engine, ask.device, ask.spec)
        offered = gguf_types(ask.spec) if engine.slots else checkpoints(ask.spec)
        considered = space.weights(engine, ask.device, offered, ask.pins)
        if why or not considered:
            kind = "engine" if why or not offered else "format"
            if not why and (unknown := unknown_storage(ask.spec)):
                kind, why = "unknown", unknown
            elif not why and ask.pins.weights is not None:
                why = (
                    f"{engine.name} runs no {ask.pins.weights} of {ask.spec.id} on {ask.device.name} that is to be had"
                )
            why = why or (f"{engine.name} takes none of the formats that {ask.spec.id} is to be had in on {ask.device.name}"
                          if offered else f"no format of {ask.spec.id} is known that {engine.name} reads")  # fmt: skip
            self._reject(kind, engine, "", "", 0, why)
            return
        if engine.slots and ask.pins.split:
            self._reject("engine", engine, "", "", 0, f"{engine.name} has no ranks as -tp and -pp count them")
            return
        for checkpoint in considered:
            yield from self._of_weights(engine, checkpoint)

    def _of_weights(self, engine: Engine, checkpoint: Checkpoint) -> Iterator[Candidate]:
        least: int | None = None
        names = takes.caches(engine, self.ask.device, self.ask.spec)
        names = tuple(name for name in names if self.ask.pins.holds(name))
        if not names:
            told = self.ask.pins.kv_dtype or ""
            self._reject(
                "format",
                engine,
                "",
                told,
                0,
                f"{engine.name} keeps no cache in {told} on {self.ask.device.name} that kvctl would recommend",
            )
            return
        try:
            least = self._loaded(engine, checkpoint)
        except KvctlError as error:
            self._reject("unknown", engine, checkpoint.weights, "", 0, error.message)
            return
        enough: dict[tuple[str, int], int] = {}
        some = False
        for split in space.splits(engine, self.ask):
            many = len(names) * len(space.replicas(split, self.ask))
            ranks, free = max(split.ranks, 1), self.ask.device.available_bytes
            if least is not None and -(-least // ranks) >= free:
                self._reject("weights", engine, checkpoint.weights, "", ranks, (
                    f"weights of {format_bytes(least)} on {plural(ranks, 'GPU')}: {format_bytes(-(-least // ranks))} each, "
                    f"and {self.ask.device.name} has {format_bytes(free)}"), many)  # fmt: skip
                continue
            for name in names:
                for candidate in self._of_cache(engine, checkpoint, split, name, enough):
                    some = True
                    yield candidate
        if not some and self.ask.host and self.ask.gpus:
            for name in names:
                yield from self._offloaded(engine, checkpoint, name, self.ask.host)

    def _offloaded(self, engine: Engine, checkpoint: Checkpoint, name: str, host: int) -> Iterator[Candidate]:
        """One server on all GPUs of a node with as few weights as can be in the host's memory."""
        split = space.offloading(engine, self.ask)
        if split is None:
            return
        batch, *_ = space.batches(engine, self.ask, self.ask.concurrency or MOST_BATCHED)
        layers = len(self.ask.spec.layers)

        def fit(steps: int) -> Candidate | None:
            """With so many layers (llama.cpp), or GiB of every GPU's weights, in the host's memory."""
            more = {"gpu_layers": layers - steps} if engine.slots else {"cpu_offload": steps * GIB}
            self.tried += 1
            found = self.fit(engine, checkpoint, split, name, batch, 1, more)
            return None if isinstance(found, Rejection) else found

        most = layers if engine.slots else host // GIB // split.ranks
        if most < 1 or fit(most) is None:
            return
        # What does not fit with so much there does not with less.
        found = fit(most - last(lambda less: fit(most - less) is not None, 0, most))
        if found is not None and found.offloaded <= host:
            yield found

    def _loaded(self, engine: Engine, checkpoint: Checkpoint) -> int | None:
        """Bytes of the weights on one rank that has all of them; None where only a plan says it."""
        if not engine.splits or not self.ask.gpus:
            return None
        from kvctl.weigh import weigh

        info = weigh(self.ask.spec, (1, 1, False, 1, ()), self.dtype, checkpoint.sized, [], by_rank=True, assume=True)
        return info.per_rank[0] if info is not None and info.per_rank is not None else None

    def _of_cache(
        self, engine: Engine, checkpoint: Checkpoint, split: Split, name: str, enough: dict[tuple[str, int], int]
    ) -> Iterator[Candidate]:
        """Batches and replicas, most of these first: each then has least to do.

        `enough`: the fewest GPUs of a server that hold all, by format of the cache and replicas (0: any).
        """
        asked, first = self.ask.concurrency, True
        if enough.get((name, 0), split.ranks) < split.ranks and space.staged(split, self.ask):
            return
        counts = space.replicas(split, self.ask)
        if self.widest and asked is None:
            counts = counts[-1:]
        for count in reversed(counts):
            if engine.slots and enough.get((name, count), split.ranks) < split.ranks:
                continue
            requests = MOST_BATCHED if asked is None else -(-asked // count)
            if asked is not None and -(-asked // requests) < count and self.ask.pins.replicas is None:
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
            enough.setdefault((name, count), split.ranks)
            enough.setdefault((name, 0), split.ranks)
            yield from found

    def again(self, candidate: Candidate) -> Candidate | Rejection:
        """A candidate of another request as this one's: the same way to serve, with limits of its own."""
        deployment = candidate.deployment
        batch = deployment.serving.max_batched
        return self.fit(
            deployment.engine, candidate.checkpoint, candidate.split, deployment.kv_dtype, batch, deployment.replicas
        )

    def fit(
        self, engine: Engine, checkpoint: Checkpoint, split: Split, kv_dtype: str, batch: int | None, replicas: int,
        more: Mapping[str, int] | None = None,
    ) -> Candidate | Rejection:  # fmt: skip
        """One deployment with its limits filled in, or why there is none; `more` are settings of its start."""
        ask = self.ask
        asked = None if ask.concurrency is None else -(-ask.concurrency // replicas)
        key = engine.name, checkpoint, split, kv_dtype, batch, asked, tuple((more or {}).items())
        if key not in self._servers:
            tried = Attempt(ask, engine, checkpoint, split, kv_dtype, batch, more or {})
            self._servers[key] = tried, self._server(tried, asked)
        tried, found = self._servers[key]
        return found if isinstance(found, Rejection) else tried.candidate(found, replicas)

    def _server(self, tried: Attempt, asked: int | None) -> Server | Rejection:
        try:
            if tried.kv_dtype != "auto":
                tried.key = tried.engine.kv_dtype(tried.kv_dtype, "--kv-cache-dtype")
            return tried.server(asked)
        except KvctlError as error:
            return tried.rejection("unknown" if isinstance(error, ConfigError) else "refused", error.message)

    def _reject(self, kind: str, engine: Engine, weights: str, kv: str, gpus: int, why: str, count: int = 1) -> None:
        key = kind, engine.name, weights
        before = self.rejected.get(key)
        if before is None or gpus > before.gpus:
            self.rejected[key] = Rejection(
                kind, engine.name, weights, kv, gpus, why, count + (before.count if before is not None else 0)
            )
        else:
            self.rejected[key] = before.replace(count=before.count + count)

"""What advice is about: one deployment with its workload and numbers; and what advice is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvctl.record import Record
from kvctl.units import format_bytes, plural

if TYPE_CHECKING:
    from kvctl.recommend.deployment import Deployment
    from kvctl.recommend.quality import Loss, Quality
    from kvctl.spec import ModelSpec
    from kvctl.speed import Range

YES, NO, DEPENDS = "yes", "no", "depends"
GAIN = 0.1
"""Share of the bytes that a smaller format has to save: with less, its own kernels and scales may cost more."""


class Advice(Record):
    """One technique's place in this case."""

    technique: str
    verdict: str
    """yes, no or depends."""
    because: str
    """One sentence, with this case's numbers."""
    how: str | None
    """The flag to set, or what else to do; None where there is nothing to set."""
    source: str
    """Where the technique, or the rule, comes from."""

    def to_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self._fields}


class Work(Record):
    """The load on one replica."""

    prompt: int
    """Tokens of a prompt, on average; at least 1."""
    answer: int
    """Tokens of an answer, on average; at least 1."""
    concurrency: int
    """Requests in service at once."""
    rate: float | None = None
    """Requests a second, where they come by the clock."""
    shared: int = 0
    """Tokens that every prompt begins with, where no trace says it."""
    hit_rate: float | None = None
    """Share of prompt tokens that a replayed trace finds in the cache (kvctl.replay, policy "prefix")."""
    endless: float | None = None
    """The same in a cache without end; `hit_rate` is that of the pool."""
    reuse_seconds: float | None = None
    """Until a prefix is asked for again."""
    ttft: float | None = None
    """Objective, seconds."""
    tpot: float | None = None
    """Objective, seconds."""

    @property
    def length(self) -> int:
        """Tokens of a request when it ends."""
        return self.prompt + self.answer

    @property
    def found(self) -> float | None:
        """Share of prompt tokens that need not be computed again; None where nothing says it."""
        if self.hit_rate is not None:
            return self.hit_rate
        return min(self.shared / self.prompt, 1.0) if self.shared else None

    @property
    def comes_again(self) -> float | None:
        """Share of prompt tokens that was computed before, whether it is still there or not."""
        return self.endless if self.endless is not None else self.found


class KvChoice(Record):
    """A format of the cache that this engine runs on this GPU."""

    name: str
    """The engine's word."""
    capacity: int | None
    """Tokens that the pool of one replica then holds."""
    how: str
    """Flags."""
    token_bytes: int | None = None
    """As of `Numbers`, in this format."""


class WeightChoice(Record):
    """A format of the weights that can be had, and that this engine runs on this GPU."""

    name: str
    """Of kvctl.weight_formats, or a GGUF type."""
    rank_bytes: int
    """On the rank with most."""
    how: str
    """The checkpoint to load, or what to make first."""


class Sibling(Record):
    """A smaller model of the same family."""

    name: str
    parameters: int
    token_bytes: int
    """Of its cache, over all ranks."""


class Numbers(Record):
    """What was computed for the deployment; None is not known."""

    token_bytes: int
    """One more token of one sequence, on one rank."""
    capacity: int | None = None
    """Tokens that the pool of one replica holds."""
    rank_weights: int = 0
    """Bytes of the weights on one rank."""
    host_weights: int = 0
    """Bytes of a server's weights that stay in the host's memory."""
    graph_bytes: int | None = None
    """CUDA graphs on one rank."""
    free: int | None = None
    """Bytes of the fullest rank that nothing is promised of."""
    prefill_rate: Range | None = None
    """Prompt tokens that one replica computes in a second, without a queue."""
    tpot: Range | None = None
    ttft: Range | None = None
    eager_tpot: Range | None = None
    """The same without CUDA graphs."""
    decode_bound: str = ""
    """weights, cache, compute, communication or overhead: see kvctl.speed."""
    kv_choices: tuple[KvChoice, ...] = ()
    weight_choices: tuple[WeightChoice, ...] = ()
    siblings: tuple[Sibling, ...] = ()
    host_bytes: int | None = None
    """Memory of the host that is free for a cache."""
    pcie_gbs: float | None = None
    """10^9 bytes a second between one GPU and the host, as measured; None: by the card's generation."""
    disk_gbs: float | None = None
    acceptance: Mapping[str, float] = {}
    """Measured share of drafted tokens that are accepted, by method: ngram, eagle3, mtp, draft_model."""


class Case(Record):
    """One deployment, its workload and its numbers."""

    deployment: Deployment
    spec: ModelSpec
    work: Work
    numbers: Numbers
    quality: Quality
    max_loss: float | None = None
    """Percent; None: no limit."""

    @property
    def engine(self) -> str:
        return self.deployment.engine.name

    @property
    def each(self) -> str:
        """Where bytes of one rank are, in words."""
        return "a GPU" if self.deployment.gpus else "on the host"

    @property
    def needed(self) -> int:
        """Tokens that all requests in service hold when they end."""
        return self.work.concurrency * min(self.work.length, self.deployment.context)

    @property
    def short(self) -> int | None:
        """Tokens that the pool is short of; 0 where it is large enough, None where its size is not known."""
        capacity = self.numbers.capacity
        return None if capacity is None else max(0, self.needed - capacity)

    @property
    def missed(self) -> tuple[str, ...]:
        """Objectives that the likeliest figures miss, and the cache where it is short: in words."""
        out = []
        for name, limit, figure in (
            ("TTFT", self.work.ttft, self.numbers.ttft),
            ("TPOT", self.work.tpot, self.numbers.tpot),
        ):
            if limit is not None and figure is not None and figure.mid > limit:
                out.append(f"{name} {seconds(figure.mid)} of {seconds(limit)}")
        if self.short:
            out.append(f"the cache holds {self.numbers.capacity:,} of {self.needed:,} tokens")
        return tuple(out)


def seconds(value: float) -> str:
    from kvctl.units import format_seconds

    return format_seconds(value)


def loss_words(loss: Loss) -> str:
    """ "loses 0.4 to 0.9%, likeliest 0.7% (accuracy, published)"."""
    if loss.percent is None:
        return "what it loses is not known"
    if not loss.metric:
        return "nothing is lost"
    low, mid, high = loss.percent.low, loss.percent.mid, loss.percent.high
    how = "measured on this model" if loss.measured else "published"
    return f"it loses {low:.2g} to {high:.2g}%, likeliest {mid:.2g}% ({loss.metric}, {how})"


def judged(loss: Loss, limit: float | None) -> str:
    """The verdict of a loss alone: without a limit, only what is not known is open."""
    if limit is None:
        return DEPENDS if loss.percent is None else YES
    return {"yes": YES, "no": NO}.get(loss.allowed(limit), DEPENDS)


def requests(count: int) -> str:
    return plural(count, "request")


def size(count: int) -> str:
    return format_bytes(count)

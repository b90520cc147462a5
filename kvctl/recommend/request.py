"""What somebody wants served: a model, on some hardware, for a load, with objectives."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from kvctl.engines import ENGINES, Engine
from kvctl.errors import UsageError
from kvctl.hardware import Device
from kvctl.recommend.kinds import other_than_text
from kvctl.record import Record
from kvctl.spec import ModelSpec
from kvctl.units import MAX_TOKENS, plural

if TYPE_CHECKING:
    from kvctl.recommend.load import Heard, Load, Reuse

GOALS = ("cost", "latency", "throughput", "context", "quality")
SERVERS = ("vllm", "sglang", "tensorrt-llm", "llama.cpp")
"""Engines that are considered without being named, in the order in which equals are told."""
_OTHERS = ("ollama",)
"""Those that are when they are named: Ollama runs llama.cpp's server."""
MOST_NODES, MOST_GPUS, MOST_REQUESTS = 256, 64, 2**20
USUAL_CONTEXT = 32 * 1024
"""Tokens of the longest request where nobody says it and the model takes more."""


class Pins(Record):
    """What is settled already, and not searched for; None is open."""

    weights: str | None = None
    """A format, in the words of `kvctl size --weights-dtype`."""
    kv_dtype: str | None = None
    tensor: int | None = None
    pipeline: int | None = None
    replicas: int | None = None

    @property
    def split(self) -> bool:
        """Whether anything says how one server lies on GPUs."""
        return self.tensor is not None or self.pipeline is not None

    def wants(self, weights: str) -> bool:
        """Whether weights may have this format; "fp8" is each of its kinds."""
        own = self.weights
        return own is None or weights == own or (own == "fp8" and weights.startswith("fp8-"))

    def holds(self, cache: str) -> bool:
        """Whether keys and values may have this format, in any engine's word; "fp8" is either of its kinds."""
        from kvctl.recommend.quality import same_cache

        own = self.kv_dtype
        return own is None or same_cache(cache, own) or (own == "fp8" and cache.startswith("fp8_e"))


class Ask(Record):
    """A request, checked; tokens, seconds, requests a second."""

    spec: ModelSpec
    device: Device
    """One of the GPUs, or the host; all are of this kind."""
    gpus: int
    """GPUs of each node; 0 for a host alone."""
    nodes: int
    context: int
    """The longest request, prompt and answer."""
    prompt: int
    """Of the usual request."""
    answer: int
    concurrency: int | None
    """Requests at once; None where a rate is named instead."""
    rate: float | None
    engines: tuple[Engine, ...]
    ttft: float | None = None
    """Seconds to the first token at most."""
    tpot: float | None = None
    """Seconds between tokens at most."""
    slo_percent: float = 99.0
    """How many requests of a hundred are to keep these two, where a test or an alarm counts them."""
    goal: str = "throughput"
    max_quality_loss: float | None = None
    """Percent."""
    host: int | None = None
    """Bytes of a node's memory that weights may stay in; None where none of them may."""
    notes: tuple[str, ...] = ()
    """What was assumed."""
    reuse: Reuse | None = None
    """How much of a prompt is found in a cache; None where nothing says it, and nothing is counted on."""
    pins: Pins = Pins()

    @property
    def all_gpus(self) -> int:
        return self.gpus * self.nodes


def ask(
    spec: ModelSpec,
    devices: Sequence[Device],
    *,
    nodes: int = 1,
    context: int | None = None,
    prompt: int | None = None,
    answer: int | None = None,
    concurrency: int | None = None,
    rate: float | None = None,
    engines: Sequence[Engine] = (),
    ttft: float | None = None,
    tpot: float | None = None,
    slo_percent: float = 99.0,
    goal: str = "throughput",
    max_quality_loss: float | None = None,
    host: int | None = None,
    heard: Heard | None = None,
    shared: int | None = None,
    pins: Pins | None = None,
) -> Ask:
    """A request with what it leaves out filled in; `devices` are those of one node, `engines` none for all.

    `heard`: a trace, which says lengths and, where neither `concurrency` nor `rate` does, how often requests come;
    `shared`: tokens that every prompt begins with.

    Raises:
        UsageError: something that cannot be, or contradicts itself.

    """
    notes: list[str] = []
    device, gpus = _hardware(devices, nodes)
    if spec.provenance.source == "shape":
        raise UsageError("a bare shape has no weights to recommend a configuration for", hint="name a model")
    if other := other_than_text(spec):
        raise UsageError(f"{spec.id} is {other}: what is recommended is for models that answer with text, token by token",
                         hint=f"kvctl size {spec.id} says what memory it takes")  # fmt: skip
    reuse: Reuse | None = None
    if heard is not None:
        if prompt is not None or answer is not None or shared is not None:
            raise UsageError(f"{heard.name} has lengths of its own, and says what prompts share",
                             hint="leave --input-tokens, --output-tokens and --shared-prefix out")  # fmt: skip
        load = _load(spec, context, heard)
        notes.extend(load.notes)
        if context is None:
            notes.append(f"the longest request of {heard.name} has {load.longest:,} tokens; --ctx names another length")
        context, prompt, answer, reuse = context or load.longest, load.prompt, load.answer, load.reuse
        if concurrency is None and rate is None and load.rate is not None:
            rate = load.rate
            notes.append(f"{heard.name}: {rate:.3g} requests a second; --rate or --concurrency names another load")
    if not spec.layers:
        raise UsageError(f"{spec.id} has no layers", hint="--set num_hidden_layers=0 leaves nothing to serve")
    context, prompt, answer = _lengths(spec, context, prompt, answer, notes)
    if shared is not None:
        reuse = _shared(shared, prompt)
    if concurrency is not None and rate is not None:
        raise UsageError("--concurrency and --rate both say how much comes",
                         hint="one of them: requests at once, or requests a second")  # fmt: skip
    if concurrency is not None and not 1 <= concurrency <= MOST_REQUESTS:
        raise UsageError(f"--concurrency {concurrency:,}: {'nobody is' if concurrency < 1 else 'too many are'} to be served",
                         hint=f"from 1 to {MOST_REQUESTS:,} requests at once")  # fmt: skip
    if concurrency is None and rate is None:
        concurrency = 1
        notes.append("one request at a time, for neither --concurrency nor --rate is named")
    _positive(rate, "--rate", "requests a second")
    _positive(ttft, "--slo ttft", "seconds")
    _positive(tpot, "--slo tpot", "seconds")
    if goal not in GOALS:
        raise UsageError(f"--goal: unknown goal {goal[:40]!r}", hint="one of " + ", ".join(GOALS))
    for value, name in ((max_quality_loss, "--max-quality-loss"), (host, "memory of the host")):
        if value is not None and not 0 <= value < math.inf:
            raise UsageError(f"{name}: {value:g} is out of range", hint="0 or more")
    pins = pins or Pins()
    _check_pins(pins, gpus * nodes)
    return Ask(
        spec, device, gpus, nodes, context, prompt, answer, concurrency, rate, _engines(engines, device), ttft, tpot, slo_percent,
        goal, max_quality_loss, host, (*dict.fromkeys(note for one in devices for note in one.notes), *notes), reuse, pins,
    )  # fmt: skip


def _check_pins(pins: Pins, gpus: int) -> None:
    for value, name in ((pins.tensor, "-tp"), (pins.pipeline, "-pp"), (pins.replicas, "--replicas")):
        if value is not None and value < 1:
            raise UsageError(f"{name} {value} is out of range", hint="1 or more")
    wanted = (pins.tensor or 1) * (pins.pipeline or 1) * (pins.replicas or 1)
    if wanted > max(gpus, 1):
        raise UsageError(f"{plural(wanted, 'GPU')} are wanted by -tp, -pp and --replicas, and there "
                         f"{'is' if gpus == 1 else 'are'} {gpus}", hint=f"--gpu {wanted}xNAME, or fewer ranks")  # fmt: skip


def _hardware(devices: Sequence[Device], nodes: int) -> tuple[Device, int]:
    """One of the devices, and how many a node has."""
    if not devices:
        raise UsageError("no GPU to run on", hint="--gpu H100, 8xH200, local or cpu")
    if len(devices) > MOST_GPUS:
        raise UsageError(
            f"{plural(len(devices), 'GPU')} in one node", hint=f"at most {MOST_GPUS}, and --nodes for more"
        )
    if not 1 <= nodes <= MOST_NODES:
        raise UsageError(f"--nodes {nodes} is out of range", hint=f"from 1 to {MOST_NODES}")
    kinds = dict.fromkeys((device.name, device.cuda_bytes) for device in devices)
    if len(kinds) > 1:
        raise UsageError("GPUs of several kinds: " + ", ".join(name for name, _ in kinds),
                         hint="engines divide a model evenly: ask for each kind alone")  # fmt: skip
    least = min(devices, key=lambda one: one.available_bytes)  # what is free of the fullest is what all have
    if least.kind == "cpu":
        if nodes > 1:
            raise UsageError("--nodes is about GPUs, and cpu is one host", hint="leave --nodes out, or name GPUs")
        return least, 0
    return least.replace(index=None, uuid=None, notes=()), len(devices)


def _load(spec: ModelSpec, context: int | None, heard: Heard) -> Load:
    limits = [limit for limit in (context, spec.max_context) if limit is not None]
    return heard.load(min(limits) if limits else None)


def _shared(tokens: int, prompt: int) -> Reuse:
    from kvctl.recommend.load import Shared

    if not 1 <= tokens <= prompt:
        raise UsageError(f"--shared-prefix {tokens:,}: prompts have {plural(prompt, 'token')}",
                         hint="1 or more, and no more than --input-tokens")  # fmt: skip
    return Shared(tokens, prompt)


def _lengths(
    spec: ModelSpec, context: int | None, prompt: int | None, answer: int | None, notes: list[str]
) -> tuple[int, int, int]:
    """Tokens of the longest request, of the usual prompt and of the usual answer."""
    for value, name in ((context, "--ctx"), (prompt, "--input-tokens"), (answer, "--output-tokens")):
        if value is not None and not 1 <= value <= MAX_TOKENS:
            raise UsageError(f"{name}: {plural(value, 'token')} are none that could be", hint="at least 1")
    both = (prompt or 0) + (answer or 0)
    if context is None:
        usual = min(spec.max_context or USUAL_CONTEXT, USUAL_CONTEXT)
        context = both if prompt and answer else max(usual, both + 1 if both else usual)
        notes.append(f"the longest request has {context:,} tokens; --ctx names another length")
    if spec.max_context is not None and context > spec.max_context:
        raise UsageError(
            f"{context:,} tokens are more than the {spec.max_context:,} that {spec.id} takes",
            hint=f"--ctx {spec.max_context}, or, where the model was made to be stretched, "
            f"--set max_position_embeddings={context} with the engine's own rope scaling",
        )
    if not (prompt and answer) and both >= context:
        what, rest = ("a prompt", "an answer") if prompt else ("an answer", "a prompt")
        raise UsageError(
            f"{what} of {both:,} tokens leaves no room for {rest} in {context:,}",
            hint=f"--ctx {both + 1}, or a shorter one",
        )
    if both > context:
        raise UsageError(f"a prompt of {prompt or 0:,} tokens and an answer of {answer or 0:,} do not fit in {context:,}",
                         hint=f"--ctx {both}, or shorter ones")  # fmt: skip
    if prompt is None and answer is None:
        if context < 2:
            raise UsageError("a request of one token has no answer", hint="--ctx 2 or more")
        answer = max(1, context // 8)
        notes.append(
            f"requests are as long as can be, an eighth of it the answer: {context - answer:,} and {answer:,} tokens"
        )
    answer = context - prompt if answer is None and prompt is not None else answer
    assert answer is not None
    return context, context - answer if prompt is None else prompt, answer


def _positive(value: float | None, name: str, unit: str) -> None:
    if value is not None and not 0 < value < math.inf:
        raise UsageError(f"{name}: {value:g} {unit} cannot be reached", hint="more than 0")


def _engines(engines: Sequence[Engine], device: Device) -> tuple[Engine, ...]:
    """Those that are considered, in the order of the table."""
    known = SERVERS + _OTHERS
    for engine in engines:
        if engine.name not in known:
            raise UsageError(
                f"--engine {engine.name} is no server that is recommended", hint="one of any, " + ", ".join(known)
            )
    if engines:
        return tuple(dict.fromkeys(engines))
    by_name = {engine.name: engine for engine in ENGINES}
    return tuple(by_name[name] for name in SERVERS)

"""The points of a profile: each context and batch is observed once and then timed, beside its prediction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl import signals
from kvctl.allocation import Serving
from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.measure.cache import CacheBytes, ModuleStates, walk
from kvctl.measure.devices import synchronizer, watch_all
from kvctl.measure.faults import first_line
from kvctl.measure.idle import Others
from kvctl.measure.layerclock import LayerClock
from kvctl.measure.limits import limits_of
from kvctl.measure.loaded import Loaded
from kvctl.measure.memory import give_back, is_out_of_memory, shortage
from kvctl.measure.passes import Passes
from kvctl.measure.report import CacheRow, MemoryUse, Point, ScaledTimes, Work
from kvctl.measure.statistics import Sample
from kvctl.measure.thin import Thinned
from kvctl.measure.work import WorkCounter
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.spec import NoState

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.rates import Rates
    from kvctl.measure.run import Now
    from kvctl.reports import SizeResult
    from kvctl.spec import ModelSpec


class Asked(Record):
    """What is to be measured: every context with every batch."""

    contexts: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    decode: int = 64
    prefill_chunk: int | None = None
    repeat: int = 3
    """Timed runs; 0 observes cache and memory alone."""
    encoder_tokens: int | None = None
    seed: int = 0

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """(context, batch), the small ones first: what is learnt cheaply is learnt before memory runs out."""
        return sorted(
            ((context, batch) for context in self.contexts for batch in self.batches), key=lambda p: (p[0] * p[1], p)
        )


class Predictor(Record):
    """What `size` says of the cache that is measured."""

    spec: ModelSpec
    dtype: DType
    encoder_tokens: int | None = None
    ranks: int = 1

    def at(self, tokens: int, batch: int) -> SizeResult:
        """The prediction for so many tokens of so many sequences."""
        serving = Serving(tensor_parallel=self.ranks if self.ranks > 1 else None)
        plan = SizePlan(
            TRANSFORMERS, sequences=batch, dtype=self.dtype, encoder_tokens=self.encoder_tokens, serving=serving
        )  # fmt: skip
        return size(self.spec, tokens, plan)

    def bytes(self, tokens: int, batch: int) -> int:
        """Bytes on each rank."""
        result = self.at(tokens, batch)
        return result.allocation.reserved_bytes if result.allocation is not None else result.kv_bytes


def check_lengths(spec: ModelSpec, asked: Asked) -> None:
    """Refuses what is longer than the positions that the model has.

    Raises:
        UsageError: a context, with the tokens that are generated after it, goes beyond them; or there is nothing to run.

    """
    if (
        not asked.contexts
        or not asked.batches
        or min(*asked.contexts, *asked.batches, 1 if asked.prefill_chunk is None else asked.prefill_chunk) < 1
    ):
        raise UsageError("a prompt has at least 1 token, a batch 1 sequence, and a chunk 1 token")
    if asked.decode < 0 or asked.repeat < 0:
        raise UsageError("tokens to generate and repetitions are no negative numbers")
    longest = max(asked.contexts) + asked.decode
    if spec.max_context is not None and longest > spec.max_context:
        raise UsageError(
            f"{max(asked.contexts):,} tokens and {asked.decode:,} more are beyond the {spec.max_context:,} positions of {spec.id}",
            hint=f"--ctx {spec.max_context - asked.decode} is the longest" if spec.max_context > asked.decode
            else "fewer --decode",
        )  # fmt: skip


def measure(
    loaded: Loaded, asked: Asked, dtype: DType, tokens: Callable[[int, int], Any], rates: Rates | None, now: Now,
    done: Callable[[Point], None],
) -> float | None:  # fmt: skip
    """Every point in turn, handed to `done` as it is complete; `tokens` gives ids [batch, length].

    A point that runs out of memory is a result with an error, and larger ones are not tried. Ctrl-C goes through.
    Returns the share of the processors that other programs took while times were measured, where the system tells.

    Raises:
        KvctlError: the model cannot be run, or computes no numbers.

    """
    import torch

    run = _Run(loaded, asked, dtype, tokens, rates, now)
    failed: list[tuple[int, int]] = []
    for context, batch in asked.pairs:
        if any(context >= c and batch >= b for c, b in failed):
            done(Point(context, batch, asked.decode, error="not tried: a smaller one ran out of memory"))
            continue
        try:
            with torch.inference_mode():
                point = run.point(context, batch)
        except KvctlError:
            raise
        except Exception as error:
            run.passes.drop()
            give_back()
            if not is_out_of_memory(error):
                raise _cannot_run(loaded, error) from error
            failed.append((context, batch))
            point = Point(context, batch, asked.decode, error=f"out of memory: {shortage(error)}")
        now.last = point
        done(point)
    return run.others.share


def likeliest(logits: Any, _phase: str) -> Any:
    """The token that comes next."""
    return logits.argmax(-1, keepdim=True)


def observed(
    passes: Passes, devices: Sequence[str], ids: Any, decode: int, chunk: int | None = None,
    token_of: Callable[[Any, str], Any] = likeliest, step_done: Callable[[], None] = lambda: None,
) -> tuple[list[CacheBytes], MemoryUse | None]:  # fmt: skip
    """One plain run: its cache after the prompt, and after so many tokens more if there are any, and what memory it took. The
    cache is still there then."""
    states, batch = ModuleStates(passes.model), ids.shape[0]
    with watch_all(tuple(devices)) as watcher:
        passes.begin(batch)
        token = token_of(passes.prefill(ids, chunk), "prefill")
        held = [walk(passes.cache, states.found(batch))]
        for _ in range(decode):
            token = token_of(passes.feed(token), "decode")
            step_done()
        if decode:
            held.append(walk(passes.cache, states.found(batch)))
        watcher.settle()
    return held, watcher.use


def _cannot_run(loaded: Loaded, error: Exception) -> KvctlError:
    return KvctlError(f"{loaded.spec.id}: {type(loaded.model).__name__} cannot be run on text alone: {first_line(error)}",
                      hint="KVCTL_DEBUG=1 shows where; kvctl size MODEL --engine transformers predicts its cache")  # fmt: skip


class _Run:
    """What all points have in common."""

    def __init__(self, loaded: Loaded, asked: Asked, dtype: DType, tokens: Callable[[int, int], Any],
                 rates: Rates | None, now: Now) -> None:  # fmt: skip
        if all(isinstance(state, NoState) for layer in loaded.spec.layers for state in layer.states):
            raise KvctlError(f"{loaded.spec.id} keeps no cache: {loaded.spec.model_type} is an encoder by its configuration",
                             hint="--set is_decoder=true, if it is a decoder")  # fmt: skip
        is_encoder_decoder = bool(getattr(loaded.model.config, "is_encoder_decoder", False))
        self.loaded, self.asked, self.dtype, self.rates, self.now = loaded, asked, dtype, rates, now
        self.tokens = tokens
        self.others = Others()
        self._held = CacheBytes((), 0, 0)
        self.predictor = Predictor(loaded.spec, dtype, None, loaded.ranks)
        held = 0
        if is_encoder_decoder:
            # Where nobody says, `size` may take as many as there are tokens: of the longest context, for all points.
            held = self.predictor.at(max(asked.contexts), 1).encoder_tokens
            held = held if asked.encoder_tokens is None else asked.encoder_tokens
            self.predictor = self.predictor.replace(encoder_tokens=held)
        self.passes = Passes(loaded.model, loaded.device, held, len(loaded.spec.layers), asked.seed)
        self.passes.line_up = loaded.line_up
        self.devices = loaded.devices or (loaded.device,)
        if loaded.devices:
            self.passes.synchronize = synchronizer(loaded.devices)

    def point(self, context: int, batch: int) -> Point:
        """One context and batch."""
        asked, now, passes = self.asked, self.now, self.passes
        ids = self.tokens(batch, context).to(self.loaded.device)
        what = f"{context:,} tokens × {batch}"
        now.stage(f"{what}: warming up, measuring memory")
        now.steps = asked.decode
        point = self._observed(ids, Point(context, batch, asked.decode))
        if not asked.repeat:
            return point
        if self.rates is not None:
            now.say(f"{what}: counting work")
            point = point.replace(work=self._counted(ids, point))
        runs = []
        for number in range(asked.repeat):
            now.say(f"{what}: run {number + 1} of {asked.repeat}")
            now.steps = asked.decode
            with self.others.counting():
                runs.append(passes.timed(ids, asked.decode, asked.prefill_chunk, self._step))
            passes.drop()
        steps = tuple(step for run in runs for step in run.steps)
        point = point.replace(
            ttft=Sample(tuple(run.ttft for run in runs)),
            tpot=Sample(steps, (asked.decode,) * len(runs)) if steps else None,
        )
        if self.rates is not None and point.work is not None:
            point = point.replace(limits=limits_of(point, self.rates, self.dtype))
        if self.loaded.thinned is not None:
            point = point.replace(scaled=self._scaled(ids, point, self.loaded.thinned))
        return point

    def _step(self) -> None:
        self.now.step += 1
        signals.check()

    def _observed(self, ids: Any, point: Point) -> Point:
        """Cache and memory of one plain run, which also warms everything up; its time does not count."""
        asked, batch = self.asked, ids.shape[0]
        if getattr(self.loaded.model, "hf_quantizer", None) is not None:
            # Kernels of packed weights lay these out anew at their first use, in tensors that look like state then.
            self.passes.begin(batch)
            self.passes.feed(ids[:, :1])
            self.passes.drop()
        held, use = observed(self.passes, self.devices, ids, asked.decode, asked.prefill_chunk, self._next, self._step)
        self.passes.drop()
        self._held = held[-1]
        phases = (("prefill", point.context), ("decode", point.context + asked.decode))
        rows = [self._row(cache, phase, tokens, batch) for cache, (phase, tokens) in zip(held, phases, strict=False)]
        return point.replace(cache=tuple(rows), memory=use)

    def _next(self, logits: Any, phase: str) -> Any:
        """The likeliest token; a model that computes no numbers is not one to be timed."""
        import torch

        if bool(torch.isnan(logits).any() | torch.isposinf(logits).any()):
            raise KvctlError(f"{self.loaded.spec.id}: the logits in {phase} are not numbers (NaN or infinity)",
                             hint="another --dtype (fp16 overflows in some models), or the weights are damaged")  # fmt: skip
        return logits.argmax(-1, keepdim=True)

    def _counted(self, ids: Any, point: Point) -> Work | None:
        """Work of a prefill and of a step, on a run of its own: counting sends operations another way."""
        # Weights that wait elsewhere are copied for every pass: their reads cannot be told from others.
        if not self.asked.decode or any(parameter.is_meta for parameter in self.loaded.model.parameters()):
            return None
        passes = self.passes
        passes.begin(ids.shape[0])
        with WorkCounter(self.loaded.model) as counter:
            token = passes.prefill(ids, self.asked.prefill_chunk).argmax(-1, keepdim=True)
        prefill = counter.counted()
        with WorkCounter(self.loaded.model) as counter:
            passes.feed(token)
        step = counter.counted()
        passes.drop()
        cache = sum(row.logical_bytes for row in point.cache) // len(point.cache)
        return Work(prefill.flops, step.flops, step.weight_bytes + cache)

    def _row(self, held: CacheBytes, phase: str, tokens: int, batch: int) -> CacheRow:
        predicted = self.predictor.bytes(tokens, batch)
        return CacheRow(phase, tokens, held.logical_bytes, held.storage_bytes, predicted, tensors=len(held.tensors))

    def _scaled(self, ids: Any, point: Point, thinned: Thinned) -> ScaledTimes:
        """What the whole model would take: each kind of layer as often as the model has it, and the rest once."""
        count = len(thinned.kept)
        prefill, steps = LayerClock(self.loaded.model, count, self.passes, ids).run(
            self.asked.decode, self.asked.prefill_chunk
        )
        whole = self.predictor.replace(spec=thinned.whole)
        by_layer = self._held.by_layer
        kept = [by_layer.get(index, 0) for index in range(count)]
        if sum(kept) != self._held.logical_bytes:
            if len({layer.states_in("transformers") for layer in thinned.whole.layers}) > 1:
                raise ConfigError(
                    f"{self.loaded.spec.id}: which layer holds what of its cache cannot be told",
                    hint="without --layers",
                )
            kept = [self._held.logical_bytes // count] * count  # rwkv: one tensor for all its layers, which are alike
        assert point.ttft is not None
        tpot = None if point.tpot is None else point.tpot.median - sum(steps) + thinned.scaled(steps)
        return ScaledTimes(
            point.ttft.median - sum(prefill) + thinned.scaled(prefill),
            tpot,
            thinned.scaled_bytes(kept),
            whole.bytes(point.context + self.asked.decode, point.batch),
        )


def texts(ids: Sequence[int] | None, vocabulary: int, seed: int) -> Callable[[int, int], Any]:
    """Token ids [batch, length]: of a text, or random ones where there is no tokenizer."""
    from kvctl.measure.passes import random_ids, repeated

    if ids:
        return lambda batch, length: repeated(ids, batch, length)
    return lambda batch, length: random_ids(vocabulary, batch, length, seed)

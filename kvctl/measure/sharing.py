"""Requests whose prompts begin alike, through a paged cache with and without an index of prefixes, beside the plain cache.

All of it on real tensors: blocks are taken, found, shared and copied as an engine does, one request at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.measure.cache import walk
from kvctl.measure.devices import synchronizer
from kvctl.measure.faults import first_line
from kvctl.measure.memory import is_out_of_memory, shortage
from kvctl.measure.passes import Passes
from kvctl.measure.shared import Alike, FirstToken, Forked, Held, PrefillWork, Sharing, SharingAsked
from kvctl.measure.statistics import Sample, ratio
from kvctl.measure.work import WorkCounter
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.spec import ModelSpec
from kvctl.techniques import PLAIN, Technique, parse
from kvctl.techniques.paging import Paging
from kvctl.techniques.states import Compressed, applied

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.loaded import Loaded
    from kvctl.measure.run import Now
    from kvctl.techniques.paging.cache import Pages


def share(
    loaded: Loaded, asked: SharingAsked, dtype: DType, tokens: Callable[[int, int], Any], now: Now
) -> Sharing:  # fmt: skip
    """Measure it; on Ctrl-C what is complete is there.

    Raises:
        ConfigError: not all layers of the model keep keys and values of all tokens, or its cache is of its own kind.
        UsageError: prompts longer than the model's positions, or more requests than it has words.
        KvctlError: the model cannot be run, or memory is out.

    """
    import torch

    run = _Run(loaded, asked, dtype, tokens, now)
    try:
        with torch.inference_mode():
            run.measure()
    except KeyboardInterrupt:
        run.found = run.found.replace(interrupted=True)
    except KvctlError:
        raise
    except Exception as error:
        if is_out_of_memory(error):
            raise KvctlError(f"out of memory: {shortage(error)}", hint="fewer --requests, or a shorter --ctx") from None
        raise KvctlError(f"{loaded.spec.id}: {type(loaded.model).__name__} cannot be run with a paged cache: {first_line(error)}",
                         hint="KVCTL_DEBUG=1 shows where") from error  # fmt: skip
    finally:
        run.passes.drop()
    return run.found


def paged_model(spec: ModelSpec, technique: Technique) -> ModelSpec:
    """The model with its cache in blocks.

    Raises:
        ConfigError: a layer holds something that blocks of tokens do not: prefixes of it cannot be shared so.

    """
    out = applied(spec, technique, TRANSFORMERS.name)
    others = {state.kind for layer in out.layers for state in layer.states if not isinstance(state, Compressed)}
    if others:
        kinds = ", ".join(sorted(kind.replace("_", " ") for kind in others))
        raise ConfigError(f"{spec.id} keeps {kinds} too: a prefix found in blocks of full attention is not all that it needs",
                          hint="--technique paged measures its full attention in blocks, without sharing")  # fmt: skip
    return out


class _Cache(Record):
    """A paged cache that goes on from request to request."""

    cache: Any
    pages: Pages


class _Run:
    """One measurement; `found` is what is complete."""

    def __init__(
        self, loaded: Loaded, asked: SharingAsked, dtype: DType, tokens: Callable[[int, int], Any], now: Now
    ) -> None:  # fmt: skip
        self.loaded, self.asked, self.dtype, self.now = loaded, asked, dtype, now
        self.technique = parse(f"paged:block={asked.block}")
        self.paging = Paging(asked.block)
        self.spec = paged_model(loaded.spec, self.technique)
        self.longest = loaded.spec.max_context or asked.context + asked.decode
        if asked.context + asked.decode > self.longest:
            raise UsageError(f"{asked.context:,} tokens and {asked.decode:,} more are beyond the {self.longest:,} positions of {loaded.spec.id}",
                             hint="a shorter --ctx, or fewer --decode")  # fmt: skip
        self.prompts = self._prompts(tokens)
        self.passes = Passes(loaded.model, loaded.device, layers=len(loaded.spec.layers))
        self.passes.synchronize = synchronizer(loaded.devices or (loaded.device,))
        self.passes.indexes = tuple(range(len(loaded.spec.layers)))
        self.found = Sharing(
            asked, expected_hits=_expected_hits([one[0].tolist() for one in self.prompts], asked.block)
        )

    def measure(self) -> None:
        self._hold()
        self.now.stage(f"{self.asked.branches} continuations of one prompt")
        self.found = self.found.replace(forked=self._fork())
        self.now.stage("counting the work of a prefill")
        self.found = self.found.replace(work=self._work())
        if self.asked.repeat:
            self.now.stage("time to the first token, with and without the prefix")
            self.found = self.found.replace(first_token=self._time())

    def _prompts(self, tokens: Callable[[int, int], Any]) -> list[Any]:
        """Ids [1, length] of each request: the same `common` ones, then its own; the first of these is nobody else's."""
        asked = self.asked
        vocabulary = int(self.loaded.model.config.get_text_config(decoder=True).vocab_size)
        if asked.requests > vocabulary:
            raise UsageError(
                f"--requests {asked.requests:,}: {self.loaded.spec.id} has {vocabulary:,} words, too few for as many prompts"
            )
        ids = tokens(asked.requests, asked.context).clone()
        ids[:, : asked.common] = ids[0, : asked.common]
        if asked.common < asked.context:
            for number in range(asked.requests):
                ids[number, asked.common] = (ids[0, asked.common] + number) % vocabulary
        return [ids[number : number + 1, :length].to(self.loaded.device) for number, length in enumerate(asked.lengths)]

    def _cache(self, count: int | None = None, *, index: bool) -> _Cache:
        """A paged cache without requests."""
        from kvctl.techniques.caches import equipped
        from kvctl.techniques.paging.cache import Pages

        self._plain()
        if self.passes.cache is None:
            raise ConfigError(
                f"{type(self.loaded.model).__name__} keeps a cache of its own kind: nothing of it can be paged"
            )
        pages = Pages(self.asked.block, count, index=index)
        made = equipped(self.passes.cache, self.loaded.model, self.technique, self.passes.indexes, pages)
        return _Cache(made, pages)

    def _plain(self) -> None:
        """Passes through an empty plain cache from here on."""
        self.passes.technique = PLAIN
        self.passes.begin(1)

    def _prefill(self, cache: _Cache, ids: Any) -> tuple[Any, int]:
        """Logits after a prompt whose known part is not computed, and the tokens of that."""
        words = ids[0].tolist()
        self.passes.cache = cache.cache
        hit = cache.pages.begin(words)
        logits = self.passes.feed(ids[:, hit:])
        cache.pages.remember(words)
        return logits, hit

    # -- memory, and whether anything is different ---------------------------------------------------

    def _hold(self) -> None:
        """All requests, one after the other; each stays until the last is done."""
        asked = self.asked
        caches = {"paged": self._cache(index=False), "prefix": self._cache(index=True)}
        compared = {policy: _Comparison(policy) for policy in caches}
        hits: list[int] = []
        for number, ids in enumerate(self.prompts):
            self.now.stage(f"request {number + 1} of {asked.requests}: plain, paged, paged with shared prefixes")
            self.now.steps = 3 * asked.decode
            self._plain()
            plain = self._decoded(self.passes.feed(ids), None)
            words = [row.argmax(-1, keepdim=True) for row in plain]
            for policy, cache in caches.items():
                logits, hit = self._prefill(cache, ids)
                compared[policy].add(plain, self._decoded(logits, words))
                if policy == "prefix":
                    hits.append(hit)
        held = [self._reserved("contiguous", self.longest), *self._pow2()]
        for policy, cache in caches.items():
            held.append(self._counted(policy, cache, sum(hits) if policy == "prefix" else 0))
        self.found = self.found.replace(
            held=tuple(held), hits=tuple(hits), alike=tuple(one.result for one in compared.values())
        )

    def _decoded(self, logits: Any, words: Sequence[Any] | None) -> list[Any]:
        """Logits [batch, vocabulary] of a prompt's last token, and of each token after it: the likeliest, or `words`."""
        out = [logits]
        for step in range(self.asked.decode):
            token = out[-1].argmax(-1, keepdim=True) if words is None else words[step]
            out.append(self.passes.feed(token))
            self.now.step += 1
        return out

    def _reserved(self, policy: str, *reserved: int) -> Held:
        """Every request in one piece of so many tokens, or each in its own number."""
        plan = SizePlan(TRANSFORMERS, dtype=self.dtype)
        each = reserved * self.asked.requests if len(reserved) == 1 else reserved
        held = {length: size(self.loaded.spec, length, plan).kv_bytes for length in set(each)}
        return Held(policy, sum(held[length] for length in each), None, sum(each), self._stored)

    def _pow2(self) -> list[Held]:
        lengths = [1 << (length + self.asked.decode - 1).bit_length() for length in self.asked.lengths]
        return [self._reserved("contiguous-pow2", *(min(length, self.longest) for length in lengths))]

    @property
    def _stored(self) -> int:
        """Tokens of all requests."""
        return sum(self.asked.lengths) + self.asked.requests * self.asked.decode

    def _counted(self, policy: str, cache: _Cache, found: int) -> Held:
        """A paged cache as it lies there, with the block table of each request in turn."""
        pages, block = cache.pages, self.asked.block
        pages.use(())
        tables = 0
        held = walk(cache.cache).logical_bytes
        for one in pages.table.sequences:
            pages.use([one], self.loaded.device)
            tables += walk(cache.cache).logical_bytes - held
        expected = sum(self.found.expected_hits) if policy == "prefix" else 0
        lengths = [length + self.asked.decode for length in self.asked.lengths]
        blocks = sum(self.paging.blocks(length) for length in lengths) - expected // block
        plan = SizePlan(TRANSFORMERS, dtype=self.dtype)
        # Of one block, in all layers: what the cache of so many tokens takes, without its table.
        of_one = size(self.spec, block, plan).kv_bytes - self.paging.table(block)
        predicted = blocks * of_one + sum(self.paging.table(length) for length in lengths)
        return Held(
            policy, held + tables, predicted, pages.blocks.held * block, self._stored - found, pages.blocks.held
        )

    # -- continuations -------------------------------------------------------------------------------

    def _fork(self) -> Forked:
        """Branches of one prompt whose last block is not full, if blocks have more than a token, in one batch."""
        import torch

        asked, block = self.asked, self.asked.block
        ids = self.prompts[0]
        if not ids.shape[1] % block and ids.shape[1] > 1:
            ids = ids[:, :-1]
        tokens = ids.shape[1]
        self._plain()
        first = self.passes.feed(ids)
        start = first[0].topk(asked.branches).indices[:, None]
        self.passes.cache.batch_repeat_interleave(asked.branches)
        plain = self._decoded(self.passes.feed(start), None)
        words = [row.argmax(-1, keepdim=True) for row in plain]
        cache = self._cache(index=False)
        logits, _ = self._prefill(cache, ids)
        comparison = _Comparison("fork")
        comparison.add([first], [logits])
        cache.cache.reorder_cache(torch.zeros(asked.branches, dtype=torch.long))
        comparison.add(plain, self._decoded(self.passes.feed(start), words))
        grown = self.paging.blocks(tokens + 1 + asked.decode)
        whole = tokens // block
        pages = cache.pages
        return Forked(
            tokens, asked.branches, asked.decode, pages.table.copied, (asked.branches - 1) * bool(tokens % block),
            pages.blocks.held, whole + asked.branches * (grown - whole), asked.branches * grown, comparison.result,
        )  # fmt: skip

    # -- work and time -------------------------------------------------------------------------------

    def _work(self) -> PrefillWork:
        """Of the second request."""
        counts = []
        for index in (False, True):
            cache = self._cache(index=index)
            if index:
                self._prefill(cache, self.prompts[0])
            with WorkCounter(self.loaded.model) as counter:
                self._prefill(cache, self.prompts[1])
            counts.append(counter.counted().flops)
        return PrefillWork(*counts)

    def _time(self) -> FirstToken:
        """Each request but the first without and with what that one left, the order changing, in a pool of the right size."""
        asked = self.asked
        most = sum(self.paging.blocks(length) for length in asked.lengths)
        cold, cached = list[float](), list[float]()
        for repeat in range(asked.repeat):
            caches = [self._cache(most, index=False), self._cache(most, index=True)]
            for cache in caches:
                self._prefill(cache, self.prompts[0])
            for number, ids in enumerate(self.prompts[1:], 1):
                self.now.say(
                    f"request {number + 1} of {asked.requests} with and without the prefix, run {repeat + 1} of {asked.repeat}"
                )
                order = (0, 1) if (repeat + number) % 2 else (1, 0)
                times = {which: self._clocked(caches[which], ids) for which in order}
                cold.append(times[0])
                cached.append(times[1])
        one, other = Sample(tuple(cold)), Sample(tuple(cached))
        return FirstToken(one, other, ratio(other, one, paired=True))

    def _clocked(self, cache: _Cache, ids: Any) -> float:
        """Seconds to the first token, looking for the prefix included."""
        wait = self.passes.synchronize
        wait()
        start = perf_counter()
        logits, _ = self._prefill(cache, ids)
        logits.argmax(-1)
        wait()
        return perf_counter() - start


class _Comparison:
    """Logits beside those of the plain cache."""

    def __init__(self, policy: str) -> None:
        self.policy = policy
        self.compared = self.same = 0
        self.difference = self.largest = 0.0

    def add(self, plain: Sequence[Any], ours: Sequence[Any]) -> None:
        """Rows [batch, vocabulary].

        Raises:
            KvctlError: some are no numbers.

        """
        for one, other in zip(plain, ours, strict=True):
            difference = float((one.float() - other.float()).abs().max())
            if not difference < float("inf"):
                raise KvctlError("the logits are not numbers (NaN or infinity)",
                                 hint="another --dtype (fp16 overflows in some models), or the weights are damaged")  # fmt: skip
            self.difference = max(self.difference, difference)
            self.largest = max(self.largest, float(one.abs().max()))
            self.compared += one.shape[0]
            self.same += int((one.argmax(-1) == other.argmax(-1)).sum())

    @property
    def result(self) -> Alike:
        return Alike(self.policy, self.compared, self.same, self.difference, self.largest)


def _expected_hits(prompts: Sequence[Sequence[int]], block: int) -> tuple[int, ...]:
    """Tokens in whole blocks that each prompt has in common with one before it, never its last one."""
    out = []
    for number, prompt in enumerate(prompts):
        longest = 0
        for other in prompts[:number]:
            alike = 0
            while alike < min(len(prompt) - 1, len(other)) and prompt[alike] == other[alike]:
                alike += 1
            longest = max(longest, alike)
        out.append(longest - longest % block)
    return tuple(out)

"""Techniques on a real model: bytes, quality and speed of each, beside the plain cache.

Quality is measured through the compressed cache: every window of text is a prompt and then tokens that are known, fed
in steps; each attends to what is stored. The same windows for all, so tokens are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import ConfigError, KvctlError, UsageError
from kvctl.measure.assessed import AssessAsked, Assessed, Assessment, Ends, ranked
from kvctl.measure.devices import synchronizer
from kvctl.measure.faults import first_line
from kvctl.measure.generation import Needles, Reading, continued, greedy
from kvctl.measure.memory import is_out_of_memory, shortage
from kvctl.measure.passes import Passes
from kvctl.measure.points import observed
from kvctl.measure.statistics import Sample, ratio
from kvctl.size import SizePlan, size
from kvctl.techniques import PLAIN
from kvctl.techniques.codecs import Fp8
from kvctl.techniques.states import Compressed, applied
from kvctl.units import plural

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.loaded import Loaded
    from kvctl.measure.quality import Scores
    from kvctl.measure.run import Now
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique

STEP = 32
"""Tokens that are fed at a time; evictions, which decide after every pass, get one. Steps of one and of 32 tokens give
formats the same divergence (0.071 and 0.073 nats in the first measurement), in a sixth of the time."""
_WARM = 256
"""Tokens of a run that warms up."""
_MOST_LOGITS = 2**27
"""Of the plain cache, held while techniques are compared with them: half a GiB in single precision."""


def assess(
    loaded: Loaded, techniques: Sequence[Technique], asked: AssessAsked, dtype: DType, tokens: Callable[[int, int], Any],
    text: Reading | None, now: Now, done: Callable[[Assessed], None],
) -> Assessment:  # fmt: skip
    """Measure each technique beside the plain cache; without a text its bytes and times alone.

    On Ctrl-C what is complete is there. `done` gets each technique as it is complete.

    Raises:
        UsageError: the text is too short for one window.
        ConfigError: the model's cache or attention is not one that a technique works with.

    """
    return _Run(loaded, techniques, asked, dtype, tokens, text, now, done).run()


class _Run:
    """What all techniques have in common."""

    def __init__(
        self, loaded: Loaded, techniques: Sequence[Technique], asked: AssessAsked, dtype: DType,
        tokens: Callable[[int, int], Any], text: Reading | None, now: Now, done: Callable[[Assessed], None],
    ) -> None:  # fmt: skip
        self.loaded, self.asked, self.dtype, self.tokens, self.now, self.done = loaded, asked, dtype, tokens, now, done
        self.techniques = [PLAIN, *(one for one in dict.fromkeys(techniques) if one != PLAIN)]
        self.left: list[str] = []
        self.specs: dict[str, ModelSpec] = {}
        for one in self.techniques:
            try:
                self.specs[one.name] = (
                    loaded.spec if one.plain or not one.predicted else applied(loaded.spec, one, TRANSFORMERS.name)
                )
            except (ConfigError, UsageError) as error:
                self._leave(one, error)
        self.techniques = [one for one in self.techniques if one.name in self.specs]
        self.text = text
        if text is not None and len(text.ids) < asked.window:
            raise UsageError(f"{text.name} has {plural(len(text.ids), 'token')}, and a window takes {asked.window:,}",
                             hint="a longer --text, or fewer --tokens")  # fmt: skip
        # Where nobody says, `size` may take as many positions of the encoder as there are tokens.
        self.plan = SizePlan(TRANSFORMERS, dtype=dtype, generated=asked.decode, encoder_tokens=asked.encoder_tokens)
        if bool(getattr(loaded.model.config, "is_encoder_decoder", False)) and asked.encoder_tokens is None:
            encoder = size(loaded.spec, asked.context + asked.decode, self.plan).encoder_tokens
            self.plan = self.plan.replace(encoder_tokens=encoder)
        self.passes = Passes(loaded.model, loaded.device, self.plan.encoder_tokens or 0, len(loaded.spec.layers))
        self.passes.synchronize = synchronizer(loaded.devices)
        self.scores: dict[str, Scores] = {}
        self.rows: dict[str, Assessed] = {}
        """As far as they are measured."""

    def run(self) -> Assessment:
        import torch

        interrupted = False
        try:
            with torch.inference_mode():
                for technique in list(self.techniques):
                    try:
                        self.rows[technique.name] = self._try(technique)
                    except ConfigError as error:
                        self._leave(technique, error)
                        self.techniques.remove(technique)
                self._timed()
                if self.text is not None:
                    self._scored()
                    self._generated(self.text)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._use(PLAIN)
            self.passes.drop()
        rows = ranked(list(self.rows.values()), self.scores)
        return Assessment(
            tuple(rows), self.asked, None if self.text is None else self.text.name, interrupted, tuple(self.left)
        )

    def _leave(self, technique: Technique, error: KvctlError) -> None:
        """Go on without one that does not work with this model, where nobody asked for it by name."""
        if not technique.of_all:
            raise error
        self.left.append(f"{technique.name} is left out: {error.message}")

    def _able(self) -> list[Technique]:
        """Those that did not run out of memory."""
        return [technique for technique in self.techniques if self.rows[technique.name].error is None]

    def _keep(self, technique: Technique, **found: Any) -> None:
        self.rows[technique.name] = self.rows[technique.name].replace(**found)

    def _use(self, technique: Technique) -> None:
        layers = self.specs[technique.name].layers
        indexes = tuple(
            index for index, layer in enumerate(layers) if any(isinstance(state, Compressed) for state in layer.states)
        )
        self.passes.use(technique, indexes, self.loaded.spec)

    def _ids(self) -> Any:
        return self.tokens(1, self.asked.context).to(self.loaded.device)

    # -- bytes ----------------------------------------------------------------------------------

    def _try(self, technique: Technique) -> Assessed:
        """Bytes, and working memory."""
        asked, passes = self.asked, self.passes
        total = asked.context + asked.decode
        row = Assessed(technique.name, technique.papers, total)
        self.now.say(f"{technique.name}: bytes")
        self._use(technique)
        try:
            # What is loaded at its first use is no memory of the cache.
            passes.begin(1)
            passes.feed(passes.prefill(self._ids()[:, :_WARM]).argmax(-1, keepdim=True))
            passes.drop()
            (*_, held), use = observed(passes, self.loaded.devices, self._ids(), asked.decode)
            row = row.replace(ends=_ends(passes.cache, technique))
        except KvctlError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise KvctlError(f"{technique.name}: {type(self.loaded.model).__name__} cannot be run with it: {first_line(error)}",
                                 hint="KVCTL_DEBUG=1 shows where") from error  # fmt: skip
            return row.replace(error=f"out of memory: {shortage(error)}")
        finally:
            passes.drop()
        predicted = size(self.specs[technique.name], total, self.plan).kv_bytes if technique.predicted else None
        working = None if use is None else max(use.peak_bytes - use.before_bytes - held.logical_bytes, 0)
        plain = held.logical_bytes if technique == PLAIN else self.rows[PLAIN.name].kv_bytes
        return row.replace(
            kv_bytes=held.logical_bytes, predicted_bytes=predicted, plain_bytes=plain, working_bytes=working
        )

    # -- speed ----------------------------------------------------------------------------------

    def _timed(self) -> None:
        """Run by run in turn, so that what disturbs one disturbs all."""
        asked, able = self.asked, self._able()
        self.now.stage(f"timing {plural(len(able), 'cache')} in turn")
        plain = PLAIN.name
        if self.rows[plain].error is not None:  # out of memory: there is nothing to hold the others against
            return
        first: dict[str, list[float]] = {one.name: [] for one in able}
        steps: dict[str, list[tuple[float, ...]]] = {one.name: [] for one in able}
        # The pass that the others are held against is not the one that finds the machine cold.
        self._use(PLAIN)
        self.passes.timed(self._ids(), min(asked.decode, 4))
        for number in range(asked.repeat):
            # Each goes first in turn: what the first of a round pays is not always the same one's.
            for technique in able[number % len(able) :] + able[: number % len(able)]:
                self.now.say(f"{technique.name}: run {number + 1} of {asked.repeat}")
                self._use(technique)
                times = self.passes.timed(self._ids(), asked.decode)
                first[technique.name].append(times.ttft)
                steps[technique.name].append(times.steps)
        for technique in able:
            if technique.plain or not first[plain]:
                continue
            ttft = ratio(Sample(tuple(first[technique.name])), Sample(tuple(first[plain])), paired=True)
            tpot = ratio(_sample(steps[technique.name]), _sample(steps[plain]), paired=True) if asked.decode else None
            self._keep(technique, ttft=ttft, tpot=tpot)

    # -- quality --------------------------------------------------------------------------------

    def _scored(self) -> None:
        """Every window through every cache, each token's distribution beside the plain cache's."""
        from kvctl.measure.tally import Tally

        asked = self.asked
        able = [one for one in self._able() if not one.plain]
        self.now.stage(f"reading text through {plural(len(able), 'cache')}")
        tallies = {one.name: Tally(one.name) for one in able}
        windows = self._windows(asked.windows)
        vocabulary = int(self.loaded.model.config.get_text_config(decoder=True).vocab_size)
        together = max(1, _MOST_LOGITS // (asked.scored * vocabulary))
        for start in range(0, len(windows), together):
            ids = windows[start : start + together]
            names = list(range(start, start + len(ids)))
            plain = self._through(PLAIN, ids, names)
            for technique in able:
                logits = self._through(technique, ids, names)
                tallies[technique.name].add(plain, logits, ids[:, asked.prompt + 1 :], names)
        for technique in able:
            self.scores[technique.name] = tallies[technique.name].scores
            self._keep(technique, quality=tallies[technique.name].quality)

    def _generated(self, text: Reading) -> None:
        """Continuations of the same windows, and keys hidden in others."""
        prompts = self._windows(self.asked.texts)[:, : self.asked.prompt]
        needles = Needles(text, self.asked)
        plain: list[list[int]] = []
        self.now.stage("continuing text and looking for keys")
        for technique in self._able():
            self._use(technique)
            if self.asked.greedy:
                said = continued(
                    self.passes, prompts, _step(technique), self.asked.greedy, self._telling(technique, "continuing")
                )
                plain = plain or said
                if not technique.plain:
                    self._keep(technique, greedy=greedy(plain, said))
            if needles.needles:
                self._use(technique)
                found = needles.found(self.passes, _step(technique), self._telling(technique, "looking for keys"))
                self._keep(technique, recall=found)
            self.done(self.rows[technique.name])

    def _telling(self, technique: Technique, what: str) -> Callable[[int], None]:
        return lambda number: self.now.say(f"{technique.name}: {what}, token {number + 1}")

    def _windows(self, most: int) -> Any:
        """[windows, tokens]: spread evenly over the text."""
        import torch

        assert self.text is not None
        ids, asked = self.text.ids, self.asked
        count = min(most, max(len(ids) // asked.window, 1))
        apart = (len(ids) - asked.window) // max(count - 1, 1)
        rows = [ids[index * apart : index * apart + asked.window] for index in range(count)]
        return torch.tensor(rows, dtype=torch.long, device=self.loaded.device)

    def _through(self, technique: Technique, ids: Any, names: Sequence[int]) -> Any:
        """Logits [windows, scored, vocabulary] of the tokens that count, through the cache."""
        import torch

        asked, passes = self.asked, self.passes
        self._use(technique)
        passes.begin(ids.shape[0])
        passes.prefill(ids[:, : asked.prompt])
        step = _step(technique)
        out = []
        for start in range(asked.prompt, asked.prompt + asked.scored, step):
            end = min(start + step, asked.prompt + asked.scored)
            self.now.say(
                f"{technique.name}: text {names[0] + 1} to {names[-1] + 1}, token {start - asked.prompt:,} of {asked.scored:,}"
            )
            out.append(passes.logits(ids[:, start:end]))
        passes.drop()
        return torch.cat(out, dim=1)


def _ends(cache: Any, technique: Technique) -> Ends | None:
    """What 8-bit floats without a scale could not hold; None for other formats."""
    found = []
    for half, rows in ((technique.store.keys, "key_rows"), (technique.store.values, "value_rows")):
        codec = half.codec
        if isinstance(codec, Fp8) and not codec.calibrated:
            from kvctl.techniques.codecs.float_kernels import at_ends

            layers = (getattr(layer, rows, None) for layer in getattr(cache, "self_attention_cache", cache).layers)
            packed = [held.parts[0] for held in layers if held is not None and held.parts]
            found += [(part.numel(), *at_ends(part, codec.form)) for part in packed]
    return Ends(*(sum(column) for column in zip(*found, strict=True))) if found else None


def _step(technique: Technique) -> int:
    return STEP if technique.keep is None else 1


def _sample(steps: Sequence[tuple[float, ...]]) -> Sample:
    return Sample(tuple(step for run in steps for step in run), tuple(len(run) for run in steps))

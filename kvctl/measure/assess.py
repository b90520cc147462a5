"""Techniques on a real model: bytes, quality and speed of each, beside the plain cache.

Quality is measured through the compressed cache: every window of text is a prompt and then tokens that are known, fed
in steps; each attends to what is stored. The same windows for all, so tokens are paired.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import KvctlError, UsageError
from kvctl.measure.cache import walk
from kvctl.measure.devices import synchronizer, watch_all
from kvctl.measure.faults import first_line
from kvctl.measure.memory import is_out_of_memory, shortage
from kvctl.measure.passes import Passes
from kvctl.measure.quality import Quality, Scores, pareto, separates
from kvctl.measure.statistics import Sample, ratio
from kvctl.record import Record
from kvctl.size import SizePlan, size
from kvctl.techniques import PLAIN
from kvctl.techniques.states import Compressed, applied

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.measure.loaded import Loaded
    from kvctl.measure.run import Now
    from kvctl.measure.statistics import Ratio
    from kvctl.techniques import Technique

STEP = 32
"""Tokens that are fed at a time; evictions, which decide after every pass, get one. Steps of one and of 32 tokens give
formats the same divergence (0.071 and 0.073 nats in the first measurement), in a sixth of the time."""
_MOST_LOGITS = 2**27
"""Of the plain cache, held while techniques are compared with them: half a GiB in single precision."""


class AssessAsked(Record):
    """What is to be measured of every technique."""

    context: int
    """Prompt tokens of the runs that are timed."""
    decode: int = 64
    repeat: int = 3
    windows: int = 6
    """Pieces of text."""
    prompt: int = 512
    """Tokens of a piece before those that count."""
    scored: int = 256
    """Tokens of a piece that count."""

    @property
    def window(self) -> int:
        """Tokens of a piece: the last one is only predicted."""
        return self.prompt + self.scored + 1


class Assessed(Record):
    """One technique."""

    name: str
    papers: tuple[str, ...]
    tokens: int
    """Tokens that the cache had seen when its bytes were counted."""
    kv_bytes: int | None = None
    predicted_bytes: int | None = None
    plain_bytes: int | None = None
    """Of the plain cache, as measured."""
    working_bytes: int | None = None
    """The most that the process took beside what it had before and the cache."""
    ttft: Ratio | None = None
    """Over the plain cache's, in the same run."""
    tpot: Ratio | None = None
    quality: Quality | None = None
    """None for the plain cache, with which the others are compared, and without text."""
    like: tuple[str, ...] = ()
    """Techniques that the text does not tell this one from."""
    best: bool = False
    """Whether no other is as good in fewer bytes, or better in as many."""
    error: str | None = None

    @property
    def agrees(self) -> bool | None:
        """Whether its bytes are as predicted; None where none were counted."""
        return None if self.kv_bytes is None else self.kv_bytes == self.predicted_bytes

    @property
    def words(self) -> str:
        """On one line: "int4: 1,762,560 bytes as predicted, perplexity +0.98%"."""
        words = self.name if self.kv_bytes is None else f"{self.name}: {self.kv_bytes:,} bytes"
        if self.agrees is not None:
            words += " as predicted" if self.agrees else ", NOT as predicted"
        if self.quality is not None:
            words += f", perplexity {self.quality.perplexity_change.value:+.2f}%"
        return words if self.error is None else f"{self.name}: {self.error}"

    @property
    def ratio(self) -> float | None:
        """The plain cache's bytes over its own."""
        return self.plain_bytes / self.kv_bytes if self.plain_bytes and self.kv_bytes else None

    def to_dict(self) -> dict[str, Any]:
        return {
            "name": self.name, "papers": list(self.papers), "tokens": self.tokens, "kv_bytes": self.kv_bytes,
            "predicted_bytes": self.predicted_bytes, "agrees": self.agrees, "plain_bytes": self.plain_bytes, "ratio": self.ratio,
            "working_bytes": self.working_bytes,
            "ttft_ratio": None if self.ttft is None else self.ttft.to_dict(),
            "tpot_ratio": None if self.tpot is None else self.tpot.to_dict(),
            "quality": None if self.quality is None else self.quality.to_dict(),
            "not_told_from": list(self.like), "pareto": self.best, "error": self.error,
        }  # fmt: skip


class Assessment(Record):
    """All techniques of a run, the plain cache first."""

    rows: tuple[Assessed, ...]
    settings: AssessAsked
    text: str | None
    """Which; None where quality was not measured."""
    interrupted: bool = False

    @property
    def agrees(self) -> bool | None:
        """Whether all bytes are as predicted."""
        found = [row.agrees for row in self.rows if row.agrees is not None]
        return all(found) if found else None

    @property
    def failed(self) -> bool:
        """Whether a technique could not be measured."""
        return any(row.error is not None for row in self.rows)

    def to_dict(self) -> dict[str, Any]:
        return {
            "agrees": self.agrees, "text": self.text, "interrupted": self.interrupted,
            "settings": {name: getattr(self.settings, name) for name in self.settings._fields},
            "rows": [row.to_dict() for row in self.rows],
        }  # fmt: skip


def assess(
    loaded: Loaded, techniques: Sequence[Technique], asked: AssessAsked, dtype: DType, tokens: Callable[[int, int], Any],
    text: tuple[str, Sequence[int]] | None, now: Now, done: Callable[[Assessed], None],
) -> Assessment:  # fmt: skip
    """Measure each technique beside the plain cache; `text` is a name and its token ids, for quality.

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
        tokens: Callable[[int, int], Any], text: tuple[str, Sequence[int]] | None, now: Now, done: Callable[[Assessed], None],
    ) -> None:  # fmt: skip
        self.loaded, self.asked, self.dtype, self.tokens, self.now, self.done = loaded, asked, dtype, tokens, now, done
        self.techniques = [PLAIN, *(one for one in dict.fromkeys(techniques) if one != PLAIN)]
        self.specs = {
            one.name: loaded.spec if one.plain else applied(loaded.spec, one, TRANSFORMERS.name)
            for one in self.techniques
        }
        self.text = text
        if text is not None and len(text[1]) < asked.window:
            raise UsageError(f"{text[0]} has {len(text[1]):,} tokens, and a window takes {asked.window:,}",
                             hint="a longer --text, or fewer --tokens")  # fmt: skip
        self.passes = Passes(loaded.model, loaded.device, layers=len(loaded.spec.layers))
        self.passes.synchronize = synchronizer(loaded.devices)
        self.scores: dict[str, Scores] = {}

    def run(self) -> Assessment:
        import torch

        rows: list[Assessed] = []
        interrupted = False
        try:
            with torch.inference_mode():
                rows = [self._try(one) for one in self.techniques]
                rows = self._timed(rows)
                if self.text is not None:
                    rows = self._scored(rows)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            self._use(PLAIN)
            self.passes.drop()
        return Assessment(
            tuple(_ranked(rows, self.scores)), self.asked, None if self.text is None else self.text[0], interrupted
        )

    def _use(self, technique: Technique) -> None:
        self.passes.drop()
        self.passes.technique = technique
        layers = self.specs[technique.name].layers
        self.passes.indexes = tuple(
            index for index, layer in enumerate(layers) if any(isinstance(state, Compressed) for state in layer.states)
        )

    def _ids(self) -> Any:
        return self.tokens(1, self.asked.context).to(self.loaded.device)

    # -- bytes ----------------------------------------------------------------------------------

    def _try(self, technique: Technique) -> Assessed:
        """Bytes, and working memory; also the run that warms up."""
        asked, passes = self.asked, self.passes
        total = asked.context + asked.decode
        row = Assessed(technique.name, technique.papers, total)
        self.now.say(f"{technique.name}: bytes")
        self._use(technique)
        try:
            with watch_all(self.loaded.devices) as watcher:
                passes.begin(1)
                token = passes.prefill(self._ids()).argmax(-1, keepdim=True)
                for _ in range(asked.decode):
                    token = passes.feed(token).argmax(-1, keepdim=True)
                held = walk(passes.cache)
                watcher.settle()
        except KvctlError:
            raise
        except Exception as error:
            if not is_out_of_memory(error):
                raise KvctlError(f"{technique.name}: {type(self.loaded.model).__name__} cannot be run with it: {first_line(error)}",
                                 hint="KVCTL_DEBUG=1 shows where") from error  # fmt: skip
            return row.replace(error=f"out of memory: {shortage(error)}")
        finally:
            passes.drop()
        plan = SizePlan(TRANSFORMERS, dtype=self.dtype, generated=asked.decode)
        predicted = size(self.specs[technique.name], total, plan).kv_bytes
        use = watcher.use
        working = None if use is None else max(use.peak_bytes - use.before_bytes - held.logical_bytes, 0)
        return row.replace(kv_bytes=held.logical_bytes, predicted_bytes=predicted, working_bytes=working)

    # -- speed ----------------------------------------------------------------------------------

    def _timed(self, rows: list[Assessed]) -> list[Assessed]:
        """Run by run in turn, so that what disturbs one disturbs all."""
        asked = self.asked
        first: dict[str, list[float]] = {row.name: [] for row in rows}
        steps: dict[str, list[tuple[float, ...]]] = {row.name: [] for row in rows}
        for number in range(asked.repeat):
            for technique, row in zip(self.techniques, rows, strict=True):
                if row.error is not None:
                    continue
                self.now.say(f"{technique.name}: run {number + 1} of {asked.repeat}")
                self._use(technique)
                times = self.passes.timed(self._ids(), asked.decode)
                first[row.name].append(times.ttft)
                steps[row.name].append(times.steps)
        plain = self.techniques[0].name
        out = []
        for row in rows:
            ttft = tpot = None
            if first[row.name] and row.name != plain:
                ttft = ratio(Sample(tuple(first[row.name])), Sample(tuple(first[plain])), paired=True)
                if asked.decode:
                    tpot = ratio(_sample(steps[row.name]), _sample(steps[plain]), paired=True)
            out.append(row.replace(ttft=ttft, tpot=tpot, plain_bytes=rows[0].kv_bytes))
        return out

    # -- quality --------------------------------------------------------------------------------

    def _scored(self, rows: list[Assessed]) -> list[Assessed]:
        """Every window through every cache, each token's distribution beside the plain cache's."""
        from kvctl.measure.tally import Tally

        tallies = {one.name: Tally(one.name) for one in self.techniques[1:]}
        asked = self.asked
        windows = self._windows()
        vocabulary = int(self.loaded.model.config.get_text_config(decoder=True).vocab_size)
        together = max(1, _MOST_LOGITS // (asked.scored * vocabulary))
        for start in range(0, len(windows), together):
            ids = windows[start : start + together]
            names = list(range(start, start + len(ids)))
            plain = self._through(PLAIN, ids, names)
            targets = ids[:, asked.prompt + 1 :]
            for technique, row in zip(self.techniques[1:], rows[1:], strict=True):
                if row.error is None:
                    logits = self._through(technique, ids, names)
                    tallies[technique.name].add(plain, logits, targets, names)
        out = rows[:1]
        for row in rows[1:]:
            if row.error is None:
                tally = tallies[row.name]
                self.scores[row.name] = tally.scores
                row = row.replace(quality=tally.quality)
            self.done(row)
            out.append(row)
        return out

    def _windows(self) -> Any:
        """[windows, tokens]: spread evenly over the text."""
        import torch

        assert self.text is not None
        ids, asked = self.text[1], self.asked
        count = min(asked.windows, max(len(ids) // asked.window, 1))
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
        step = STEP if technique.keep is None else 1
        out = []
        for start in range(asked.prompt, asked.prompt + asked.scored, step):
            end = min(start + step, asked.prompt + asked.scored)
            self.now.say(
                f"{technique.name}: text {names[0] + 1} to {names[-1] + 1}, token {start - asked.prompt:,} of {asked.scored:,}"
            )
            out.append(passes.logits(ids[:, start:end]))
        passes.drop()
        return torch.cat(out, dim=1)


def _sample(steps: Sequence[tuple[float, ...]]) -> Sample:
    return Sample(tuple(step for run in steps for step in run), tuple(len(run) for run in steps))


def _ranked(rows: Sequence[Assessed], scores: dict[str, Scores]) -> list[Assessed]:
    """The plain cache, then by bytes; with who is best, and who cannot be told from whom."""
    rows = [*rows[:1], *sorted(rows[1:], key=lambda row: -(row.kv_bytes or 0))]
    judged = [(row, row.kv_bytes, row.quality) for row in rows]
    points = [(held, found.kl.value) for _, held, found in judged if held is not None and found is not None]
    marks = iter(pareto(points)) if points else iter(())
    out = []
    for row, held, found in judged:
        if held is not None and found is not None:
            like = tuple(
                other for other in scores if other != row.name and not separates(scores[row.name], scores[other]).apart
            )
            row = row.replace(best=next(marks), like=like)
        out.append(row)
    return out

"""What a quantized checkpoint is worth, found out by a fresh process that reloads it from disk.

The original is run first and leaves its next-token distributions in a folder, in the dtype in which it gives them; each
checkpoint is then scored against these, on the same tokens, some rows at a time. No two models are in memory together.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from kvctl.errors import KvctlError, UsageError
from kvctl.measure.quality import Quality, Scores, quality
from kvctl.record import Record

PROMPT = "The three most important things to know about the sea are"
_WORKER = "kvctl.weights.judge_worker"


class Exam(Record):
    """What a model is asked."""

    text: Path | None = None
    """A text file; None: the English text that comes with kvctl."""
    windows: int = 8
    length: int = 512
    """Tokens of a window; all but the first are scored."""
    prompt: str = PROMPT
    new_tokens: int = 32
    positions: int | None = None
    """That the model has, where that is known."""
    device: str = "cpu"
    dtype: str | None = None
    """What it computes in; None: as its checkpoint says."""
    kernels: bool = True
    """Whether gptqmodel's kernels run AWQ where they are installed."""
    prompted: bool = False
    """Whether the first half of each window is a prompt, which is not scored."""
    caches: tuple[str, ...] = ()
    """Techniques with which the second half of each window is read through a cache, and without one before them. Empty: each
    window is read in one pass, and all of it is scored."""

    def check(self) -> None:
        """Refuses what cannot be.

        Raises:
            UsageError: it cannot.

        """
        if self.windows < 1 or self.length < 2:
            raise UsageError(f"{self.windows} windows of {self.length} tokens: at least one of two tokens is needed")
        if self.new_tokens < 0 or not self.prompt:
            raise UsageError("a prompt, and no fewer than 0 tokens after it, are needed")

    def within(self, positions: int) -> Exam:
        """The same number of tokens or a few more, in windows of at most so many."""
        if self.length <= positions:
            return self.replace(positions=positions)
        wanted, scored = (length - 1 - self.prompted * (length // 2) for length in (self.length, positions))
        return self.replace(positions=positions, length=positions, windows=-(-self.windows * wanted // max(scored, 1)))

    def to_dict(self) -> dict[str, Any]:
        out = {name: getattr(self, name) for name in self._fields}
        return out | {"text": None if self.text is None else str(self.text), "caches": list(self.caches)}


class Stage(Record):
    """How far the worker is."""

    stage: str
    """ "load", "score" or "generate"."""
    done: int
    of: int


class CacheJudged(Record):
    """What was found of one format of the cache with a checkpoint's weights."""

    name: str
    perplexity: float | None
    scores: Scores | None
    """Against the original with the plain cache; None for that itself."""
    kv_bytes: int | None
    """As the cache held them after `kv_tokens` tokens."""
    kv_tokens: int
    tokens_per_second: float | None
    """Decoding behind half a window."""
    error: str | None = None
    """Why it could not be measured."""

    @property
    def quality(self) -> Quality | None:
        """With standard errors, paired by token."""
        return None if self.scores is None else quality(self.scores)


class Judged(Record):
    """What was found."""

    path: Path
    by: str
    """What ran it: "transformers", "transformers + gptqmodel" or "kvctl's reference dequantizer"."""
    dtype: str
    tokens: int
    """That were scored."""
    perplexity: float
    scores: Scores | None
    """Of each token, against the original; None for the original itself."""
    generated: tuple[int, ...]
    """Tokens after the prompt, each the likeliest."""
    text: str
    """These, as text."""
    same: int | None
    """How many of them, from the first, are the original's; None for the original itself."""
    load_seconds: float
    score_tokens_per_second: float
    tokens_per_second: float | None
    """While generating; None of fewer than two tokens."""
    weights_bytes: int
    """Of parameters and buffers, as they lie in memory before anything ran."""
    peak_bytes: int | None
    """Of the process (on a GPU: of its tensors) at the most; None where the system does not tell."""
    notes: tuple[str, ...]
    caches: tuple[CacheJudged, ...] = ()
    """The plain one first; empty where none were asked about."""

    @property
    def quality(self) -> Quality | None:
        """With standard errors, paired by token; None for the original itself."""
        return None if self.scores is None else quality(self.scores)

    def to_dict(self) -> dict[str, Any]:
        found = self.quality
        return {
            "judged_with": self.by,
            "dtype": self.dtype,
            "tokens": self.tokens,
            "perplexity": self.perplexity,
            "quality": None if found is None else found.to_dict(),
            "generated_ids": list(self.generated),
            "generated_text": self.text,
            "generated_as_original": self.same,
            "load_seconds": self.load_seconds,
            "score_tokens_per_second": self.score_tokens_per_second,
            "tokens_per_second": self.tokens_per_second,
            "weights_bytes": self.weights_bytes,
            "peak_bytes": self.peak_bytes,
            "notes": list(self.notes),
        }


def refer(
    original: Path, exam: Exam, folder: Path, *, progress: Callable[[Stage], None] | None = None,
    patience_s: float = 3600.0,
) -> Judged:  # fmt: skip
    """Run the original (a folder or a GGUF file), and leave what checkpoints are scored against in `folder`, which is empty.

    Raises:
        KvctlError: as `judge`; the disk is full.

    """
    return _ask({"path": str(original), "leave": str(folder)}, exam, original, progress, patience_s)


def judge(
    checkpoint: Path, exam: Exam, reference: Path, *, name: str | None = None,
    progress: Callable[[Stage], None] | None = None, patience_s: float = 3600.0,
) -> Judged:  # fmt: skip
    """Reload a checkpoint in a fresh process, and score it against what the original left in folder `reference`; `name`
    is what errors call it.

    Raises:
        SourceError: weights are missing or broken.
        ConfigError: no tokenizer, or another one than the original's; a type that transformers does not know.
        UsageError: the text is too short.
        KvctlError: memory ends, or the process does, or is silent for `patience_s`.

    """
    return _ask({"path": str(checkpoint), "against": str(reference)}, exam, checkpoint, progress, patience_s, name)


def _ask(
    job: Mapping[str, Any],
    exam: Exam,
    path: Path,
    progress: Callable[[Stage], None] | None,
    patience_s: float,
    name: str | None = None,
) -> Judged:
    from kvctl.weights.children import ask

    exam.check()
    what = f"judging {name or path.name}"[:120]

    def told(line: Mapping[str, Any]) -> None:
        if progress is not None and isinstance(line.get("stage"), str):
            progress(Stage(line["stage"], int(line.get("done", 0)), int(line.get("of", 1))))

    answer = ask(_WORKER, {**job, "exam": exam.to_dict()}, what=what, told=told, patience_s=patience_s)
    try:
        facts = {name: answer[name] for name in Judged._fields if name not in _READ}
        return Judged(
            path=path, scores=_scores(answer["scores"]), generated=tuple(answer["generated"]), notes=tuple(answer["notes"]),
            caches=tuple(map(_cache, answer["caches"])), **facts,
        )  # fmt: skip
    except (KeyError, TypeError, ValueError, OverflowError):
        raise KvctlError(f"{what}: its process gave an answer that is none") from None


_READ = ("path", "scores", "generated", "notes", "caches")


def _cache(facts: Mapping[str, Any]) -> CacheJudged:
    if facts["error"] is not None:
        return CacheJudged(str(facts["name"]), None, None, None, 0, None, str(facts["error"]))
    own = {name: facts[name] for name in CacheJudged._fields if name != "scores"}
    return CacheJudged(**own | {"scores": _scores(facts["scores"])})


def _scores(facts: Mapping[str, Any] | None) -> Scores | None:
    if facts is None:
        return None
    out = Scores()
    out.window, out.agrees = array("q", facts["window"]), array("b", facts["agrees"])
    out.plain, out.technique, out.kl = (array("d", facts[name]) for name in ("plain", "technique", "kl"))
    return out


def scores_to_dict(scores: Scores) -> dict[str, Any]:
    """As a line of JSON has them."""
    return {name: list(getattr(scores, name)) for name in ("window", "plain", "technique", "kl", "agrees")}

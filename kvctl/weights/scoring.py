"""Next-token distributions held against the original's, which lie in a file and are read some rows at a time."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from kvctl.errors import ConfigError, KvctlError
from kvctl.measure.faults import NotFinite
from kvctl.record import Record
from kvctl.sources import jsonfile
from kvctl.units import format_bytes

if TYPE_CHECKING:
    import torch

    from kvctl.measure.quality import Scores

_ROWS = 64
"""Tokens whose distributions are compared at a time, in float32."""
_FACTS, _LOGITS = "reference.json", "logits.bin"


class Scored(Record):
    """What a text said of one model."""

    tokens: int
    perplexity: float
    dtype: str
    """In which it gives its logits."""
    vocabulary: int
    scores: Scores | None
    """Of each token, against the original."""


class Reference:
    """What the original left in a folder: its distributions, and the tokens that it generated.

    Raises:
        ConfigError: it saw other tokens than these.

    """

    def __init__(self, folder: Path, ids: Sequence[Sequence[int]], prompt: Sequence[int]) -> None:
        facts = jsonfile.read_file(folder / _FACTS, limit=10**9)
        if facts["ids"] != ids or facts["prompt"] != prompt:
            raise ConfigError("its tokenizer makes other tokens of the text than the original's",
                              hint="copy the original's tokenizer files there")  # fmt: skip
        self.generated: list[int] = facts["generated"]
        self.dtype, self.vocabulary, self.path = facts["dtype"], facts["vocabulary"], folder / _LOGITS

    @contextlib.contextmanager
    def rows(self) -> Iterator[Callable[[int], torch.Tensor]]:
        """Reads so many of the next rows."""
        import torch

        dtype = getattr(torch, self.dtype)
        with self.path.open("rb") as file:

            def read(count: int) -> torch.Tensor:
                size = count * self.vocabulary * dtype.itemsize
                data = bytearray(file.read(size))
                if len(data) != size:
                    raise KvctlError("what the original left is cut short", hint="judge the original again")
                return torch.frombuffer(data, dtype=dtype).view(count, self.vocabulary)

            yield read


def leave(
    folder: Path, ids: Sequence[Sequence[int]], prompt: Sequence[int], generated: Sequence[int], found: Scored
) -> None:
    """Write down what was asked and found beside the distributions, for `Reference`."""
    facts = {"ids": ids, "prompt": prompt, "generated": generated, "dtype": found.dtype, "vocabulary": found.vocabulary}
    (folder / _FACTS).write_text(json.dumps(facts), encoding="utf-8")


def score(
    logits: Iterable[torch.Tensor], ids: Sequence[Sequence[int]], *, reference: Reference | None = None,
    leave_in: Path | None = None,
) -> Scored:  # fmt: skip
    """Logits [tokens, vocabulary] of each window, the last of them before the window's last token, held against what the
    original left, or left themselves.

    Raises:
        ConfigError: another vocabulary than the original's.
        KvctlError: numbers that are not finite; the disk is full.

    """
    import torch

    from kvctl.measure.quality import Scores

    scores, losses, rows, dtype = Scores(), [], 0, ""
    with contextlib.ExitStack() as stack:
        read = None if reference is None else stack.enter_context(reference.rows())
        out = None if leave_in is None else stack.enter_context((leave_in / _LOGITS).open("wb"))
        for number, (window, given) in enumerate(zip(ids, logits, strict=True)):
            rows, dtype = given.shape[1], str(given.dtype).removeprefix("torch.")
            if reference is not None and rows != reference.vocabulary:
                raise ConfigError(f"it gives {rows:,} tokens' probabilities, and the original {reference.vocabulary:,}",
                                  hint="it is another model")  # fmt: skip
            if leave_in is not None and number == 0:
                _check_disk(leave_in, given, len(ids))
            first = len(window) - len(given)
            for at in range(0, len(given), _ROWS):
                part = given[at : at + _ROWS]
                true = torch.tensor(window[first + at : first + at + len(part)])
                if out is not None:
                    _write(out, part)
                losses += _compare(part, true, None if read is None else read(len(part)), number, scores)
    mean = sum(losses) / len(losses)
    perplexity = float(torch.tensor(mean, dtype=torch.float64).exp())
    return Scored(len(losses), perplexity, dtype, rows, None if reference is None else scores)


def _compare(
    part: torch.Tensor, true: torch.Tensor, plain: torch.Tensor | None, window: int, scores: Scores
) -> list[float]:
    """Losses in nats of these rows, which are added to the scores where there is something to compare with."""
    import torch

    own = part.float().log_softmax(-1)
    if not bool(torch.isfinite(own.amax())):
        raise NotFinite("the model makes numbers that are not finite", hint="another dtype may hold them: bfloat16")
    right = own.gather(1, true[:, None])[:, 0]
    if plain is not None:
        first = plain.float().log_softmax(-1)
        kl = (first.exp() * (first - own)).nan_to_num(nan=0.0).sum(-1)  # 0 × infinity: what neither may say
        agrees = first.argmax(-1) == own.argmax(-1)
        of_plain = first.gather(1, true[:, None])[:, 0]
        for row in zip(of_plain.tolist(), right.tolist(), kl.tolist(), agrees.tolist(), strict=True):
            scores.add(window, *row)
    return [-value for value in right.tolist()]


def _write(out: BinaryIO, part: torch.Tensor) -> None:
    import torch

    try:
        out.write(memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()))
        out.flush()
    except OSError as error:
        raise KvctlError(f"cannot write down what the original says: {(error.strerror or str(error)).lower()}",
                         hint="more room for temporary files or beside the target, or fewer --tokens") from None  # fmt: skip


def _check_disk(folder: Path, logits: torch.Tensor, windows: int) -> None:
    needed, free = logits.numel() * logits.element_size() * windows, shutil.disk_usage(folder).free
    if needed > free:
        raise KvctlError(f"the original's distributions take {format_bytes(needed)} on the disk, and {format_bytes(free)} are free",
                         hint="fewer or shorter windows")  # fmt: skip

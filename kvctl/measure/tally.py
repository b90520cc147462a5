"""From logits to scores: log-probabilities, divergences and agreement of every token, a few rows at a time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from kvctl.errors import KvctlError
from kvctl.measure.faults import NotFinite
from kvctl.measure.quality import Quality, Scores, quality

_ELEMENTS = 1 << 20
"""So many logits are looked at at once: 8 MiB in double precision, of which a few copies are needed."""
IGNORED = -100
"""A target that does not count (padding), as in torch's cross entropy."""


class Tally:
    """Scores of one technique, added up as its logits come."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.scores = Scores()

    def add(self, plain: Any, technique: Any, targets: Any, windows: int | Sequence[int]) -> None:
        """Logits [batch, tokens, vocabulary] of both, the true next tokens [batch, tokens], and each row's window.

        Tokens of a window come in their order. Everything is computed in double precision: a divergence of 1e-7 nats
        is a difference of numbers near one, and single precision would see its own rounding.

        Raises:
            KvctlError: logits that are NaN or infinite, by whose and where, or one that only the technique rules out.

        """
        if plain.shape != technique.shape or plain.shape[:2] != targets.shape or plain.dim() != 3:
            raise ValueError(
                f"logits {tuple(plain.shape)} and {tuple(technique.shape)}, targets {tuple(targets.shape)}"
            )
        rows = [windows] * plain.shape[0] if isinstance(windows, int) else list(windows)
        step = max(1, _ELEMENTS // max(plain.shape[2], 1))
        for window, one, other, true in zip(rows, plain, technique, targets, strict=True):
            for start in range(0, one.shape[0], step):
                part = slice(start, start + step)
                self._add(window, one[part], other[part], true[part])

    @property
    def quality(self) -> Quality:
        """What the scores so far say."""
        return quality(self.scores)

    def _add(self, window: int, plain: Any, technique: Any, targets: Any) -> None:
        counts = targets != IGNORED
        if not bool(counts.all()):
            plain, technique, targets = plain[counts], technique[counts], targets[counts]
        p, q = self._log_softmax(plain, "the plain cache", window), self._log_softmax(technique, self.name, window)
        agrees = (p.argmax(-1) == q.argmax(-1)).tolist()
        true = targets.to(p.device)[:, None]
        ones, others = p.gather(1, true)[:, 0].tolist(), q.gather(1, true)[:, 0].tolist()
        # What the plain cache rules out (-inf) has no part in the divergence: 0 · log 0 is 0.
        apart = (p - q).masked_fill_(p.isneginf(), 0)
        kl = p.exp_().mul_(apart).sum(-1).clamp_(min=0).tolist()
        for scored in zip(ones, others, kl, agrees, strict=True):
            if any(abs(value) == float("inf") for value in scored[:3]):
                token = self.scores.window.count(window)
                raise KvctlError(f"{self.name}: token {token} of window {window}: a probability is zero, and no difference finite",
                                 hint="one of the two rules out (-inf) what the other or the text has")  # fmt: skip
            self.scores.add(window, *scored)

    def _log_softmax(self, logits: Any, whose: str, window: int) -> Any:
        """In double precision, on the CPU where the device has none (MPS)."""
        import torch

        if logits.device.type == "mps":
            logits = logits.cpu()
        wide = logits.double()
        total = wide.logsumexp(-1, keepdim=True)
        finite = total.isfinite()[:, 0]
        if not bool(finite.all()):
            row = int((~finite).nonzero()[0])
            token = self.scores.window.count(window) + row
            seen = "NaN" if bool(torch.isnan(wide[row]).any()) else "infinite"
            raise NotFinite(f"{whose}: the logits of token {token} of window {window} are {seen}",
                             hint="another --dtype (fp32, bf16) has more range")  # fmt: skip
        return wide - total

"""A checkpoint whose text is read through real caches: what each format of them costs, and how fast it decodes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvctl.errors import KvctlError
from kvctl.measure.cache import walk
from kvctl.measure.faults import first_line
from kvctl.measure.memory import is_out_of_memory, shortage
from kvctl.measure.passes import Passes
from kvctl.techniques import PLAIN, parse
from kvctl.weights.kv_measure import read_through, use
from kvctl.weights.scoring import Reference, Scored, score

if TYPE_CHECKING:
    import torch


class Caches:
    """A loaded model, and windows of a text whose first half is a prompt."""

    def __init__(self, model: Any, folder: Path, ids: Sequence[Sequence[int]], exam: Mapping[str, Any]) -> None:
        from kvctl.model import build_spec
        from kvctl.sources.local import read_folder

        # Of the folder's own configuration: which layers keep what is asked nowhere else.
        self.spec = build_spec(read_folder(folder, str(folder)))
        self.passes = Passes(model, exam["device"], 0, len(self.spec.layers))
        self.ids, self.exam = ids, exam
        self.prompt = exam["length"] // 2

    def plain(self, tell: Callable[[int], None], reference: Reference | None, leave_in: Path | None) -> Scored:
        """With the plain cache."""
        use(self.passes, PLAIN, self.spec)
        return score(self._logits(tell, []), self.ids, reference=reference, leave_in=leave_in)

    def cell(
        self, name: str, found: Scored | None, tell: Callable[[int], None], reference: Reference
    ) -> dict[str, Any]:
        """One format, as a line of JSON has it; `found` where it was scored already. What fails says why."""
        from kvctl.weights.judge import scores_to_dict

        held: list[int] = []
        try:
            use(self.passes, parse(name), self.spec)
            if found is None:
                found = score(self._logits(tell, held), self.ids, reference=reference)
            else:
                read_through(self.passes, self._window(0), self.prompt, lambda cache: held.append(_bytes(cache)))
            rate = self._rate()
        except KvctlError as error:
            return {"name": name, "error": error.message}
        except Exception as error:
            what = (
                f"out of memory: {shortage(error)}"
                if is_out_of_memory(error)
                else f"it cannot be run: {first_line(error)}"
            )
            return {"name": name, "error": what}
        finally:
            self.passes.drop()
        return {
            "name": name, "error": None, "perplexity": found.perplexity,
            "scores": None if found.scores is None else scores_to_dict(found.scores),
            "kv_bytes": held[0], "kv_tokens": len(self.ids[0]) - 1, "tokens_per_second": rate,
        }  # fmt: skip

    def _window(self, number: int) -> torch.Tensor:
        import torch

        return torch.tensor([self.ids[number]], device=self.exam["device"])

    def _logits(self, tell: Callable[[int], None], held: list[int]) -> Iterator[torch.Tensor]:
        for number in range(len(self.ids)):
            tell(number)
            yield read_through(
                self.passes, self._window(number), self.prompt, lambda cache: held.append(_bytes(cache))
            )[0].cpu()

    def _rate(self) -> float | None:
        """Tokens a second behind the first prompt; None of fewer than two."""
        count = self.exam["new_tokens"]
        if self.exam["positions"] is not None:
            count = min(count, self.exam["positions"] - self.prompt)
        if count < 2:
            return None
        passes = self.passes
        passes.begin(1)
        token = passes.prefill(self._window(0)[:, : self.prompt]).argmax(-1, keepdim=True)
        token = passes.feed(token).argmax(-1, keepdim=True)  # the first after a prompt packs it
        passes.synchronize()
        start = perf_counter()
        for _ in range(count - 1):
            token = passes.feed(token).argmax(-1, keepdim=True)
        passes.synchronize()
        return float((count - 1) / (perf_counter() - start))


def _bytes(cache: Any) -> int:
    return walk(cache).logical_bytes

"""What scales of an FP8 cache cost: next-token distributions through a cache that rounds with them, beside the plain one's."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.measure.passes import Passes
from kvctl.measure.quality import Scores
from kvctl.measure.tally import Tally
from kvctl.techniques import PLAIN
from kvctl.techniques.states import Compressed, applied

if TYPE_CHECKING:
    from kvctl.measure.loaded import Loaded
    from kvctl.techniques import Technique

STEP = 32
"""Tokens that are fed at a time behind the prompt."""


def measure(
    loaded: Loaded, techniques: Mapping[str, Technique], windows: Any, prompt: int,
    told: Callable[[str, int], None] = lambda name, window: None,
) -> dict[str, Scores]:  # fmt: skip
    """Scores of each technique over windows of token ids [windows, tokens], of which the first `prompt` do not count.

    Every window is a prompt and then tokens that are known, which attend to what is stored.
    """
    import torch

    passes = Passes(loaded.model, loaded.device, 0, len(loaded.spec.layers))
    tallies = {name: Tally(name) for name in techniques}
    try:
        with torch.inference_mode():
            for number, window in enumerate(windows.to(loaded.device)):
                ids = window[None]
                told(PLAIN.name, number)
                plain = _through(loaded, passes, PLAIN, ids, prompt)
                for name, technique in techniques.items():
                    told(name, number)
                    tallies[name].add(
                        plain, _through(loaded, passes, technique, ids, prompt), ids[:, prompt + 1 :], number
                    )
    finally:
        passes.use(PLAIN, (), loaded.spec)
        passes.drop()
    return {name: tally.scores for name, tally in tallies.items()}


def _through(loaded: Loaded, passes: Passes, technique: Technique, ids: Any, prompt: int) -> Any:
    """Logits [1, counted tokens, vocabulary], but for the last token's, after which nothing is known."""
    import torch

    indexes: tuple[int, ...] = ()
    if not technique.plain:
        layers = applied(loaded.spec, technique, TRANSFORMERS.name).layers
        indexes = tuple(
            index for index, layer in enumerate(layers) if any(isinstance(state, Compressed) for state in layer.states)
        )
    passes.use(technique, indexes, loaded.spec)
    passes.begin(1)
    passes.prefill(ids[:, :prompt])
    last = ids.shape[1] - 1
    out = [passes.logits(ids[:, start : min(start + STEP, last)]) for start in range(prompt, last, STEP)]
    passes.drop()
    return torch.cat(out, dim=1)

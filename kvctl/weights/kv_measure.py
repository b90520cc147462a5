"""What formats of the cache cost: next-token distributions read through a real cache, beside the plain one's."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.engines import TRANSFORMERS
from kvctl.errors import UsageError
from kvctl.measure.passes import Passes
from kvctl.measure.quality import Scores
from kvctl.measure.tally import Tally
from kvctl.techniques import PLAIN
from kvctl.techniques.states import Compressed, applied

if TYPE_CHECKING:
    from kvctl.measure.loaded import Loaded
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique

STEP = 32
"""Tokens that are fed at a time behind the prompt."""


def check_packs(techniques: Mapping[str, Technique], length: int) -> None:
    """Refuses those that leave windows of so many tokens as they are.

    Raises:
        UsageError: one does.

    """
    for name, one in techniques.items():
        if not one.store.keys.packed(length) and not one.store.values.packed(length):
            raise UsageError(f"{name} packs nothing of {length:,} tokens", hint="more --tokens")


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
                use(passes, PLAIN, loaded.spec)
                plain = read_through(passes, ids, prompt)
                for name, technique in techniques.items():
                    told(name, number)
                    use(passes, technique, loaded.spec)
                    tallies[name].add(plain, read_through(passes, ids, prompt), ids[:, prompt + 1 :], number)
    finally:
        passes.use(PLAIN, (), loaded.spec)
        passes.drop()
    return {name: tally.scores for name, tally in tallies.items()}


def use(passes: Passes, technique: Technique, spec: ModelSpec) -> None:
    """From now on with this technique, on the layers that it works on."""
    indexes: Sequence[int] = ()
    if not technique.plain:
        layers = applied(spec, technique, TRANSFORMERS.name).layers
        indexes = [
            index for index, layer in enumerate(layers) if any(isinstance(state, Compressed) for state in layer.states)
        ]
    passes.use(technique, tuple(indexes), spec)


def read_through(passes: Passes, ids: Any, prompt: int, full: Callable[[Any], None] = lambda cache: None) -> Any:
    """Logits [1, counted tokens, vocabulary] of ids [1, tokens], without the last token's, after which nothing is known.

    `full` is shown the cache that holds all but that token.
    """
    import torch

    passes.begin(1)
    passes.prefill(ids[:, :prompt])
    last = ids.shape[1] - 1
    out = [passes.logits(ids[:, start : min(start + STEP, last)]) for start in range(prompt, last, STEP)]
    full(passes.cache)
    passes.drop()
    return torch.cat(out, dim=1)

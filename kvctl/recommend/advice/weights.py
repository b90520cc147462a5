"""Advice on smaller weights: 8 and 4 bits, integers and floats."""

from __future__ import annotations

from kvctl.recommend.advice.case import GAIN, NO, YES, Advice, Case, WeightChoice, judged, loss_words, size

FAMILIES = (
    ("FP8 weights", ("fp8-channel", "fp8-block", "fp8")),
    ("INT8 weights", ("w8a8", "int8", "q8_0")),
    ("AWQ weights", ("awq",)),
    ("INT4 weights", ("w4a16", "gptq", "nf4", "nf4-dq", "q4_k_m", "q4_k_s", "q4_0", "iq4_xs")),
    ("NVFP4 or MXFP4 weights", ("nvfp4", "mxfp4")),
)
"""Techniques, and formats that are one, the one that is tried first before others."""


def weights(case: Case) -> list[Advice]:
    """Each of them. no: it cannot be had or run here; or nothing is missed and a step is not bound by weights; or it would
    not be smaller by `GAIN`; or the likeliest loss is over the limit. depends: the loss is not known, or may be over the limit. yes: all
    else, and what is in use."""
    choices = {choice.name: choice for choice in case.numbers.weight_choices}
    return [_one(case, technique, names, choices) for technique, names in FAMILIES]


def _one(case: Case, technique: str, names: tuple[str, ...], choices: dict[str, WeightChoice]) -> Advice:
    now, in_use, source = case.numbers.rank_weights, case.deployment.weights.lower(), "kvctl/data/quality.json"
    if in_use in names:
        loss = case.quality.weights(in_use)
        return Advice(
            technique, YES, f"{in_use} is in use, {size(now)} {case.each}: {loss_words(loss)}", None, loss.source
        )
    choice = next((choices[name] for name in names if name in choices), None)
    if choice is None:
        what = f"of {', '.join(names)}, {case.engine} on {case.deployment.device.name} runs none that is to be had of {case.spec.id}"
        return Advice(technique, NO, what, None, source)
    if choice.rank_bytes > now * (1 - GAIN):
        little = f"less than {GAIN:.0%} smaller" if choice.rank_bytes < now else "no smaller"
        because = f"{choice.name} takes {size(choice.rank_bytes)} {case.each}, {little} than {in_use} with {size(now)}"
        return Advice(technique, NO, because, None, source)
    freed = now - choice.rank_bytes
    bound = case.numbers.decode_bound == "weights"
    if not case.missed and not bound:
        because = f"nothing is missed, and a step is bound by {case.numbers.decode_bound or 'nothing known'}: {choice.name} would free {size(freed)} {case.each}"
        return Advice(technique, NO, because, None, source)
    loss = case.quality.weights(choice.name)
    tokens = freed // max(1, case.numbers.token_bytes)
    why = "; ".join(case.missed) or "reading the weights binds a step"
    words = f"{why}; {choice.name} frees {size(freed)} {case.each}, {tokens:,} tokens of the cache"
    if bound:
        words += f", and reads {now / max(1, choice.rank_bytes):.3g} times less in each step"
    words += f"; {loss_words(loss)}"
    if case.max_loss is not None:
        words += f"; {case.max_loss:g}% are allowed"
    return Advice(technique, judged(loss, case.max_loss), words, choice.how, loss.source)

"""Advice on speculative decoding: how much faster, from acceptance, tokens drafted and the batch.

Of k tokens that are drafted, each accepted with chance a, a step yields (1 - a^(k+1)) / (1 - a) tokens (Leviathan et al.,
arXiv 2211.17192). A step that verifies k + 1 tokens for each request takes no longer than one, as long as reading the weights
takes longer than computing: up to `ridge` tokens in a step, and beyond that in proportion. Of a mixture more tokens read more
experts: how many times as fast it is lies between that of a model that is all experts and that of one whose experts are all read anyway. Drafting takes a share of a step for each
token: that of one layer and the head, for methods that add a layer, whose memory is then counted as one layer's too. What attention
reads is not multiplied: all of a request's tokens share it.
"""

from __future__ import annotations

from kvctl.families import text_fields
from kvctl.families.fields import Fields
from kvctl.recommend.advice.case import DEPENDS, NO, YES, Advice, Case, size
from kvctl.record import Record

WORTH = 1.1
"""Speed-up from which it is worth a draft's memory and a flag."""
_BYTES = {"fp8": 1.0, "fp8-block": 1.0, "fp8-channel": 1.0, "w8a8": 1.0, "int8": 1.0, "q8_0": 1.06, "awq": 0.53, "gptq": 0.53, "w4a16": 0.52,
          "nf4": 0.56, "nf4-dq": 0.52, "fp4": 0.56, "nvfp4": 0.56, "mxfp4": 0.53, "q4_k_m": 0.61, "fp32": 4.0}  # fmt: skip
"""Bytes a weight, scales included; 2 of all others."""


REACHED = 0.5
"""Share of the peak that computing reaches at least, assumed: the slower end of a range has this, the faster end all of it.
EAGLE-3's 1.38 times at 64 requests (SGLang, arXiv 2503.01840) lies between."""
_ALL_EXPERTS = ("n_routed_experts", "num_local_experts", "num_experts")
_EXPERTS_TAKEN = ("num_experts_per_tok", "num_experts_per_token", "moe_topk", "top_k_experts")


class Method(Record):
    """One way to draft."""

    name: str
    title: str
    tokens: int
    """Drafted for each step."""
    low: float | None
    """Acceptance of one token that was published, least and most; None: it depends on the text."""
    high: float | None
    draft: float | None
    """Time of drafting one token, as a share of a step of the model; None: that of one of its layers and of its head."""
    source: str
    flags: dict[str, str]


METHODS = (
    Method("mtp", "multi-token prediction", 1, 0.85, 0.90, None, "DeepSeek-V3, arXiv 2412.19437, section 5.4.3: 85 to 90% of the second token",
           {"vllm": """--speculative-config '{"method": "mtp", "num_speculative_tokens": 1}'""", "sglang": "--speculative-algorithm NEXTN",
            "tensorrt-llm": "speculative_config: decoding_type: MTP", "llama.cpp": "--spec-type draft-mtp"}),
    # 2.77 tokens a step with 7 drafted: (1 - a^8) / (1 - a) = 2.77 at a = 0.65; 3.62 at 0.75.
    Method("eagle3", "EAGLE-3", 3, 0.65, 0.75, None, "2.77 to 3.62 tokens a step of 7 drafted, Llama 3.1 8B and 3.3 70B: https://huggingface.co/nebius/EAGLE3-Llama-3.3-70B-Instruct",
           {"vllm": """--speculative-config '{"method": "eagle3", "model": "DRAFT", "num_speculative_tokens": 3}'""",
            "sglang": "--speculative-algorithm EAGLE3 --speculative-draft-model-path DRAFT", "tensorrt-llm": "speculative_config: decoding_type: Eagle3",
            "llama.cpp": "--spec-type draft-eagle3 --spec-draft-model DRAFT"}),
    Method("draft_model", "draft model a tenth as large", 3, None, None, 0.1, "arXiv 2211.17192; vLLM blog 2024-10-17: 1.5 times at one request a second, 1.4 times slower at high load",
           {"vllm": """--speculative-config '{"method": "draft_model", "model": "DRAFT", "num_speculative_tokens": 3}'""",
            "sglang": "--speculative-algorithm STANDALONE --speculative-draft-model-path DRAFT",
            "llama.cpp": "--spec-type draft-simple --spec-draft-model DRAFT", "tensorrt-llm": "speculative_config: decoding_type: DraftTarget"}),
    Method("ngram", "n-gram lookup", 3, None, None, 0.0, "vLLM blog 2024-10-17: 2.8 times for summaries at one request a second, 1.8 times slower at high load",
           {"vllm": """--speculative-config '{"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}'""",
            "sglang": "--speculative-algorithm NGRAM", "llama.cpp": "--spec-type ngram-simple", "tensorrt-llm": "speculative_config: decoding_type: NGram"}),
)  # fmt: skip


def yields(acceptance: float, tokens: int) -> float:
    """Tokens that a step yields on average."""
    if acceptance >= 1:
        return tokens + 1.0
    return float((1 - acceptance ** (tokens + 1)) / (1 - acceptance))


def ridge(case: Case) -> float | None:
    """Tokens in a step at which computing takes as long as reading the weights; None where the GPU's rates are not known."""
    facts = case.deployment.device.facts
    if facts is None or facts.bandwidth_gbs is None:
        return None
    weights = case.deployment.weights.lower()
    eight = (weights in ("fp8", "fp8-block", "fp8-channel") and facts.fp8_tflops) or (
        weights == "w8a8" and facts.int8_tops
    )
    four = weights in ("nvfp4", "mxfp4") and facts.fp4_tflops
    peak = four or eight or facts.fp16_tflops
    # 2 operations a weight and token, against its bytes.
    return peak * 1e12 * _BYTES.get(weights, 2.0) / (2 * facts.bandwidth_gbs * 1e9) if peak else None


class Step(Record):
    """What a step of the model takes, in times of reading all weights; `ridge` is that of the peak."""

    ridge: float
    experts: tuple[int, int] | None = None
    """Of a mixture: those that a token goes through, and all."""
    whole: bool = False
    """Whether all of it is read whatever the tokens."""

    def time(self, tokens: int) -> float:
        """Of so many tokens."""
        if self.experts is None:
            return max(1.0, tokens / self.ridge)
        taken, of = self.experts
        read = 1.0 if self.whole else 1.0 - (1.0 - taken / of) ** tokens
        return max(read, tokens / self.ridge * taken / of)


def speed_up(acceptance: float, tokens: int, draft: float, batch: int, step: Step) -> float:
    """How many times as many tokens a second."""
    plain = step.time(batch)
    return yields(acceptance, tokens) * plain / (step.time(batch * (tokens + 1)) + tokens * draft * plain)


def break_even(tokens: int, draft: float, batch: int, step: Step) -> float | None:
    """The least acceptance with which it is `WORTH` times as fast; None where none is enough."""
    if speed_up(1.0, tokens, draft, batch, step) < WORTH:
        return None
    low, high = 0.0, 1.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if speed_up(middle, tokens, draft, batch, step) >= WORTH else (middle, high)
    return high


def _layer_share(case: Case) -> float:
    """One layer and the head, of all that a step reads."""
    spec = case.spec
    parameters = spec.weights.parameters if spec.weights is not None else None
    head = (spec.vocab_size or 0) * (spec.hidden_size or 0)
    return 1 / max(1, len(spec.layers)) + (head / parameters if parameters else 0.0)


def speculative(case: Case) -> list[Advice]:
    """Each method: no where the engine has none of it, the model has no such layers (MTP), or the best published or measured
    acceptance makes nothing faster; yes where the least of it gains `WORTH` or more; depends between the two, and where
    nothing says how much of the text is guessed right: then the acceptance that it takes is said."""
    at, batch = ridge(case), case.work.concurrency
    return [_one(case, method, None if at is None else Step(at, _experts(case)), batch) for method in METHODS]


def _experts(case: Case) -> tuple[int, int] | None:
    fields = text_fields(Fields(case.spec.config))
    of = next((n for name in _ALL_EXPERTS if type(n := fields.get(name)) is int and n > 1), None)
    taken = next((n for name in _EXPERTS_TAKEN if type(n := fields.get(name)) is int and n > 0), None)
    return (taken, of) if of is not None and taken is not None and taken <= of else None


def _one(case: Case, method: Method, step: Step | None, batch: int) -> Advice:
    technique, how = f"speculative decoding: {method.title}", method.flags.get(case.engine)
    if how is None:
        return Advice(technique, NO, f"{case.engine} has none of it", None, method.source)
    if method.name == "mtp" and not case.spec.prediction_modules:
        return Advice(technique, NO, f"{case.spec.id} has no layers for it", None, method.source)
    if step is None:
        gpu = case.deployment.device.name
        return Advice(technique, DEPENDS, f"what {gpu} computes and reads in a second is not known", how, method.source)
    tokens, draft = method.tokens, _layer_share(case) if method.draft is None else method.draft
    slower = [one.replace(ridge=REACHED * step.ridge) for one in (step, step.replace(whole=True))]
    room = f"{batch * (tokens + 1):,} tokens in a step of {batch:,} requests"
    room += f", and up to {step.ridge:,.0f} come at no cost" if step.experts is None else (
        f", each through {step.experts[0]} of {step.experts[1]} experts")  # fmt: skip
    given = case.numbers.acceptance.get(method.name)
    low, high = (given, given) if given is not None else (method.low, method.high)
    if low is None or high is None:
        needed = break_even(tokens, draft, batch, step)
        if needed is None:
            return Advice(
                technique,
                NO,
                f"{room}: it would be less than {WORTH:g} times as fast even if every guess were right",
                None,
                method.source,
            )
        because = f"{room}: it is {WORTH:g} times as fast where {needed:.0%} of the guesses are right"
        return Advice(technique, DEPENDS, because, how, method.source)
    taken, fits = _memory(case, method)
    least = min(speed_up(low, tokens, draft, batch, one) for one in slower)
    most = max(speed_up(high, tokens, draft, batch, one) for one in (step, step.replace(whole=True)))
    rate = f"{low:.0%}" if low == high else f"{low:.0%} to {high:.0%}"
    words = f"{room}: with {rate} of the guesses right it is {least:.2f} to {most:.2f} times as fast"
    verdict = YES if least >= WORTH and fits else NO if most < WORTH else DEPENDS
    return Advice(
        technique, verdict, words if verdict == NO else words + taken, how if verdict != NO else None, method.source
    )


def _memory(case: Case, method: Method) -> tuple[str, bool]:
    """What a layer that drafts takes of a GPU, in words, and whether that is free: estimated as one of the model's own."""
    if method.draft is not None:
        return "", True
    numbers, layers, deployment = case.numbers, max(1, len(case.spec.layers)), case.deployment
    stages = max(deployment.gpus, 1) if deployment.engine.slots else deployment.serving.pipeline_parallel or 1
    weights = numbers.rank_weights * stages // layers
    words = f"; its layer takes about {size(weights)} {case.each} (as one of {layers:,} does) and {1 / layers:.1%} of the cache"
    if numbers.free is None or weights <= numbers.free:
        return words, True
    return f"{words}, and {size(max(numbers.free, 0))} are free: the cache has to be smaller by it", False

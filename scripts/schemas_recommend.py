"""JSON Schemas of what `kvctl recommend` prints and keeps."""

from __future__ import annotations

from schema_parts import STRINGS, VERSION, document, flag, listed, maybe, number, obj, of, text, whole
from schemas_serve import VERIFIED

RANGE = obj(
    "A figure and what it lies between, nine times of ten.",
    {
        "low": of("number", "The least."),
        "mid": of("number", "The likeliest."),
        "high": of(["number", "null"], "The most; null: no bound is known."),
    },
)
LOSS = obj(
    "What the formats lose, percent.",
    {
        "percent": maybe(RANGE) | {"description": "null: nobody published it, and it was not measured."},
        "metric": text("accuracy or perplexity; empty where nothing is lost."),
        "source": text("Who says so, with an address."),
        "measured": flag("Whether it was measured on this model."),
        "sure": text("high, medium or low; empty where there is no figure."),
        "basis": text("Which figures."),
    },
)
COST = obj(
    "What it costs.",
    {
        "gpus": whole("Of all replicas."),
        "per_hour": maybe(number("By --price; null without one.")),
        "per_million_output_tokens": maybe(RANGE),
    },
)
SIDE = obj(
    "What --what-if compares, and serve-test --plan verifies.",
    {
        "name": text("Engine, GPUs and formats in words."),
        "settings": of("object", "Engine, model, formats, parallelism and limits that are set."),
        "command": listed("The engine's command line, one argument each.", STRINGS),
        "memory": of(
            "object", "Bytes of the fullest GPU by what takes them.", additionalProperties={"type": "integer"}
        ),
        "host_weights": whole(
            "Bytes of each server's weights that stay in the host's memory; none of them is in `memory`."
        ),
        "capacity": maybe(whole("Tokens that the pools of all replicas hold; null where the engine has none.")),
        "held": maybe(whole("Requests of the longest length that are in service at once.")),
        "speed": of(
            "object",
            "ttft and tpot in seconds, output_rate in tokens a second, request_rate in requests a second; empty where it is unknown.",
            additionalProperties=RANGE,
        ),
        "loss": maybe(LOSS),
        "cost": maybe(COST),
    },
)
ANSWER = obj(
    "One way to serve.",
    {
        "kind": text("best, ready to run, cheaper, faster, higher quality, more throughput or another engine."),
        "why": listed("Why it was chosen.", STRINGS),
        "binds": text("What runs out first as the load grows."),
        "change": text("What to change then."),
        "meets_surely": flag("Whether it meets the request even at the far end of all ranges."),
        "requests_at_once": whole("Of the longest length."),
        "usual_requests_at_once": whole("Of the usual length."),
        "prefill_bound": of(["string", "null"], "What binds a prompt; null where its speed is unknown."),
        "decode_bound": of(["string", "null"], "What binds a step."),
        "validated": of(
            ["string", "null"], "Published figures that such predictions were compared with, or unvalidated."
        ),
        "assumption": text("What the figures hang on most, or why there are none."),
        "notes": listed("What to know of it.", STRINGS),
        "side": SIDE,
    },
)
ASKED = obj(
    "The request, with what was left out filled in.",
    {
        "model": text("Its name."),
        "gpu": text("What there is."),
        "gpus": whole("In each node; 0 for a host alone."),
        "nodes": whole("How many."),
        "context": whole("Tokens of the longest request."),
        "prompt_tokens": whole("Of a usual prompt."),
        "output_tokens": whole("Of a usual answer."),
        "concurrency": maybe(whole("Requests at once; null where a rate is asked for.")),
        "rate": maybe(number("Requests a second.")),
        "ttft_seconds": maybe(number("To the first token at most.")),
        "tpot_seconds": maybe(number("Between tokens at most.")),
        "slo_percent": number(
            "How many requests of a hundred are to keep these, where a test or an alarm counts them."
        ),
        "goal": text("What to have most of.", "cost", "latency", "throughput", "context", "quality"),
        "max_quality_loss_percent": number("That formats may lose."),
        "told_weights": maybe(text("The format that was named; null where it was searched for.")),
        "told_kv_dtype": maybe(text("The same of the cache.")),
        "told_tensor": maybe(whole("Tensor-parallel ranks.")),
        "told_pipeline": maybe(whole("Pipeline stages.")),
        "told_replicas": maybe(whole("Servers side by side.")),
        "engines": listed("That were considered.", STRINGS),
    },
)
ADVICE = obj(
    "A technique's place.",
    {
        "technique": text("Its name."),
        "verdict": text("Whether to use it.", "yes", "no", "depends"),
        "because": text("This case's numbers."),
        "how": of(["string", "null"], "The flag to set."),
        "source": text("Where the rule comes from."),
    },
)
RECOMMEND = document(
    "kvctl.recommend/1",
    "What kvctl recommend --json prints: a plan",
    {
        "kvctl_version": VERSION,
        "asked": ASKED,
        "answers": listed("The best first; none where nothing meets the request.", ANSWER),
        "left": listed(
            "What fits and was not chosen.",
            obj("A reason.", {"why": text("What it misses."), "count": whole("How many."), "nearest": text("The best of them."),
                              "misses": listed("What that misses.", STRINGS)}),
        ),
        "rejected": listed(
            "What does not start.",
            obj("A reason.", {"kind": text("engine, format, refused, unknown, weights or cache."), "engine": text("Its name."),
                              "weights": text("Their format."), "kv_dtype": text("The cache's."), "gpus": whole("Of one server."),
                              "why": text("With the arithmetic."), "count": whole("How many it stands for.")}),
        ),
        "tried": whole("Configurations."),
        "fitting": whole("That start and hold a request."),
        "nearest": listed(
            "Where nothing meets the request: the nearest requests that something does.",
            obj("A change.", {"direction": text("rate, gpus, gpu, host, context, requests, formats, engine or model."), "change": text("What to change."),
                              "with": text("What then meets it.")}),
        ),
        "impossible": listed("Objectives that nothing meets even with one request alone.", STRINGS),
        "best_missing": maybe(obj("What comes nearest to the request on this hardware.", {"with": text("In words."), "misses": listed("What it misses.", STRINGS)})),
        "advice": listed("Every technique's place in the case of the best answer.", ADVICE),
        "notes": listed("What was assumed.", STRINGS),
        "verified": VERIFIED,
    },
    optional=("verified",),
)  # fmt: skip
ROW = obj(
    "The best answer of one model on one kind of hardware.",
    {
        "model": text("Its name."),
        "gpu": text("What there is."),
        "met": flag("Whether anything meets the request."),
        "answer": of(["string", "null"], "In words."),
        "gpus_used": maybe(whole("Of them.")),
        "requests_at_once": maybe(whole("Of the longest length.")),
        "ttft_seconds": maybe(number("The likeliest.")),
        "tpot_seconds": maybe(number("The likeliest.")),
        "output_tokens_per_second": maybe(number("The likeliest.")),
        "output_tokens_per_second_low": maybe(number("The least, nine times of ten.")),
        "output_tokens_per_second_high": maybe(number("The most.")),
        "validated": of(
            ["string", "null"], "How many published figures such predictions were compared with, or unvalidated."
        ),
        "made_first": of(["string", "null"], "How its weights are made; null where they are there."),
        "quality_loss_percent": of(["number", "null"], "The likeliest."),
        "per_hour": maybe(number("By --price.")),
        "nearest": of(["string", "null"], "What would meet it."),
    },
)
MATRIX = document(
    "kvctl.recommend-matrix/1", "What kvctl recommend --json prints of several models or GPUs",
    {"kvctl_version": VERSION, "rows": listed("In the order asked for.", ROW)},
)  # fmt: skip
_CELL = of(
    ["string", "number", "integer", "boolean", "object", "array", "null"],
    "A value, a range, or null where it is not known.",
)
WHAT_IF = document(
    "kvctl.recommend-compare/1",
    "What kvctl recommend --what-if --json prints",
    {
        "kvctl_version": VERSION,
        "left": text("The one plan."),
        "right": text("The other."),
        "rows": listed(
            "What differs.",
            obj("One thing.", {"part": text("settings, flags, memory, capacity, speed, quality or cost."), "name": text("Of it."), "left": _CELL,
                               "right": _CELL, "ratio": of(["number", "null"], "Right over left."),
                               "apart": of(["boolean", "null"], "Whether the ranges leave each other alone."),
                               "better": text("left or right; empty where they are not told apart.")}),
        ),
        "not_told_apart": listed("Figures whose ranges overlap.", STRINGS),
        "not_known": listed("What one of them does not know.", STRINGS),
    },
)  # fmt: skip

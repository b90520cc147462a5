"""JSON Schema of what `kvctl serve-test` prints."""

from __future__ import annotations

from schema_parts import STRINGS, VERSION, document, flag, listed, maybe, number, obj, of, text, whole

_PERCENTILE = obj(
    "What so many of a hundred do not exceed, in seconds.",
    {
        "value": number("Nearest rank, to a thousandth of itself."),
        "low": maybe(number("With 95% confidence no less, if requests are independent; null of too few.")),
        "high": maybe(number("And no more.")),
    },
)
_TIMES = maybe(
    obj(
        "Seconds; null where there are none.",
        {
            "count": whole("How many."),
            "mean": number("Their mean."),
            "standard_deviation": number("Their spread."),
            "min": number("The least."),
            "max": number("The most."),
            **{f"p{of_}": _PERCENTILE for of_ in (50, 90, 95, 99)},
            "histogram": text(
                "All of them: the nanoseconds at which each bucket begins, and after a star how many it holds, if more than one. "
                "A bucket is 1/512 of its value wide at most; below 1,024 ns each value has its own."
            ),
            "sums": text("Of all values in nanoseconds, and of their squares: exact."),
        },
    )
)
FIGURES = obj(
    "Figures of requests.",
    {
        "requests": obj(
            "How they ended.",
            {
                "ended": whole("In whatever way."),
                "good": whole("With a whole answer of at least one token."),
                "failed": of("object", "How many failed, by kind."),
                "messages": of("object", "The first three messages of each kind."),
                "short": whole(
                    "Good ones with fewer tokens than asked, where the engine can be told to write as many."
                ),
                "reconnects": whole("Sent again because a connection that lay idle had been closed."),
                "asked_to_wait": _TIMES
                | {"description": "By Retry-After of those that were turned away; null where none said."},
            },
        ),
        "start": obj(
            "Of a load: requests that were due before all others.",
            {
                "requests": whole("How many."),
                "skew": number("Seconds from the first to the last sending of these."),
            },
        ),
        "tokens": obj(
            "Of good ones.",
            {
                "input": whole("As the server counts them."),
                "output": whole("As the server counts them, or events."),
                "cached": maybe(whole("Of the input, in the server's cache; null where it does not say.")),
                "output_from": of("object", "Of how many answers the output is from usage, or from events."),
                "per_event": maybe(number("Output tokens for each event.")),
            },
        ),
        "seconds": number(
            "From the first sending to the last event; by a clock, until the next request would have been due."
        ),
        "per_second": of("object", "Requests, input, output and total tokens, and requests that keep the objective."),
        "times": of("object", "By the names of definitions.", additionalProperties=_TIMES),
        "sums": of("object", "Counts that the figures are made of."),
        "events": whole("With output."),
        "events_bundled": whole("That came in one read with others before them, and share a stamp."),
        "without_kernel_stamps": whole("Good ones of which not all stamps are the kernel's."),
    },
)
LOAD = obj(
    "One load.",
    {
        "name": text("In words, another for each load: 16 at once."),
        "step": obj(
            "What was sent.",
            {
                "at_once": maybe(whole("Requests kept under way; null where they were sent by a clock.")),
                "rate": maybe(number("A second.")),
                "last_rate": maybe(number("A second, at the end, where the rate changes.")),
                "burstiness": maybe(number("Of the gaps; null: even.")),
                "words": text("The same in words."),
                "beside": text("In what its requests differ from those of the run's other loads, in words."),
                "work": of(
                    "object", "The kind of requests: made, of a trace, or prompts of a file; lengths in tokens."
                ),
            },
        ),
        "began_seconds": maybe(
            number("When its first measured request was due, on the clock of the run; null: there was none.")
        ),
        "sent": whole("Requests, those of the warm-up among them."),
        "whole_seconds": number("From the first measured request to the end of sending."),
        "output_tokens_per_second": maybe(
            number("In the whole seconds of that, whosever they are; null of less than two.")
        ),
        "all": FIGURES,
        "steady": FIGURES
        | {"description": "Of requests that were sent and answered in that time; without times where it is too short."},
        "steady_refused": of(["string", "null"], "Why it has no times."),
        "verdict": obj(
            "What bound it.",
            {
                "kind": text(
                    "In a word.",
                    "kv-saturated",
                    "batch-limited",
                    "compute-limited",
                    "client-limited",
                    "failed",
                    "unknown",
                    "not limited",
                ),
                "evidence": listed("How that shows.", STRINGS),
            },
        ),
        "metrics": obj(
            "The server's own, in that time; null is not available.",
            {
                "looks": whole("At its page."),
                "kv_use_max": maybe(number("Share of the KV cache in use.")),
                "waiting_max": maybe(number("Requests that wait.")),
                "running_max": maybe(number("Requests that run.")),
                "preemptions": maybe(number("Requests that lost their cache.")),
                "resets": whole("Times that counters fell: the server was restarted."),
                "counters": of("object", "How far counters went over the whole load, warm-up and all."),
                "series": listed(
                    "Looks: seconds on the clock of the run, gauges, and preemptions since the load's first look; of many looks the "
                    "highest of neighbours.",
                    {"type": "object"},
                ),
                "info": of("object", "Labels of lines that say how the engine is set up."),
                "all_looks": maybe(whole("Before, in and after that time; null where there is no page.")),
                "failed_looks": maybe(whole("Looks that gave nothing; null where there is no page.")),
                "seconds_looking": maybe(number("That all looks took.")),
            },
        ),
        "retried": whole("Times that a request was sent again which the server had turned away."),
        "lengths_changed": whole(
            "Requests of another length than drawn: a template is longer, or the context shorter."
        ),
        "designed_hit_rate": maybe(
            number("Share of input tokens that were sent or written before; null where none were meant to be.")
        ),
        "slices": listed(
            "What came by time, beside the server's metrics: of a second each, or of two or more in long loads.",
            obj(
                "One in which something came.",
                {
                    "seconds": number("When it began, on the clock of the run."),
                    "width": number("Seconds that it lasted."),
                    "events": whole("With output, of whatever request."),
                    "gaps": whole("Events with another of their request before them."),
                    "between_events": maybe(number("Seconds between two of one request, on average.")),
                    "preemptions": maybe(number("In it; null is not available.")),
                    **{
                        name: maybe(number("At its most; null is not available."))
                        for name in ("kv_use", "running", "waiting", "kv_tokens")
                    },
                },
            ),
        ),
        "preemption_cost": maybe(
            obj(
                "Seconds between events of a request; null where there were not both kinds of slices.",
                {
                    "with": number("In slices with preemptions."),
                    "without": number("In the others."),
                },
            )
        ),
        "ttft_beside_server": maybe(
            obj(
                "Means of first-token times, the warm-up's too; null where the server has none of the same requests.",
                {
                    "server_mean": number("By its own histogram, in seconds."),
                    "client_mean": number("By the client."),
                    "requests": whole("Of how many."),
                },
            )
        ),
        "remarks": listed("What has to be known beside the figures.", STRINGS),
        "ttft_without_prefix": maybe(
            number("Median first-token time of the load of --control, without shared beginnings, in seconds.")
        ),
        "hit_rate": maybe(number("Cached over all input tokens, by usage; null where it does not say.")),
        "hit_rate_of_counters": maybe(number("The same by the engine's counters, over the whole load.")),
        "client_cpu": number("Share of a core that the client took."),
        "given_up": of(["string", "null"], "Why it was given up."),
        "interrupted": flag("Whether it was broken off."),
    },
)
_SIDE = obj(
    "The cache.",
    {
        "tokens": maybe(whole("That it holds, of however many requests.")),
        "bytes": maybe(whole("That it takes, on each rank.")),
        "bytes_within": whole("Half of the last digit that they are printed with; 0: exact, or not available."),
        "blocks": maybe(whole("Of a pool.")),
        "concurrency": maybe(number("Requests of the longest length that the server takes.")),
        "requests": maybe(whole("Requests of this run's length that are served at once.")),
    },
)
_RANGE = obj(
    "From, likeliest and to.",
    {"low": number("From."), "mid": number("Likeliest."), "high": number("To.")},
)
PROMISED = obj(
    "What one answer of a plan says of one server.",
    {
        "name": text("The answer in words."),
        "source": text("The file and the number of the answer; empty of a plan that is being made."),
        "engine": text("Of the plan."),
        "prompt": whole("Tokens of a usual prompt."),
        "answer": whole("Of its answer."),
        "context": whole("Of the longest request."),
        "concurrency": maybe(whole("Usual requests at once; null where a rate is promised.")),
        "rate": maybe(number("Requests a second; null where a number at once is promised.")),
        "held": whole("Requests of the longest length that it holds at once."),
        "tokens": maybe(whole("That its cache holds; null where that follows from its settings alone.")),
        "memory": maybe(
            whole(
                "Bytes of a GPU or the host that weights, cache and what is known beside them take; null is not said."
            )
        ),
        "limit": maybe(whole("Bytes of the host's memory that it may take; null of GPUs, or where it is not said.")),
        "whole": flag("Whether that is all that it takes."),
        "ttft": maybe(_RANGE | {"description": "Seconds to the first token; null is not predicted."}),
        "tpot": maybe(_RANGE | {"description": "Seconds between tokens; null is not predicted."}),
        "output_rate": maybe(_RANGE | {"description": "Output tokens a second; null is not predicted."}),
        "request_rate": maybe(_RANGE | {"description": "Requests a second; null is not predicted."}),
    },
)
PROMISE_ROWS = listed(
    "What is promised, and what it was.",
    obj(
        "One thing.",
        {
            "name": text("What."),
            "unit": text(
                "Of both.",
                "requests",
                "tokens",
                "blocks",
                "bytes",
                "seconds",
                "tokens a second",
                "requests a second",
                "share",
            ),
            "promised": maybe(
                _RANGE | {"description": "Of a single figure all three are that; null: nothing is promised."}
            ),
            "measured": maybe(number("What it was; null is not available.")),
            "verdict": text("In words."),
            "holds": of(["boolean", "null"], "Whether the promise holds; null: neither way."),
        },
    ),
)
VERIFIED = obj(
    "With --verify of kvctl recommend: what came of an answer that was started on this machine.",
    {
        "answer": whole("Its number."),
        "command": text("What was started."),
        "refused": of(
            ["string", "null"], "Why the engine did not start, where its cache is the reason; null where it did."
        ),
        "holds": flag("Whether no promise broke, and all was tried."),
        "broken": listed("Promises that did, in words.", STRINGS),
        "promised": PROMISED,
        "rows": PROMISE_ROWS,
        "notes": listed("What to know.", STRINGS),
        "test": of(
            ["object", "null"], "All of the test (schema kvctl.serve-test/1); null where the engine did not start."
        ),
    },
)
"""Beside the answers of a plan; not there without --verify."""
COMPARE = document(
    "kvctl.serve-compare/1",
    "What kvctl serve-test --compare --json has as comparison",
    {
        "earlier": text("The file of the run before."),
        "loads": listed(
            "Loads that both runs have.",
            obj(
                "One load.",
                {
                    "name": text("In words."),
                    "good_requests": obj("Of each run.", {"before": whole("Then."), "now": whole("Now.")}),
                    "rows": listed(
                        "Its figures.",
                        obj(
                            "One figure.",
                            {
                                "what": text("A time and a percentile (ttft_p99), or output_tokens."),
                                "unit": text("Of both values.", "s", "tokens/s"),
                                "before": maybe(number("Then; null where it was not measured.")),
                                "now": maybe(number("Now.")),
                                "ratio": maybe(number("Now over before.")),
                                "low": maybe(number("With 95% confidence no less; null of too few requests.")),
                                "high": maybe(number("And no more.")),
                                "verdict": text(
                                    "In words.",
                                    "better",
                                    "worse",
                                    "same within noise",
                                    "too few requests",
                                    "too short",
                                    "not measured",
                                ),
                            },
                        ),
                    ),
                    "checks": listed(
                        "Of --fail-on.",
                        obj(
                            "One of them.",
                            {
                                "gate": text("As it was asked for."),
                                "broken": of(
                                    ["boolean", "null"],
                                    "Whether it is worse than that for sure; null: nothing is sure.",
                                ),
                            },
                        ),
                    ),
                },
            ),
        ),
        "differences": listed(
            "What else differs.",
            obj("One of them.", {"what": text("What."), "before": {}, "now": {}}),
        ),
        "unmatched": listed("Loads that only one run has.", STRINGS),
        "broken": listed("Checks that are broken, in words.", STRINGS),
        "untold": listed("Checks of which nothing is sure, in words.", STRINGS),
        "note": text("What the intervals are of."),
    },
)
SERVE_TEST = document(
    "kvctl.serve-test/1",
    "What kvctl serve-test --json prints",
    {
        "kvctl_version": VERSION,
        "dry_run": flag("Whether nothing was sent."),
        "interrupted": flag("Whether it broke off."),
        "url": text("The server."),
        "endpoint": text("The path."),
        "server": of("object", "What it says of itself, and how prompts were made; empty of a dry run."),
        "environment": of("object", "Where the client ran."),
        "settings": of("object", "What was asked for."),
        "calibration": of(
            ["object", "null"], "Of the client on this machine (schema kvctl.calibration/1); null where there is none."
        ),
        "definitions": of("object", "What each time means."),
        "loads": listed("One after the other.", LOAD),
        "limit": maybe(
            obj(
                "With --find-limit: between what it lies.",
                {
                    "borne": maybe(whole("The most requests at once that nothing broke at; null: not even one.")),
                    "broken": maybe(whole("The fewest that something broke at; null: nothing broke.")),
                    "why": text("What broke, or why no more were tried."),
                    "predicted": maybe(
                        whole("Requests of this length that kvctl size expects at once; null: no answer.")
                    ),
                },
            )
        ),
        "capacity": maybe(
            obj(
                "What the server's KV cache holds; null of a dry run.",
                {
                    "length": whole("Tokens of a request of this run, its answer included."),
                    "context": maybe(whole("Tokens of the longest request that the server takes.")),
                    "declared": _SIDE | {"description": "As the server declares it; null is not available."},
                    "declared_by": listed("Where.", STRINGS),
                    "predicted": _SIDE | {"description": "As kvctl size predicts it; null is not available."},
                    "predicted_for": of(["string", "null"], "Model, engine and version of the rules."),
                    "settings": listed("Where the prediction's settings come from.", STRINGS),
                    "difference_percent": obj(
                        "By how much what is declared is more than what is predicted; null where one is missing.",
                        {
                            name: maybe(number("In percent."))
                            for name in ("tokens", "bytes", "blocks", "concurrency", "requests")
                        },
                    ),
                    "notes": listed("What to know of them.", STRINGS),
                },
            )
        ),
        "plan": maybe(
            obj(
                "With --plan: what it promises beside what came of it; null without, or of a dry run.",
                {
                    "promised": PROMISED,
                    "rows": PROMISE_ROWS,
                    "holds": flag("Whether no promise broke, and no load was interrupted."),
                    "broken": listed("Those that did, in words.", STRINGS),
                    "notes": listed("What to know.", STRINGS),
                },
            )
        ),
        "started": maybe(
            obj(
                "The server that --launch started; null of one that ran.",
                {
                    "engine": text("Which."),
                    "command": text("The command line."),
                    "program": text("Where the program is."),
                    "log": text("The file that its log is in."),
                    "seconds": number("From its start until it was ready."),
                    "resident_bytes": maybe(
                        whole(
                            "Memory of this machine that it had at most, what its processes share counted once; null is not known."
                        )
                    ),
                    "ended": of(["string", "null"], "Why it was gone before it was to be."),
                },
            )
        ),
        "missed": listed(
            "Objectives and promises of a plan that loads miss, and finds in the server's cache other than designed.",
            STRINGS,
        ),
        "failed": listed("Loads that came to nothing.", STRINGS),
        "notes": listed("What to know.", STRINGS),
        "comparison": of("object", "With --compare: this run beside an earlier one (schema kvctl.serve-compare/1)."),
    },
    optional=("comparison",),
)
CALIBRATION = document(
    "kvctl.calibration/1",
    "What kvctl serve-test --calibrate --json prints, and keeps",
    {
        "errors": listed(
            "The client's errors, by how many requests were under way.",
            obj(
                "In seconds: the median, and what 99 of 100 do not exceed.",
                {
                    "at_once": whole("Requests."),
                    "requests": whole("In all."),
                    "ttft_p50": number("Of times to first tokens."),
                    "ttft_p99": number("Of them."),
                    "itl_p50": number("Of gaps between events, whichever way."),
                    "itl_p99": number("Of them."),
                    "tokens_per_second": number("That came."),
                    "nominal": number("That the cadence gives."),
                    "cpu": number("Share of a core that the client took."),
                    "bundled": number("Share of events that came in one read with others before them."),
                },
            ),
        ),
        "ceiling_tokens_per_second": number("That the client takes in where they come as fast as they can."),
        "kernel_stamps": flag("Whether stamps are the kernel's."),
        "machine": text("Of which it is."),
        "at": text("When, in UTC."),
    },
)

"""The JSON Schema of what `kvctl profile --json` prints and --save keeps. Times are seconds, sizes bytes."""

from __future__ import annotations

from typing import Any

from schema_parts import (
    LOG,
    MODEL,
    STRINGS,
    VERSION,
    WEIGHTS,
    document,
    flag,
    listed,
    loose,
    maybe,
    number,
    obj,
    of,
    text,
    whole,
)
from schemas_machine import MACHINE
from schemas_sharing import sharing
from schemas_techniques import TECHNIQUES

# -- times ---------------------------------------------------------------------------------


def seconds(description: str) -> dict[str, Any]:
    """A time that was measured: never zero."""
    return of("number", description, exclusiveMinimum=0)


def sample(description: str) -> dict[str, Any]:
    """Times of one thing, or null where it was not timed."""
    return maybe(
        obj(
            description,
            {
                "median_s": seconds("The middle value, in seconds."),
                "p95_s": seconds("What 95 of 100 values do not exceed, in seconds."),
                "mean_s": seconds("The arithmetic mean, in seconds."),
                "iqr_s": number("Interquartile range: the middle half lies within so many seconds."),
                "spread": maybe(number("Interquartile range over the median.")),
                "interval_s": maybe(
                    listed(
                        "The typical value with 95% confidence, from and to, in seconds; null where there are too few values.",
                        seconds("A bound."),
                        minItems=2,
                        maxItems=2,
                    )
                ),
                "interval_by": maybe(
                    text("What the interval goes by: repeats, or steps as if they were independent.", "repeats", "steps")
                ),
                "noise": maybe(number("Half of the interval over the median: two runs agree within that.")),
                "repeats": listed("How many values belong to each repeat, in order.", of("integer", "Values.", minimum=1)),
                "values_s": listed("Every value as it was measured, in seconds; none is left out.", seconds("A time."), minItems=1),
            },
        )
    )  # fmt: skip


# -- a point -------------------------------------------------------------------------------

CACHE_ROW = obj(
    "The cache of one rank after one phase.",
    {
        "phase": text("After which phase.", "prefill", "decode"),
        "tokens": whole("Positions of a sequence that the cache has seen."),
        "logical_bytes": whole("Bytes that its tensors show; memory that several show counts once."),
        "storage_bytes": whole("Bytes of the allocations behind them: a window is a view of more until the next step."),
        "predicted_bytes": whole("Bytes that kvctl size predicts for the same engine."),
        "rank": whole("The rank, from 0."),
        "tensors": whole("Tensors that were found."),
        "ratio": maybe(number("Logical bytes over predicted ones; null where something was held and nothing predicted.")),
        "agrees": flag("Whether the prediction is right to the byte."),
    },
)  # fmt: skip

MEMORY = maybe(
    obj(
        "What the process took on the device while the point ran: on a CPU its resident set.",
        {
            "observer": text("What read the peak: the kernel's high-water mark, a sampling thread, or torch's CUDA allocator.",
                             "kernel", "samples", "cuda"),
            "before_bytes": whole("Bytes before the point: weights, libraries, context."),
            "steady_bytes": whole("Bytes after decoding, with the cache held and what is free given back."),
            "peak_bytes": whole("Most bytes at any moment."),
            "reserved_bytes": maybe(whole("Most bytes that the CUDA allocator kept from the driver; null on others.")),
            "process_bytes": maybe(whole("Most bytes of this process by NVML; null where it is not told.")),
            "sampled_peak_bytes": maybe(whole("Most bytes that the sampling thread saw.")),
            "mapped_bytes": maybe(whole("Bytes of the steady ones that are mapped files and memory shared with others.")),
            "anonymous_peak_bytes": maybe(whole("Most bytes of the process's own, without mapped files.")),
            "samples": whole("Samples that the thread took."),
            "sampling_share": maybe(number("Processor time of the sampling thread over the time that was watched.")),
        },
    )
)  # fmt: skip

WORK = maybe(
    obj(
        "What passes have to do, counted on the operations of a real one.",
        {
            "prefill_flops": whole("Floating-point operations of the prefill."),
            "decode_flops": whole("Floating-point operations of one step of the whole batch."),
            "decode_bytes": whole("Bytes that one step has to read: the weights that it uses, once, and the cache."),
        },
    )
)

LIMITS = maybe(
    obj(
        "How near the point comes to what the hardware can do.",
        {
            "compute_share": maybe(number("Operations a second in prefill over the measured rate of matrix products.")),
            "bandwidth_share": maybe(number("Bytes a second in decode over the measured memory bandwidth.")),
            "flops_per_second": number("Operations a second in prefill."),
            "bytes_per_second": number("Bytes a second in decode."),
            "binds": text("What a decode step waits for; overhead: neither limit is near.", "memory", "compute", "overhead", "unknown"),
        },
    )
)  # fmt: skip

SCALED = maybe(
    obj(
        "The whole model, scaled up from the layers that ran, with --layers; times are estimates.",
        {
            "ttft_s": of("number", "Estimated time to the first token, in seconds."),
            "tpot_s": of(["number", "null"], "Estimated time of a step, in seconds."),
            "kv_bytes": whole(
                "Bytes of the whole model's cache: measured layers, each kind as often as the model has it."
            ),
            "predicted_bytes": whole("Bytes that kvctl size predicts for the whole model."),
            "agrees": flag("Whether that prediction is right to the byte."),
        },
    )
)

POINT = obj(
    "One context and batch.",
    {
        "context": of("integer", "Prompt tokens of a sequence.", minimum=1),
        "batch": of("integer", "Sequences at a time.", minimum=1),
        "decode": whole("Tokens that were generated after the first."),
        "ttft": sample("Time to the first token: the prefill of the whole batch. Null where it was not timed."),
        "tpot": sample("Time per output token: one decode step of the whole batch. Null where it was not timed."),
        "prefill_tokens_per_second": maybe(number("Prompt tokens a second, over the batch.")),
        "decode_tokens_per_second": maybe(number("Generated tokens a second, over the batch.")),
        "cache": listed("The cache as it was walked, after each phase and on each rank; empty with other engines.", CACHE_ROW),
        "agrees": of(["boolean", "null"], "Whether every prediction is right; null where no cache was measured."),
        "memory": MEMORY,
        "work": WORK,
        "limits": LIMITS,
        "scaled": SCALED,
        "error": maybe(text("Why there is no more of it: out of memory, interrupted.")),
    },
)  # fmt: skip

# -- over all points -----------------------------------------------------------------------

LINE = obj(
    "Least squares over the points of a batch: value = intercept + slope × context + curve × context².",
    {
        "what": text("What lies on it.", "steady memory", "peak memory", "TTFT", "TPOT"),
        "batch": of("integer", "Sequences at a time.", minimum=1),
        "intercept": of("number", "The value at a context of 0."),
        "slope": of("number", "What one more token of every sequence adds."),
        "predicted_slope": maybe(number("For memory: bytes that it adds to the cache by prediction.")),
        "residual": number("Largest distance of a point from the line, over the point's value."),
        "points": whole("Points that it is drawn through."),
        "curve": of(["number", "null"], "For TTFT, where at least four contexts tell it; else null."),
        "slope_error": maybe(number("Standard error of the slope; null where the points leave nothing to judge by.")),
        "told": flag("Whether the slope of a time is more than noise; true of memory."),
        "unit": text("Of the value: bytes or seconds.", "bytes", "s"),
        "ratio": of(["number", "null"], "The slope over the predicted one."),
    },
)

UNTIL_OOM = maybe(
    obj(
        "The largest that really runs, with --until-oom.",
        {
            "what": text("What was made larger.", "context", "batch"),
            "largest": maybe(whole("The largest that ran, in tokens or sequences; null where nothing ran.")),
            "first_failed": maybe(whole("The smallest that did not run; null where none failed.")),
            "predicted": maybe(whole("The largest by prediction on the same device; null without one.")),
            "tries": listed(
                "Every attempt, in a process of its own.",
                obj(
                    "One attempt.",
                    {
                        "size": of("integer", "Context in tokens, or sequences.", minimum=1),
                        "ran": flag("Whether it ran to its end."),
                        "ended": text("How it ended, in words."),
                        "peak_bytes": maybe(whole("Most bytes that it took, as far as that was seen.")),
                        "seconds": number("Seconds that it took."),
                    },
                ),
            ),
            "note": text("What else is to be said of it."),
            "interrupted": flag("Whether it was ended before the largest was found."),
        },
    )
)

# -- where it ran --------------------------------------------------------------------------

SETTINGS = loose(
    "What was asked for and how it was understood; with each engine some of these.",
    {
        "device": text("The device as torch names it."),
        "device_map": maybe(text("auto: layers were spread over all GPUs.")),
        "attention": maybe(text("The implementation of attention that ran.")),
        "weights": text("Where the weights come from.", "random", "published"),
        "weights_bytes": maybe(whole("Bytes of the weights as they were loaded.")),
        "layers": maybe(whole("Layers of each kind that --layers kept.")),
        "layers_kept": maybe(listed("Which layers ran, as numbers in the whole model.", whole("A layer, from 0."))),
        "layers_of_kind": maybe(listed("How many layers of each kind the whole model has.", whole("Layers."))),
        "contexts": listed("Contexts that another engine was asked for.", whole("Tokens.")),
        "batches": listed("Batches that another engine was asked for.", whole("Sequences.")),
        "decode": whole("Tokens that were generated after the first."),
        "prefill_chunk": maybe(whole("Tokens of the prompt that were fed at a time; null for all at once.")),
        "repeat": of("integer", "Timed runs of each point.", minimum=1),
        "prompt": text("What filled the prompt of another engine."),
        "seed": of("integer", "Of random weights and tokens."),
        "tensor_parallel": of("integer", "Tensor-parallel ranks.", minimum=1),
        "nodes": of("integer", "Machines that they are spread over.", minimum=1),
        "ranks": listed(
            "Each rank.",
            loose(
                "One rank.",
                {
                    "rank": whole("Its number, from 0."),
                    "device": text("The device as torch names it."),
                    "weights_bytes": whole("Bytes of the weights on it."),
                    "peak_bytes": maybe(whole("Most bytes that its process took.")),
                },
            ),
        ),
        "command": text("The command line of another engine."),
        "slots": maybe(whole("Slots of llama-server.")),
        "block_size": maybe(whole("Tokens in a block of vLLM's cache.")),
        "cache_dtype": maybe(text("Format of vLLM's cache.")),
        "prefix_caching": maybe(flag("Whether vLLM keeps blocks for later requests.")),
        "batch_tokens": maybe(whole("Tokens in a batch of vLLM.")),
        "length": maybe(whole("Tokens that a request of vLLM may have.")),
    },
)

ENVIRONMENT = loose(
    "Where it ran: versions, processor, devices, drivers. Empty without a run; of another engine, what that says of itself.",
    {
        "time": text("When, in UTC (ISO 8601)."),
        "kvctl": text("Version of kvctl."),
        "python": text("Version of Python."),
        "python_implementation": text("CPython, PyPy …"),
        "os": text("The system as it names itself."),
        "kernel": text("Its kernel and version."),
        "architecture": text("The processor's architecture: x86_64, aarch64 …"),
        "libc": maybe(text("The C library and its version.")),
        "container": maybe(text("The kind of container, as far as it leaves marks.")),
        "packages": of("object", "Versions of the packages that matter, by name.", additionalProperties=STRINGS),
        "torch": maybe(of("object", "What torch was built for, its threads and libraries; null where it did not run.")),
        "device": maybe(text("The device as torch names it.")),
        "gpus": listed("The GPUs that were used, with driver, clocks and memory (bytes).", {"type": "object"}),
        "cpu": of("object", "The processor: model, cores, instruction sets, clock in MHz."),
        "memory_bytes": whole("Bytes of the machine's memory."),
        "available_bytes": whole("Bytes of it that could be taken without swapping."),
        "limit_bytes": maybe(whole("Bytes that the tightest cgroup allows; null without a limit.")),
        "load_average": maybe(
            listed("Running processes over 1, 5 and 15 minutes.", number("Processes."), minItems=3, maxItems=3)
        ),
        "program": text("The program of another engine."),
        "build": maybe(text("What llama-server says of its build.")),
        "vllm": maybe(text("Version of vLLM.")),
    },
)

# -- beside earlier ones -------------------------------------------------------------------

CELL = obj(
    "One figure of one run.",
    {
        "value": maybe(number("Seconds (the median) or bytes; null where that run has none.")),
        "ratio": maybe(
            obj(
                "Over the first run's; null for that itself and where one of the two is missing.",
                {
                    "value": number("The ratio."),
                    "interval": maybe(listed("It with 95% confidence, from and to.", number("A bound."), minItems=2, maxItems=2)),
                    "by": text("What the interval goes by; bytes have none.", "repeats", "steps", "pairs", "bytes"),
                },
            )
        ),
        "verdict": maybe(
            text("What that says.", "same", "same within noise", "faster", "slower", "differs", "too few repeats")
        ),
    },
)  # fmt: skip

COMPARISON = obj(
    "This run beside saved ones, with --compare; ratios are over this run.",
    {
        "runs": listed("What the runs are called: this run, then the files.", STRINGS, minItems=2),
        "points": listed(
            "Points that this run and another have.",
            obj(
                "One point.",
                {
                    "context": of("integer", "Prompt tokens of a sequence.", minimum=1),
                    "batch": of("integer", "Sequences at a time.", minimum=1),
                    "decode": whole("Tokens that were generated after the first."),
                    "prefill_chunk": of(["integer", "string", "null"], "Tokens of the prompt that were fed at a time."),
                    "ranks": of("integer", "Tensor-parallel ranks.", minimum=1),
                    "rows": listed(
                        "What was measured of it.",
                        obj(
                            "One figure.",
                            {
                                "what": text("Which.", "TTFT", "TPOT", "KV cache", "peak memory"),
                                "unit": text("Seconds or bytes.", "s", "bytes"),
                                "cells": listed("One for each run.", CELL),
                            },
                        ),
                    ),
                },
            ),
        ),
        "differences": listed(
            "What of model, settings and environment is not the same in all runs.",
            obj(
                "One thing.",
                {
                    "what": text("Which, with dots: settings.attention."),
                    "values": of("array", "Of each run; null where it does not say."),
                },
            ),
        ),
        "unmatched": listed("Points that not all runs have, in words.", STRINGS),
        "note": text("What the intervals hold."),
    },
)

# -- the whole -----------------------------------------------------------------------------

PROFILE = document(
    "kvctl.profile/1",
    "What kvctl profile --json prints and --save keeps",
    {
        "kvctl_version": VERSION,
        "model": maybe({**MODEL, "description": "Which model, and where its configuration comes from; null without one."}),
        "engine": obj(
            "What ran the model.",
            {
                "name": text("Name, as in --engine; none where no model was run.", "transformers", "llama.cpp", "vllm", "none"),
                "version": maybe(text("Its version, where it says.")),
            },
        ),
        "dtype": maybe(text("The dtype that the model ran in.")),
        "weights": WEIGHTS,
        "ranks": of("integer", "Tensor-parallel ranks.", minimum=1),
        "settings": SETTINGS,
        "environment": ENVIRONMENT,
        "agrees": of(["boolean", "null"], "Whether all that was measured is as predicted; null where nothing was measured that was predicted."),
        "points": listed("One for each context and batch, small ones first.", POINT),
        "lines": listed("How memory and times grow with context.", LINE),
        "until_oom": UNTIL_OOM,
        "machine": MACHINE,
        "techniques": TECHNIQUES,
        "sharing": sharing(sample),
        "engine_log": maybe({**LOG, "description": "The start of another engine beside kvctl's plan; null with transformers."}),
        "notes": listed("What to know about it.", STRINGS),
        "warnings": listed("What to be wary of.", STRINGS),
        "interrupted": flag("Whether it was interrupted; what is complete is there."),
        "comparison": COMPARISON,
    },
    optional=("comparison",),
)  # fmt: skip

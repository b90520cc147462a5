"""What JSON Schemas are made of, and the parts that several of them have."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def obj(description: str, properties: dict[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
    """An object whose keys are required unless `optional`; more may come in later versions."""
    required = [key for key in properties if key not in set(optional)]
    return {"type": "object", "description": description, "properties": properties, "required": required}


def loose(description: str, properties: dict[str, Any]) -> dict[str, Any]:
    """An object that has some of these keys."""
    return obj(description, properties, optional=properties)


def of(kind: str | list[str], description: str, **more: Any) -> dict[str, Any]:
    return {"type": kind, "description": description, **more}


def whole(description: str) -> dict[str, Any]:
    return of("integer", description, minimum=0)


def number(description: str, **more: Any) -> dict[str, Any]:
    return of("number", description, minimum=0, **more)


def text(description: str, *words: str) -> dict[str, Any]:
    """Any text, or one of some words."""
    return of("string", description, **({"enum": list(words)} if words else {}))


def flag(description: str) -> dict[str, Any]:
    return of("boolean", description)


def listed(description: str, items: dict[str, Any], **more: Any) -> dict[str, Any]:
    return of("array", description, items=items, **more)


def maybe(schema: dict[str, Any]) -> dict[str, Any]:
    """The same, or null where it is not known."""
    known = {"enum": [*schema["enum"], None]} if "enum" in schema else {}
    return {**schema, "type": [schema["type"], "null"], **known}


STRINGS = {"type": "string"}
VERSION = of("string", "Version of kvctl that wrote this.")


def document(name: str, title: str, properties: dict[str, Any], optional: Iterable[str] = ()) -> dict[str, Any]:
    """A whole JSON Schema for documents that call themselves `name`."""
    named = {"schema": of("string", "Name and version of this format.", const=name), **properties}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": "urn:" + name.replace(".", ":").replace("/", ":"),
        "title": title,
        **obj(f"{title}. Later versions may add keys.", named, optional),
    }


MODEL = obj(
    "Which model, and where its configuration comes from.",
    {
        "id": of("string", "Full name, path, or the shape in words."),
        "model_type": of("string", "Architecture, in the words of its configuration."),
        "source": of("string", "What answered: catalogue, cache, hub, a path, stdin or a bare shape."),
        "location": of("string", "Where exactly: file, repository or provenance of the catalogue's row."),
        "revision": of(["string", "null"], "Commit of the repository, where known."),
        "overrides": of("object", "Fields of the configuration that --set replaced."),
        "notes": of("array", "What a reader should know about this model.", items={"type": "string"}),
        "max_context": maybe(whole("The model's own maximum, in tokens.")),
    },
    optional=("location", "max_context"),
)

WEIGHTS = maybe(
            obj(
                "The model's weights; null where nothing is known.",
                {
                    "bytes": maybe(whole("Bytes of all weights.")),
                    "parameters": maybe(whole("Number of parameters.")),
                    "source": of("string", "Where these numbers come from."),
                    "dtype": of(["string", "null"], "What they are stored in: bf16, or the quantiser's or format's name."),
                    "scheme": of(["string", "null"], "The quantisation in words, where ranks or another format were asked for."),
                    "per_rank": of(
                        "array",
                        "Bytes on each rank, tensor-parallel ranks of the first pipeline stage first; with parallel sizes.",
                        items=whole("Bytes on one rank."),
                    ),
                    "rules": of("string", "Whose sharding per_rank follows."),
                },
                ("dtype", "scheme", "per_rank", "rules"),
            )
        )  # fmt: skip

LOG = obj(
    "An engine's start-up log, explained.",
    {
        "file": text("The file, or whose log it is."),
        "engine": text("The engine that wrote it."),
        "version": maybe(text("Its version, where the log says.")),
        "model": maybe(text("The model as the engine was told: a name, a path or a file.")),
        "model_name": maybe(text("What the model's own file calls it, where that is printed.")),
        "engine_args": text("A command line with the settings that bear on the cache."),
        "complete": flag("Whether the cache's size, or why there is none, is in the log."),
        "starts": whole("Starts that the log has; the last one counts."),
        "line": whole("Line where that begins."),
        "kv_budget_bytes": maybe(
            listed(
                "Memory for the cache on the poorest rank, from and to: what rounds to the printed text; null where "
                "it is not printed.",
                whole("Bytes."),
                minItems=2,
                maxItems=2,
            )
        ),
        "figures": listed(
            "Every number that was read in it.",
            obj(
                "One number.",
                {
                    "name": text("What it is."),
                    "value": of("number", "In its unit; bytes and counts are whole."),
                    "half": number("Half of the last printed digit, in its unit; 0 where it is exact."),
                    "unit": text("bytes, tokens, blocks, requests, states or nothing."),
                    "line": whole("Line of the log; 0 where the engine was asked for it."),
                    "where": text("The process that printed it, as far as the line says."),
                    "text": text("As it is printed."),
                },
            ),
        ),
        "agrees": of(
            ["boolean", "null"],
            "Whether nothing that kvctl works out differs from the log; null where it has no such number.",
        ),
        "rows": of(
            "array",
            "Numbers of the log beside kvctl's.",
            items=obj(
                "One number.",
                {
                    "name": of("string", "What it is."),
                    "unit": of("string", "bytes, tokens, blocks, requests, states or nothing."),
                    "said": of("string", "As the log prints it."),
                    "value": of("number", "What that is."),
                    "half": of("number", "Half of its last printed digit."),
                    "line": whole("Line of the log."),
                    "low": of(
                        ["number", "null"], "What kvctl expects at least, for what rounds to the printed memory."
                    ),
                    "high": of(["number", "null"], "And at most."),
                    "agrees": of(["boolean", "null"], "Null: the log measured what kvctl only estimates."),
                    "difference": of("number", "The log's value less the nearest that kvctl expects."),
                    "cause": of(["string", "null"], "What accounts for a difference."),
                    "remark": of(["string", "null"], "What else is to be said of it."),
                },
            ),
        ),
        "refused": maybe(
            obj(
                "Why the engine did not start, what was short, and what fits; null where it started.",
                {
                    "kind": text("too long, no cache, not free, fraction or out of memory."),
                    "line": whole("Line of the log."),
                    "why": text("What was short, and by how much."),
                    "short_bytes": maybe(whole("Bytes that were short, where they are known.")),
                    "fits": listed("Settings with which it fits, each worked out.", {"type": "string"}),
                    "said": text("The log's own line."),
                },
            )
        ),
        "notes": of("array", "What to know about it.", items={"type": "string"}),
    },
    optional=("model", "model_name", "engine_args", "complete", "starts", "line", "kv_budget_bytes", "figures"),
)
FIT = obj(
    "Whether it fits on the hardware of --gpu; bytes are those of the rank that decides.",
    {
        "fits": of("boolean", "Whether weights, cache and all that the engine takes fit."),
        "device_bytes": whole(
            "Memory of the device that applications see: weights, cache, overhead and headroom together."
        ),
        "weights_bytes": whole("Weights on this rank."),
        "kv_bytes": whole("The cache of this workload on this rank."),
        "overhead_bytes": whole("Everything else, all of parts."),
        "headroom_bytes": of("integer", "What is left of the memory for the cache; less than 0 where it does not fit."),
        "kv_budget_bytes": whole("Memory for the cache on this rank."),
        "capacity_tokens": maybe(
            whole("Tokens of full-length requests that it holds; null where an engine has no pool.")
        ),
        "max_context": maybe(
            whole(
                "Most tokens in each of so many requests; 0 where none fit, null where the length makes no difference."
            )
        ),
        "max_concurrency": whole("Most requests of this context at once."),
        "bottleneck_rank": whole("The rank that decides, from 0."),
        "estimated": of("array", "What of this is estimated, with the rule.", items={"type": "string"}),
        "close": of("boolean", "Whether estimates that are off by a sixth turn the answer around."),
        "why": of(["string", "null"], "What stands in the way; null where it fits."),
        "advice": of("array", "Options with which it would fit, each of them tried.", items={"type": "string"}),
        "parts": of(
            "array",
            "What the rank holds beside weights and cache.",
            items=obj(
                "One part.",
                {
                    "name": of("string", "activations, graphs, runtime, left free, in use, …"),
                    "bytes": whole("Its bytes."),
                    "estimated": of("boolean", "Whether a rule of thumb gives it."),
                    "rule": of("string", "How it comes about."),
                },
            ),
        ),
        "ranks": of(
            "array",
            "Every rank.",
            items=obj(
                "One rank.",
                {
                    "rank": whole("Number, from 0."),
                    "device": of("string", "The device's name."),
                    "device_bytes": whole("Its memory that applications see."),
                    "weights_bytes": whole("Weights on it."),
                    "kv_bytes": whole("The cache of this workload on it."),
                    "overhead_bytes": whole("What the engine takes beside them."),
                    "headroom_bytes": of("integer", "What is left of its memory for the cache."),
                },
            ),
        ),
    },
)

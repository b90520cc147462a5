"""The part of a profile's schema that tells of requests whose prompts begin alike."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from schema_parts import flag, listed, maybe, number, obj, of, text, whole
from schemas_techniques import over_plain


def _alike(description: str) -> dict[str, Any]:
    return obj(
        description,
        {
            "policy": text("Through which cache.", "paged", "prefix", "fork"),
            "compared": whole(
                "Distributions of a next token: after each prompt, and after each token that follows it."
            ),
            "same": whole("Of these, with the same likeliest token."),
            "difference": number("The largest difference of a logit."),
            "largest": number("The largest logit of the plain cache, for comparison."),
        },
    )


_POLICY = obj(
    "The memory of all requests at once, after their last tokens.",
    {
        "policy": text(
            "contiguous and contiguous-pow2 (a piece for each request, reserved ahead at the model's longest or the next power of two), "
            "paged, or prefix (paged, with shared prefixes).",
            "contiguous", "contiguous-pow2", "paged", "prefix",
        ),
        "bytes": whole("Bytes: of tensors, block table included; calculated where predicted_bytes is null."),
        "predicted_bytes": maybe(whole("What kvctl predicts of them.")),
        "agrees": of(["boolean", "null"], "Whether the two are equal."),
        "blocks": maybe(whole("Blocks that are held, shared ones once.")),
        "slots": whole("Room for tokens."),
        "stored_tokens": whole("Tokens in it, those of shared blocks once."),
        "unused_slots": whole("Slots that are never filled."),
        "utilization": number("Stored tokens over slots."),
        "waste": number("Unused slots over slots."),
    },
)  # fmt: skip


def sharing(sample: Callable[[str], dict[str, Any]]) -> dict[str, Any]:
    """`sample` makes the schema of repeated times."""
    ratio = over_plain("Cached over cold.")
    return maybe(
        obj(
            "Requests whose prompts begin alike, in a paged cache, with --shared-prefix; null without.",
            {
                "agrees": of(
                    ["boolean", "null"],
                    "Whether bytes, hits and copies are as predicted; null where it broke off before.",
                ),
                "interrupted": flag("Whether it was interrupted."),
                "settings": obj(
                    "What was run.",
                    {
                        "context": whole("Tokens of the longest prompt."),
                        "share": number("Of it, what all prompts begin with."),
                        "common": whole("The same in tokens."),
                        "requests": whole("Requests."),
                        "block": whole("Tokens of a block."),
                        "decode": whole("Tokens after each prompt's first one."),
                        "repeat": whole("Timed runs of each request."),
                        "branches": whole("Continuations of the one prompt that is forked."),
                    },
                ),
                "lengths": listed("Tokens of each prompt.", {"type": "integer"}),
                "policies": listed("Ways to lay the cache out.", _POLICY),
                "queried_tokens": whole("Prompt tokens of all requests."),
                "hit_tokens": whole("Of these, found in the cache and not computed."),
                "expected_hit_tokens": whole("What prompts have in common with those before them, in whole blocks."),
                "hit_rate": number("hit_tokens over queried_tokens."),
                "alike": listed("Logits beside the plain cache's.", _alike("Through one paged cache.")),
                "fork": maybe(
                    obj(
                        "Several continuations of one prompt, with copy on write.",
                        {
                            "tokens": whole("Of the prompt."),
                            "branches": whole("Continuations."),
                            "decode": whole("Tokens of each, after its first one."),
                            "copied": whole("Blocks that were copied."),
                            "expected_copied": whole("One for each branch but one, where the last block is not full."),
                            "blocks": whole("Blocks that are held in the end."),
                            "expected_blocks": whole("Full blocks of the prompt once, and the rest of each branch."),
                            "separate_blocks": whole("If nothing were shared."),
                            "agrees": flag("Whether both are as expected."),
                            "alike": _alike("Beside a plain cache with a copy of the prompt for each."),
                        },
                    )
                ),
                "work": maybe(
                    obj(
                        "Floating-point operations of the second request's prefill, as counted.",
                        {
                            "cold_flops": whole("Of the whole prompt."),
                            "cached_flops": whole("Of what is left of it when the prefix is found."),
                            "saved": of("number", "Share that is saved."),
                        },
                    )
                ),
                "ttft": maybe(
                    obj(
                        "Time to the first token of every request but the first, in turn.",
                        {
                            "cold": sample("Without an index."),
                            "cached": sample("With what the first request left in it."),
                            "ratio": ratio,
                        },
                    )
                ),
            },
        )
    )

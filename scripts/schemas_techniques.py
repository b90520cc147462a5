"""The part of a profile's schema that tells of techniques."""

from __future__ import annotations

from typing import Any

from schema_parts import STRINGS, flag, listed, maybe, number, obj, of, text, whole


def estimate(description: str) -> dict[str, Any]:
    return obj(
        description,
        {
            "value": of(["number", "null"], "The mean; null where it is beyond all bounds."),
            "standard_error": of(["number", "null"], "Over clusters of tokens; null where there are too few."),
            "standard_error_of_tokens": of(["number", "null"], "As if every token were independent of the others."),
        },
    )


def over_plain(description: str) -> dict[str, Any]:
    return maybe(
        obj(
            description,
            {
                "value": number("Its time over the plain cache's."),
                "interval": of(
                    ["array", "null"], "With 95% confidence; null where one run cannot tell.", items={"type": "number"}
                ),
                "by": text("What the interval rests on: pairs of runs in turn."),
            },
        )
    )


QUALITY = maybe(
    obj(
        "Against the plain cache, on the same tokens; null for that one, and where no text was read.",
        {
            "tokens": whole("Tokens that were scored."),
            "windows": whole("Pieces of text."),
            "clusters": whole("Groups of tokens that errors rest on."),
            "clusters_are": text("What these groups are.", "windows", "blocks"),
            "plain_perplexity": of(["number", "null"], "Of the plain cache."),
            "perplexity": of(["number", "null"], "With the technique."),
            "perplexity_change_percent": estimate("Percent of the plain cache's perplexity."),
            "kl_nats": estimate("Mean divergence of the next token's distribution from the plain cache's, in nats."),
            "kl_p99_nats": number("What 99 of 100 tokens do not exceed."),
            "top1_agreement": estimate("Share of tokens for which both find the same token likeliest."),
        },
    )
)
ROW = obj(
    "One technique.",
    {
        "name": text("As it was asked for; plain is the cache that the others are compared with."),
        "papers": listed("A line for each of its parts: what it does, and where that comes from.", STRINGS),
        "tokens": whole("Tokens that the cache had seen when its bytes were counted."),
        "kv_bytes": maybe(whole("Bytes of all its tensors: codes, scales, scores, and what is not packed.")),
        "predicted_bytes": maybe(whole("What kvctl size says of them.")),
        "agrees": of(["boolean", "null"], "Whether the two are equal; null where nothing was counted."),
        "plain_bytes": maybe(whole("Bytes of the plain cache.")),
        "ratio": maybe(number("The plain cache's bytes over its own.")),
        "working_bytes": maybe(whole("The most that the process took beside what it had before and the cache.")),
        "ends": maybe(
            obj(
                "Of 8-bit floats without a scale, packed elements that they cannot hold; null for other formats.",
                {
                    "elements": whole("Packed elements of keys and values in all layers."),
                    "largest": whole("Stored as the largest number of the format, cut off or not."),
                    "zero": whole("Stored as zero."),
                },
            )
        ),
        "ttft_ratio": over_plain("Time to the first token."),
        "tpot_ratio": over_plain("Time per output token."),
        "quality": QUALITY,
        "greedy": maybe(
            obj(
                "The likeliest continuation beside the plain cache's; null for that one, and where no text was read.",
                {
                    "same": number("Tokens before the first that differs: the mean over texts."),
                    "of": whole("Tokens that were generated."),
                    "texts": whole("Pieces of text that were continued."),
                },
            )
        ),
        "recall": maybe(
            obj(
                "Keys hidden in a text that were found again; null where no text was read.",
                {
                    "found": whole("Keys that were found."),
                    "of": whole("Keys that were hidden."),
                    "by_depth": listed(
                        "Depth by depth.",
                        obj(
                            "One depth.",
                            {
                                "depth": number("Where in the prompt: 0 is its beginning, 1 its end."),
                                "found": whole("Keys that were found."),
                                "of": whole("Keys that were hidden."),
                            },
                        ),
                    ),
                },
            )
        ),
        "not_told_from": listed("Techniques that the text does not tell it from.", STRINGS),
        "pareto": flag("Whether no other is as good (by divergence) in fewer bytes."),
        "error": of(["string", "null"], "Why it could not be measured."),
    },
)
TECHNIQUES = maybe(
    obj(
        "Techniques beside the plain cache, with --technique; null without.",
        {
            "agrees": of(["boolean", "null"], "Whether all bytes are as predicted."),
            "text": of(["string", "null"], "What was read; null where quality was not measured."),
            "interrupted": flag("Whether it was interrupted."),
            "left_out": listed("Techniques of all that do not work with the model, and why.", STRINGS),
            "smallest": of(
                ["string", "null"],
                "The technique with the fewest bytes that keeps the bounds; null where none does, or none were set.",
            ),
            "settings": obj(
                "What was measured of each.",
                {
                    "context": whole("Prompt tokens of the runs that are timed."),
                    "decode": whole("Tokens after the first one."),
                    "repeat": whole("Timed runs."),
                    "encoder_tokens": of(["integer", "null"], "--encoder-tokens."),
                    "windows": whole("Pieces of text, at most."),
                    "prompt": whole("Tokens of a piece before those that count."),
                    "scored": whole("Tokens of a piece that count."),
                    "greedy": whole("Tokens that are generated after each prompt."),
                    "texts": whole("Pieces of text that are continued, at most."),
                    "depths": listed("Where keys are hidden: 0 is a prompt's beginning.", {"type": "number"}),
                    "keys": whole("Prompts with a key for each depth."),
                    "bounds": obj(
                        "What was asked for.",
                        {
                            "max_perplexity_increase_percent": of(["number", "null"], "--max-ppl-increase."),
                            "min_top1_percent": of(["number", "null"], "--min-top1."),
                        },
                    ),
                },
            ),
            "rows": listed("The plain cache, then the others by bytes.", ROW),
        },
    )
)

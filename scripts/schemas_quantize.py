"""JSON Schemas of what `kvctl quantize` prints and keeps."""

from __future__ import annotations

from schema_parts import FIT, MODEL, STRINGS, VERSION, document, flag, listed, maybe, number, obj, of, text, whole
from schemas_techniques import QUALITY

JUDGED = maybe(
    obj(
        "What a fresh process found that loaded it from disk; null where none was asked.",
        {
            "judged_with": text("What ran it: transformers, with which kernels, or kvctl's reference dequantizer."),
            "dtype": text("What it computed in."),
            "tokens": whole("Tokens that were scored."),
            "perplexity": of(["number", "null"], "Of these."),
            "quality": QUALITY | {"description": "Against the original, on the same tokens; null for the original."},
            "generated_ids": listed("The likeliest tokens after a fixed prompt.", {"type": "integer"}),
            "generated_text": text("These, as text."),
            "generated_as_original": maybe(whole("Of these, those before the first that differs from the original's.")),
            "load_seconds": number("Loading took."),
            "score_tokens_per_second": number("While reading the text."),
            "tokens_per_second": maybe(number("While generating.")),
            "weights_bytes": whole("Of parameters and buffers in memory."),
            "peak_bytes": maybe(whole("Memory of the process at its most.")),
            "notes": listed("What to know about it.", STRINGS),
        },
    )
)
CELL = obj(
    "A format of the cache with these weights.",
    {
        "name": text("Its name; plain is the cache in the model's own dtype."),
        "kv_bytes": whole("Of one sequence of the context, from the format's rule."),
        "tokens": maybe(whole("Tokens that the measured cache had seen.")),
        "measured_bytes": maybe(whole("That it held of these.")),
        "predicted_bytes": maybe(whole("That it holds of these by its rule.")),
        "agrees": of(["boolean", "null"], "Whether these are the same; null where it was not run."),
        "perplexity": maybe(number("Of the text, read through the cache.")),
        "quality": QUALITY | {"description": "Against the original with the plain cache; null for that itself."},
        "tokens_per_second": maybe(number("Decoding behind half a window of text.")),
        "fit": maybe(FIT),
        "pareto": flag("Whether no other has less divergence in fewer bytes of weights and cache."),
        "broken": listed("Bounds that it breaks.", STRINGS),
        "error": of(["string", "null"], "Why it could not be measured."),
    },
)
RESULT = obj(
    "One format, or the model as it is.",
    {
        "format": text("Its name; original is the model as it is."),
        "title": text("What it is."),
        "dtype": text("Of what is not packed."),
        "group": maybe(whole("Weights that share a scale.")),
        "parameters": whole("Of the model."),
        "predicted_bytes": maybe(
            whole("Of the checkpoint's tensors, from headers alone; null where it cannot be made.")
        ),
        "tensor_bytes": maybe(whole("The same, as its files have them; null where nothing was made.")),
        "bits_per_parameter": maybe(number("With scales and what is not packed.")),
        "predicted_peak_bytes": maybe(
            whole("Memory while it is made, beside what Python, torch and transformers take.")
        ),
        "peak_bytes": maybe(whole("The same, measured.")),
        "disk_bytes": maybe(whole("On the disk while it is made, at most.")),
        "seconds": maybe(number("That making it took.")),
        "made_with": of(["string", "null"], "Packages and their versions."),
        "folder": of(["string", "null"], "Where it is; null where it was not kept."),
        "checked": listed("What its files were held against.", STRINGS),
        "facts": of("object", "Of the format alone: tensor-parallel sizes, errors of the search, layers that stay."),
        "judged": JUDGED,
        "freed_bytes": of(["integer", "null"], "Of the original's tensors."),
        "freed_tokens": maybe(whole("Tokens of KV cache, in the model's own dtype, that fit into these.")),
        "caches": listed("Formats of the cache with these weights, where several are asked about.", CELL),
        "fit": maybe(FIT),
        "pareto": flag("Whether no other has less divergence in fewer bytes."),
        "broken": listed("Bounds that it breaks.", STRINGS),
        "error": of(["string", "null"], "Why it could not be made or measured."),
        "notes": listed("What to know about it.", STRINGS),
    },
)
KV = maybe(
    obj(
        "Formats of the KV cache, with --kv alone; null without.",
        {
            "dtype": text("That the model computed in."),
            "there": text("Scales that the checkpoint brings already, in words."),
            "context": whole("Tokens at which bytes are told."),
            "results": listed(
                "The plain cache, then each format.",
                obj(
                    "One format.",
                    {
                        "name": text("As it was asked for; of fp8 each choice of scales."),
                        "kv_bytes": whole("Of one sequence, from the format's rule."),
                        "broken": listed("Bounds that it breaks.", STRINGS),
                        "quality": QUALITY,
                        "fit": maybe(FIT),
                    },
                ),
            ),
            "engines": listed(
                "How engines are told.",
                obj(
                    "One format in one engine.",
                    {
                        "format": text("As it was asked for."),
                        "engine": text("The engine."),
                        "flags": listed(
                            "Of its command line, or its environment; empty where the checkpoint says it.", STRINGS
                        ),
                        "warnings": listed("What would go wrong.", STRINGS),
                    },
                ),
            ),
            "layers": listed(
                "Of a calibration: largest values, and errors with each choice of scales.", of("object", "One layer.")
            ),
            "calibrated_tokens": maybe(whole("Tokens that scales were calibrated on.")),
            "written": of(["string", "null"], "The checkpoint with scales."),
            "written_scales": of(["string", "null"], "Which of them were written."),
            "written_tensors": maybe(whole("How many.")),
            "better_than_1_for_sure": of(
                ["boolean", "null"], "Whether these cost less than scale 1.0 with 95% confidence."
            ),
        },
    )
)
QUANTIZE = document(
    "kvctl.quantize/1",
    "What kvctl quantize --json prints, and keeps beside a checkpoint",
    {
        "kvctl_version": VERSION,
        "model": MODEL,
        "settings": of("object", "What was asked for."),
        "environment": of("object", "Where it ran: versions, processor, devices, drivers."),
        "dry_run": flag("Whether nothing was made."),
        "process_bytes": maybe(
            whole("Memory that Python, torch and transformers take, beside what is predicted; of a dry run.")
        ),
        "context": whole("Tokens at which bytes of caches are told, and what fits."),
        "gpus": of(["string", "null"], "What fit is about; null without --gpu."),
        "results": listed("The model as it is, then each format; empty with --kv alone.", RESULT),
        "kv": KV,
        "notes": listed("What to know about it.", STRINGS),
        "warnings": listed("What may be wrong with it.", STRINGS),
        "interrupted": flag("Whether it broke off."),
    },
)
WAYS = document(
    "kvctl.weight-formats/1",
    "What kvctl quantize --list-formats --json prints",
    {
        "formats": listed(
            "One for each format.",
            obj(
                "A format.",
                {
                    "format": text("Its name."),
                    "title": text("What it is."),
                    "made_with": text("The package that makes it."),
                    "read_by": text("Engines that read it, and what that takes."),
                },
            ),
        )
    },
)
BACKENDS = document(
    "kvctl.backends/1",
    "What kvctl quantize --list-backends --json prints",
    {
        "backends": listed(
            "One for each backend.",
            obj(
                "A backend.",
                {
                    "name": text("Its name."),
                    "status": text("What is there.", "installed", "not installed", "broken", "cannot"),
                    "version": text("That its set pins."),
                    "python": text("The version of Python that it is for."),
                    "torch_build": text("cpu or cuda; empty where nothing is installed."),
                    "folder": of(["string", "null"], "Its environment."),
                    "bytes": whole("On the disk; where nothing is installed, what it would take."),
                    "download_bytes": whole("To fetch."),
                    "why": text("What is wrong with it."),
                    "formats": listed("What it makes.", STRINGS),
                },
            ),
        )
    },
)

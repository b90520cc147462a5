"""JSON Schemas of everything that kvctl prints with --json."""

from __future__ import annotations

from schema_parts import FIT, LOG, MODEL, VERSION, WEIGHTS, document, maybe, obj, of, whole
from schemas_profile import PROFILE
from schemas_quantize import BACKENDS, QUANTIZE, WAYS
from schemas_recommend import MATRIX, RECOMMEND, WHAT_IF
from schemas_serve import CALIBRATION, COMPARE, SERVE_TEST

KINDS = {
    "full_attention": "Keys and values of every token.",
    "sliding_window": "Keys and values of the newest tokens only, at most a window.",
    "chunked_attention": "Keys and values of the current chunk of tokens.",
    "latent_attention": "One compressed latent and one rotary key a token, for all heads.",
    "indexer": "Keys by which a sparse attention chooses the tokens to read.",
    "compressed_attention": "One entry, key and value at once, for a number of tokens.",
    "compressor_state": "The tokens that wait to become the next compressed entry.",
    "recurrent_state": "A state of fixed size instead of a cache (linear attention, Mamba, RWKV).",
    "conv_state": "The last inputs of a causal convolution; fixed size.",
    "cross_attention": "Keys and values of the encoder's, image's or audio's positions.",
    "bookkeeping": "Numbers that an engine stores with every position.",
    "shared": "Nothing of its own: the layer reads another layer's cache.",
    "none": "Nothing: the layer needs no cache.",
}


KIND = of("string", "Kind of state.", enum=list(KINDS))
LAYERS_COUNT = whole("Layers that hold such a state.")
TOKENS = whole("Positions held for one sequence; 0 for states of a fixed size.")

ALLOCATION = obj(
    "What an engine that plans ahead reserves for requests of this context; bytes are those of one rank.",
    {
        "device": of("string", "gpu or cpu."),
        "tensor_parallel_size": whole("Ranks that share every layer."),
        "block_size": whole("Tokens in a block, as the engine's configuration has it."),
        "bytes_per_block": whole("Bytes that one block of the pool takes on a rank."),
        "blocks_per_request": whole("Blocks that one request of this context holds, over all groups."),
        "reserved_bytes": whole("Bytes on a rank that the asked number of such requests holds."),
        "kv_budget_bytes": maybe(whole("Memory for the cache on a rank; null where none was named.")),
        "num_blocks": maybe(whole("Blocks that the budget holds; null without one.")),
        "capacity_tokens": maybe(whole("Tokens of full-length requests that the budget holds; null without one.")),
        "reported_capacity": maybe(
            whole("The token count that this version's start-up log prints; null without a budget.")
        ),
        "max_concurrency": of(["number", "null"], "Full-length requests that fit at once; null without a budget."),
        "per_rank": of(
            "array",
            "One for each rank.",
            items=obj(
                "One rank.",
                {
                    "rank": whole("Number of the rank, from 0."),
                    "bytes_per_block": whole("Bytes of one block on it."),
                    "reserved_bytes": whole("Bytes on it for the asked requests."),
                },
            ),
        ),
        "groups": of(
            "array",
            "Layers that share a block table.",
            items=obj(
                "One group.",
                {
                    "kind": KIND,
                    "layers": LAYERS_COUNT,
                    "block_size": whole("Tokens in a block of this group."),
                    "page_bytes": whole("Bytes that the group's layers use of a block."),
                    "blocks_per_request": whole("Blocks that one request of this context holds here."),
                },
            ),
        ),
        "log": of("array", "What the start-up log will print of it.", items={"type": "string"}),
        "reasons": of("array", "Why this differs from what the architecture needs.", items={"type": "string"}),
    },
)

REPLAY = obj(
    "What contiguous, paged and prefix-sharing allocation make of a trace, with --trace or --workload.",
    {
        "setup": of("object", "Block size, capacity and the time model that were used."),
        "requests": whole("Requests replayed."),
        "policies": of("array", "One object for each policy: contiguous, paged, prefix.", items={"type": "object"}),
        "assumed": of("array", "Values of the setup that nobody named.", items={"type": "string"}),
        "notes": of("array", "What to know about it.", items={"type": "string"}),
    },
)

SIZE_RESULT = obj(
    "The cache of one model at one context.",
    {
        "model": MODEL,
        "engine": obj(
            "Whose rules were used.",
            {
                "name": of("string", "Name, as in --engine."),
                "version": of(["string", "null"], "Version that the rules describe; null for ideal."),
            },
        ),
        "technique": of(["string", "null"], "What makes keys and values smaller, as in --technique; null without one."),
        "what_if": of(
            ["string", "null"], "The structure its attention is imagined to have, as in --what-if; null is its own."
        ),
        "context": whole("Tokens in each sequence."),
        "sequences": whole("Sequences held at the same time."),
        "beams": whole("Beams of each sequence."),
        "encoder_tokens": whole("Positions that cross attention holds."),
        "image_tokens": whole("Image positions in each sequence."),
        "audio_tokens": whole("Audio positions in each sequence."),
        "dtype": of("string", "The model's dtype."),
        "k_dtype": of("string", "Format of keys and latents."),
        "v_dtype": of("string", "Format of values."),
        "k_scheme": of("string", "How the format of keys counts its bytes, in words."),
        "v_scheme": of("string", "How the format of values counts its bytes, in words."),
        "kv_bytes": whole("The whole cache of all sequences, in bytes."),
        "kv_bytes_per_token": whole("Bytes that one more token of one sequence adds at this context, rounded up."),
        "kv_bytes_per_token_exact": of("string", "The same as a fraction, where it is not whole.", pattern="^[0-9]+/[0-9]+$"),
        "kv_bytes_fixed": whole("Bytes of the cache that do not grow with one more token."),
        "layers": of(
            "array",
            "The cache by kind of state; a layer with two kinds counts in two rows.",
            items=obj(
                "One kind of state.",
                {
                    "kind": KIND,
                    "count": LAYERS_COUNT,
                    "tokens": TOKENS,
                    "bytes": whole("Bytes of all of these layers and all sequences."),
                },
            ),
        ),
        "per_layer": of(
            "array",
            "Every layer in order, with --per-layer.",
            items=obj(
                "One layer.",
                {
                    "index": whole("Position in the model, from 0."),
                    "kind": {**KIND, "description": "Kind of its first state."},
                    "tokens": {**TOKENS, "description": "Positions that its first state holds for one sequence."},
                    "bytes": whole("Bytes of the layer, all states and all sequences."),
                    "states": of(
                        "array",
                        "What the layer keeps.",
                        items=obj(
                            "One state.",
                            {"kind": KIND, "tokens": TOKENS, "bytes": whole("Bytes of the state, all sequences.")},
                        ),
                    ),
                },
            ),
        ),
        "weights": WEIGHTS,
        "naive_kv_bytes": maybe(whole("Bytes by the usual formula on the usual fields, for comparison; null without them.")),
        "warnings": of("array", "Assumptions and limits that bear on this answer.", items={"type": "string"}),
        "allocation": ALLOCATION,
        "fit": FIT,
        "replay": REPLAY,
        "formulas": of(
            "array",
            "The arithmetic, with --explain.",
            items=obj(
                "One kind of layer.",
                {
                    "layers": LAYERS_COUNT,
                    "kind": KIND,
                    "text": of("string", "The formula with this model's numbers."),
                    "bytes": whole("What it comes to, in bytes."),
                },
            ),
        ),
    },
    optional=(
        "technique", "what_if", "beams", "encoder_tokens", "image_tokens", "audio_tokens", "dtype", "k_scheme", "v_scheme",
        "kv_bytes_per_token_exact", "per_layer", "naive_kv_bytes", "warnings", "allocation",
        "fit", "replay", "formulas",
    ),
)  # fmt: skip

LISTED_MODEL = obj(
    "One model.",
    {
        "id": of("string", "Full name; kvctl size takes it."),
        "model_type": of(["string", "null"], "Architecture, in the words of its configuration."),
        "parameters": maybe(whole("Number of parameters.")),
        "max_context": maybe(whole("The model's own maximum, in tokens.")),
        "incomplete": of(["string", "null"], "Why it cannot be sized from the catalogue; null where it can."),
    },
    optional=("incomplete",),
)

LISTED_GPU = obj(
    "One GPU. Rates are dense, and null where nobody published them.",
    {
        "name": of("string", "What --gpu takes."),
        "vendor": of("string", "Its maker."),
        "nvml_names": of("array", "Names that its driver gives it.", items={"type": "string"}),
        "aliases": of("array", "Other names that --gpu takes.", items={"type": "string"}),
        "memory_mib": maybe(whole("Memory as the driver's tool prints it, in MiB.")),
        "nominal_gb": whole("Memory as it is sold."),
        "cuda_mib": maybe(whole("Memory that CUDA applications were seen to see, in MiB.")),
        "bandwidth_gbs": of(["number", "null"], "Memory bandwidth, 10^9 bytes a second."),
        "fp16_tflops": of(["number", "null"], "10^12 operations a second."),
        "fp8_tflops": of(["number", "null"], "10^12 operations a second."),
        "int8_tops": of(["number", "null"], "10^12 operations a second."),
        "fp4_tflops": of(["number", "null"], "10^12 operations a second."),
        "compute_capability": of(["string", "null"], "CUDA compute capability."),
        "link_gbs": of(["number", "null"], "NVLink or its like, both directions, 10^9 bytes a second; 0 is none."),
        "sources": of("object", "Where each field comes from."),
    },
)

SCHEMAS = {
    "kvctl.size/1": document(
        "kvctl.size/1",
        "What kvctl size --json prints",
        {
            "kvctl_version": VERSION,
            "results": of("array", "One for each model, engine and context.", items=SIZE_RESULT),
            "refused": of(
                "array",
                "Engines of --engine all, and structures of --what-if, without an answer, and why.",
                items={"type": "string"},
            ),
            "log": LOG,
        },
        optional=("refused", "log"),
    ),
    "kvctl.profile/1": PROFILE,
    "kvctl.quantize/1": QUANTIZE,
    "kvctl.recommend/1": RECOMMEND,
    "kvctl.recommend-matrix/1": MATRIX,
    "kvctl.recommend-compare/1": WHAT_IF,
    "kvctl.serve-test/1": SERVE_TEST,
    "kvctl.calibration/1": CALIBRATION,
    "kvctl.serve-compare/1": COMPARE,
    "kvctl.weight-formats/1": WAYS,
    "kvctl.backends/1": BACKENDS,
    "kvctl.gpus/1": document(
        "kvctl.gpus/1",
        "What kvctl size --list-gpus --json prints",
        {"kvctl_version": VERSION, "gpus": of("array", "One for each GPU.", items=LISTED_GPU)},
    ),
    "kvctl.models/1": document(
        "kvctl.models/1",
        "What kvctl size --list-models --json prints",
        {"kvctl_version": VERSION, "models": of("array", "The catalogue's models.", items=LISTED_MODEL)},
    ),
}

"""Write measured caches, and plans that engines made, as compact test data.

    python scripts/compact_oracles.py OUT.jsonl[.gz] FOLDER...
    python scripts/compact_oracles.py --plans OUT.json CASES.json
    python scripts/compact_oracles.py --logs OUT.json CASES.json

Each FOLDER holds one JSON file a case, as a run of transformers wrote it: `config` (what
the saved config.json holds) and `runs` with the real bytes of every tensor of the cache.
One output line a case: name, config, and the distinct runs as
[dtype, batch, tokens seen, encoder tokens, bytes, bytes of each layer as [value, repeats]].

CASES holds what vLLM's own planner answered: `configs`, and `cases` with its arguments, the
specs of the layers, groups, blocks and capacity; or, with --logs, the lines about caches that
llama.cpp printed for each of a model's results.
"""

from __future__ import annotations

import gzip
import json
import re
import sys
from itertools import groupby
from pathlib import Path
from typing import Any

# Parts of a config that describe an encoder without a cache; a decoder's are kept whole.
DROP = {"vision_config", "audio_config", "vq_config", "vocabulary_map", "audio_encoder_config", "depth_decoder_config",
        "semantic_model_config", "acoustic_tokenizer_encoder_config", "semantic_tokenizer_encoder_config",
        "protein_encoder_config", "qformer_config", "projector_config", "perceiver_config", "id2label", "label2id",
        "image_grid_pinpoints", "quantization_config"}  # fmt: skip


# Scalars that no cache depends on.
IDLE = re.compile(
    r"_token_id$|_token_index$|_token_ids$|dropout|_drop$|pdrop|initializer_|init_std|_eps$|^eps$|layer_norm_epsilon|"
    r"transformers_version|hidden_act|activation_function|hidden_activation|^rope_|router_|_loss|softcap|_bias$|"
    r"^use_cache$|layerdrop|multiplier|^attention_bias$|time_step|scaling_factor|summary_|^return_dict$|jitter|"
    r"norm_topk_prob|swiglu|classifier_|forced_|problem_type|output_attentions|output_hidden|"
    r"chunk_size_feed_forward|^vocab_size|_vocab_size$"
)


def slim(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: slim(inner) for key, inner in value.items() if key not in DROP and not IDLE.search(key)}
    return value


def layers_of(run: dict[str, Any]) -> list[list[int]] | None:
    """Bytes of each layer, stacks of one index together; None where the run lists no layers."""
    rows = run["layers"]
    if any(row["class"] in ("Tensor", "xLSTMCache", "ReformerDynamicCache") and row["stack"] == "self" for row in rows):
        return None
    totals: dict[int, int] = {}
    for row in rows:
        # DeepSeek V4 keeps keys and values in one tensor: it counts once.
        aliased = row["class"].startswith("DeepseekV4")
        size = sum(t["bytes"] for t in row["tensors"] if not (aliased and t["path"] == "values"))
        totals[row["index"]] = totals.get(row["index"], 0) + size
    if sum(totals.values()) != run["bytes"]:
        raise SystemExit(f"layers do not add up to the total: {rows[0]}")
    values = [totals[index] for index in sorted(totals)]
    return [[value, len(list(group))] for value, group in groupby(values)]


PLAN = ("args", "tp", "mem", "max_model_len", "cfg_block_size", "num_blocks", "bytes_per_block", "kv_cache_size_tokens",
        "max_concurrency", "bytes_per_max_len_request")  # fmt: skip


def plans(out: Path, source: Path) -> None:
    """The plans of one file; a line for every case."""
    found = json.loads(source.read_text())
    configs = ",\n".join(f"{json.dumps(name)}:{json.dumps(planned(c))}" for name, c in found["configs"].items())
    rows = [
        json.dumps({"model": case.get("config", case["name"]), **{key: case[key] for key in PLAN},
                    "groups": [[g["type"], g["n_layers"], g["block_size"],
                                g.get("group_bytes", g["n_layers"] * g["page_size_bytes"])] for g in case["groups"]]})
        for case in found["cases"]
    ]  # fmt: skip
    head = f'"engine":{json.dumps(found["engine"] + " " + found["version"])}'
    text = f'{{{head},\n"configs":{{\n{configs}}},\n"cases":[\n' + ",\n".join(rows) + "]}\n"
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0) if out.suffix == ".gz" else text.encode())
    print(f"{out}: {len(rows)} cases, {out.stat().st_size:,} bytes")


def planned(config: dict[str, Any]) -> dict[str, Any]:
    """A config without idle parts, but with the cache's format that its quantisation names."""
    facts = config.get("quantization_config") or {}
    kept = {key: facts[key] for key in ("kv_cache_scheme", "kv_cache_quant_algo", "quantization") if facts.get(key)}
    return {**slim(config), **({"quantization_config": kept} if kept else {})}


LOG = re.compile(r"llama_kv_cache: size|llama_kv_cache_(iswa|dsa): creating|llama_memory_recurrent: size")


def logs(out: Path, source: Path) -> None:
    """The lines of one file; a line for every result."""
    found = json.loads(source.read_text())
    rows = [
        json.dumps({"model": case["model"], "arguments": result["arguments"],
                    "log": [line for line in result["log"] if LOG.match(line)]})
        for case in found["cases"]
        for result in case["results"]
    ]  # fmt: skip
    head = f'"engine":{json.dumps(found["engine"] + " " + found["build"])}'
    files = ",\n".join(f"{json.dumps(name)}:{json.dumps(keys)}" for name, keys in found["gguf"].items() if keys)
    out.write_text(f'{{{head},\n"gguf":{{\n{files}}},\n"cases":[\n' + ",\n".join(rows) + "]}\n")
    print(f"{out}: {len(rows)} cases, {out.stat().st_size:,} bytes")


def main() -> None:
    if sys.argv[1] in ("--plans", "--logs"):
        (plans if sys.argv[1] == "--plans" else logs)(Path(sys.argv[2]), Path(sys.argv[3]))
        return
    out, folders = Path(sys.argv[1]), sys.argv[2:]
    lines = []
    for folder in folders:
        for path in sorted(Path(folder).glob("*.json")):
            case = json.loads(path.read_text())
            runs = {
                json.dumps([run["dtype"], run["batch"], run["tokens_seen"], run["encoder_tokens"] or 0, run["bytes"],
                            layers_of(run)], separators=(",", ":"))
                for run in case["runs"]
            }  # fmt: skip
            versions = f"transformers {case['versions']['transformers']}, torch {case['versions']['torch']}"
            config = json.dumps(slim(case["config"]), separators=(",", ":"))
            lines.append(
                f'{{"name":{json.dumps(path.stem)},"measured":{json.dumps(versions)},"config":{config},'
                f'"runs":[{",".join(sorted(runs))}]}}'
            )
    text = "\n".join(lines) + "\n"
    # No time stamp in the archive: the same cases give the same bytes.
    out.write_bytes(gzip.compress(text.encode(), 9, mtime=0) if out.suffix == ".gz" else text.encode())
    print(f"{out}: {len(lines)} cases, {out.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()

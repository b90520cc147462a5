"""Write kvctl/data/model_types.jsonl: what a config.json may leave out.

A config.json on the Hub omits every field that equals the default of its
configuration class, spells fields in the way of its class, and nests the
decoder under a key of its class. This script reads those facts from an
installed transformers (a development-time dependency only):

    pip install transformers torch && python scripts/extract_model_types.py

One line a model type, so that one line is all that a run has to parse.
"""

from __future__ import annotations

import dataclasses
import inspect
import json
import re
import sys
from pathlib import Path

OUT = Path(__file__).parent.parent / "kvctl" / "data" / "model_types.jsonl"

# Fields that have no bearing on the cache, on parameter counts or on the maximum length.
IRRELEVANT = re.compile(
    r"token_id|tokens_per|dropout|_act$|_act_|activation|initializer|_init|init_|eps|^rope_|rope_theta|rope_scaling|rope_param|loss|bias|label|summary|"
    r"jitter|temperature|problem_type|return_dict|output_|transformers_version|architectures$|dtype$|"
    r"^use_cache$|kernel_type|scaling|softcap|_prob$|pdrop|layerdrop|mask_|clip_|langs|norm_|router|"
    r"chunk_size_feed|multiplier|theta|tie_|routed|topk_g|n_group$|mtp_|time_step|alpha|beta"
)
KEEP = {"inference_state_dtype", "mamba_ssm_cache_dtype", "tie_word_embeddings"}


def relevant(name: str) -> bool:
    """True for fields that may bear on the cache, on parameter counts or on lengths."""
    return name in KEEP or not (IRRELEVANT.search(name) or name.startswith("_"))


def plain(value: object) -> bool:
    """True for what JSON holds without loss: scalars, and short lists or dicts of them."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return True
    if isinstance(value, (list, tuple)):
        return len(value) <= 64 and all(plain(v) for v in value)
    if isinstance(value, dict):
        return len(value) <= 32 and all(isinstance(k, str) and plain(v) for k, v in value.items())
    return False


def defaults_of(cls: type) -> dict[str, object]:
    out: dict[str, object] = {}
    for field in dataclasses.fields(cls):
        if field.default is not dataclasses.MISSING:
            value = field.default
        elif field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        else:
            continue
        name = field.name
        if not relevant(name) or not plain(value):
            continue
        out[name] = value
    return out


def main() -> None:
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING, CONFIG_MAPPING_NAMES

    rows = {}
    todo = {name: CONFIG_MAPPING[name] for name in CONFIG_MAPPING_NAMES}
    while todo:
        name, cls = todo.popitem()
        if name in rows or not dataclasses.is_dataclass(cls):
            continue
        row: dict[str, object] = {"model_type": name, "defaults": defaults_of(cls)}
        if cls.attribute_map:
            row["aliases"] = dict(cls.attribute_map)
        nested, fixed, nested_defaults = {}, [], {}
        for key, spec in (cls.sub_configs_defaults or {}).items():
            if spec.model_type:
                nested[key] = spec.model_type
                sub = spec.config_class
                if sub.__name__ != "AutoConfig":
                    # A class of its own reads the part, whatever model_type the file gives it.
                    fixed.append(key)
                    if spec.model_type not in CONFIG_MAPPING_NAMES:
                        todo[spec.model_type] = sub
                kept = {k: v for k, v in spec.init_kwargs.items() if relevant(k) and plain(v)}
                if kept and not re.search(r"vision|audio|encoder|backbone", key):
                    nested_defaults[key] = kept
        if nested:
            row["nested"] = nested
        if fixed:
            row["fixed"] = fixed
        if nested_defaults:
            row["nested_defaults"] = nested_defaults
            # Some classes put these under a part that is given, others only in place of a missing one.
            source = inspect.getsource(cls)
            merged = [k for k in nested_defaults if f'sub_configs_defaults["{k}"].init_kwargs, **self.{k}' in source]
            if merged:
                row["merged"] = merged
        rows[name] = row

    # Vision, audio and text encoders keep no cache: leave them out.
    def decodes(row: dict[str, object]) -> bool:
        keys = set(row["defaults"]) | set(row.get("aliases", {}))  # type: ignore[call-overload]
        if row.get("nested"):
            return True
        name = str(row["model_type"])
        if "text" not in name and re.search(r"vision|audio_enc|_vit|image_enc|qformer|resampler|codec|vq", name):
            return False
        return bool(keys & {"vocab_size", "num_key_value_heads", "layer_types", "decoder_layers"})

    lines = [json.dumps(rows[n], separators=(",", ":"), sort_keys=False) for n in sorted(rows) if decodes(rows[n])]
    head = json.dumps({"source": f"transformers {transformers.__version__} configuration classes"})
    OUT.write_text("\n".join([head, *lines]) + "\n")
    print(f"{OUT}: {len(lines)} model types, {OUT.stat().st_size:,} bytes", file=sys.stderr)


if __name__ == "__main__":
    main()

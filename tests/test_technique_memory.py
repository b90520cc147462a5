"""Memory falls for real: what the kernel counts of a process that does nothing else, beside what the table says."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch and transformers")
pytest.importorskip("transformers")

pytestmark = [
    pytest.mark.engine,
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs the books of a Linux kernel"),
]
CONTEXT, DECODE = 2048, 8
CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 256, "intermediate_size": 256,
    "num_hidden_layers": 8, "num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 128,
    "max_position_embeddings": 16384, "torch_dtype": "float32",
}  # fmt: skip
# 8 layers, keys and values of 8 heads of 128 in fp32: 65,536 bytes a token.
PLAIN = 8 * 2 * 8 * 128 * 4 * (CONTEXT + DECODE)
ALONE = """
    import gc, sys, torch, transformers
    from kvctl.measure.passes import random_ids
    from kvctl.techniques import parse
    from kvctl.techniques import attention
    from kvctl.techniques.caches import equipped
    name, folder, context, decode = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    def books(key):
        line = next(line for line in open("/proc/self/status") if line.startswith(key))
        return int(line.split()[1]) * 1024
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(folder), attn_implementation="sdpa")
    technique = parse(name)
    def loop(length, steps):
        cache = transformers.DynamicCache(config=model.config)
        if not technique.plain:
            equipped(cache, model, technique, range(8))
            attention.remove(model)
            attention.install(model, technique)
        token = random_ids(128, 1, length, 0)
        for _ in range(steps + 1):
            token = model(input_ids=token, past_key_values=cache, use_cache=True, logits_to_keep=1).logits.argmax(-1)
    with torch.inference_mode():
        loop(256, 2)  # what is loaded at its first use is no memory of the cache
        gc.collect()
        open("/proc/self/clear_refs", "w").write("5")
        before = books("VmRSS")
        loop(context, decode)
    print(books("VmHWM") - before)
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("model")
    (path / "config.json").write_text(json.dumps(CONFIG))
    return str(path)


def run(*argv: str) -> str:
    # What the C library keeps of freed blocks would differ from process to process.
    env = os.environ | {"HF_HUB_OFFLINE": "1", "GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=65536"}
    done = subprocess.run([sys.executable, *argv], capture_output=True, text=True, timeout=900, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_peak_falls_by_what_the_table_says(folder: str) -> None:
    techniques = ("int8", "kivi4", "streaming-llm:0.25", "snapkv:0.25")
    made = json.loads(run("-m", "kvctl", "profile", folder, "--weights", "random", "--technique", ",".join(techniques),
                          "--ctx", str(CONTEXT), "--decode", str(DECODE), "--repeat", "1", "--json", "-q"))  # fmt: skip
    rows = {row["name"]: row for row in made["techniques"]["rows"]}
    assert rows["plain"]["kv_bytes"] == PLAIN
    seen = {name: int(run("-c", textwrap.dedent(ALONE), name, folder, str(CONTEXT), str(DECODE))) for name in rows}
    told = {name: row["kv_bytes"] + row["working_bytes"] for name, row in rows.items()}
    print(json.dumps({name: (seen[name], told[name], rows[name]["kv_bytes"]) for name in rows}))
    for name in techniques:
        fell = seen["plain"] - seen[name]
        assert fell == pytest.approx(told["plain"] - told[name], abs=0.02 * PLAIN), name
        # Not by working space alone: most of what the cache has less is really there.
        assert fell > 0.5 * (PLAIN - rows[name]["kv_bytes"]), name

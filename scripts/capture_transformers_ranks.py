#!/usr/bin/env python3
"""Measure the caches of two tensor-parallel ranks of transformers.

    python scripts/capture_transformers_ranks.py OUT.json FOLDER [NAME...]

Needs transformers 5.24 and torch. FOLDER holds one JSON file a case, `config` (what a saved config.json holds). Each is built
with random weights, cut by transformers' own plan over two gloo ranks on the CPU, and fed 21 tokens and then 3 of 2 sequences in
float32; every tensor of each rank's cache is counted. OUT has, by case, the bytes of every rank or why the model does not run,
and the encoder positions of those that have an encoder (all are told to have 17).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

RANKS, BATCH, PROMPT, STEPS, ENCODER = 2, 2, 21, 3, 17
PATIENCE_S = 90
AT_ONCE = 20
"""Models of one pair of processes: each leaves process groups behind."""


def one(name: str, config: dict[str, Any]) -> dict[str, Any]:
    """What this rank's cache takes, or why the model does not run."""
    import torch

    from kvctl.errors import KvctlError
    from kvctl.formats import model_dtype
    from kvctl.measure.cache import ModuleStates, walk
    from kvctl.measure.load import Wanted, load
    from kvctl.measure.passes import Passes, random_ids
    from kvctl.model import build_spec
    from kvctl.sources import Found
    from kvctl.spec import Provenance

    try:
        spec = build_spec(Found(name, config, Provenance("local", name)))
        dtype = model_dtype("float32")
        assert not isinstance(dtype, str)
        model = load(spec, Wanted(random=True, tensor_parallel=RANKS), dtype).model
        encoder = ENCODER if getattr(model.config, "is_encoder_decoder", False) else 0
        passes = Passes(model, "cpu", encoder, len(spec.layers))
        vocabulary = getattr(model.config.get_text_config(decoder=True), "vocab_size", None) or 1000
        states = ModuleStates(model)
        with torch.inference_mode():
            passes.begin(BATCH)
            logits = passes.prefill(random_ids(vocabulary, BATCH, PROMPT, 0))
            for _ in range(STEPS):
                logits = passes.feed(logits.argmax(-1, keepdim=True))
            held = walk(passes.cache, states.found(BATCH))
    except KvctlError as error:
        return {"error": error.message}
    except Exception as error:
        return {"error": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:200] if str(error) else ''}"}
    return {"bytes": held.logical_bytes, "encoder": encoder}


def rank(number: int, store: str, out: str) -> None:
    """One rank: a line of JSON for every name that stdin brings."""
    import datetime

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", store=dist.FileStore(store, RANKS), rank=number, world_size=RANKS,
        timeout=datetime.timedelta(seconds=PATIENCE_S),
    )  # fmt: skip
    with open(out, "w") as file:
        for name, config in json.load(sys.stdin).items():
            file.write(json.dumps({"name": name} | one(name, config)) + "\n")
            file.flush()
    os._exit(0)


def measure(wanted: dict[str, dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Every rank's finding, by name; ranks that lose step with one another are started anew behind that name."""
    rest, found = dict(wanted), {}
    while rest:
        left = dict(list(rest.items())[:AT_ONCE])
        with tempfile.TemporaryDirectory() as folder:
            outs = [Path(folder) / f"rank{number}" for number in range(RANKS)]
            ranks = []
            for number in range(RANKS):
                command = [sys.executable, __file__, "--rank", str(number), f"{folder}/store", str(outs[number])]
                told = os.environ | {"RANK": str(number), "LOCAL_RANK": str(number), "WORLD_SIZE": str(RANKS),
                                     "CUDA_VISIBLE_DEVICES": ""}  # fmt: skip
                ranks.append(
                    subprocess.Popen(command, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, env=told, text=True)
                )
            try:
                for process in ranks:
                    assert process.stdin is not None
                    json.dump(left, process.stdin)
                    process.stdin.close()
                _wait(ranks, outs)
            finally:
                for process in ranks:
                    process.kill()
                    process.wait()
            rows = [[json.loads(line) for line in out.read_text().splitlines()] if out.exists() else [] for out in outs]
        for each in zip(*rows, strict=False):
            found[each[0]["name"]] = list(each)
        done = min(map(len, rows))
        if done < len(left):
            found[list(left)[done]] = [{"error": "the ranks lost step"}] * RANKS
        rest = {name: config for name, config in rest.items() if name not in found}
    return found


def _wait(ranks: list[subprocess.Popen[str]], outs: list[Path]) -> None:
    """Until all have ended, or none has written for a while, or one fails where another waits."""
    sizes, last, apart = [0] * len(outs), time.monotonic(), None
    while any(process.poll() is None for process in ranks):
        time.sleep(0.2)
        now = [out.stat().st_size if out.exists() else 0 for out in outs]
        if now != sizes:
            sizes, last = now, time.monotonic()
        lines = [out.read_text().splitlines() if out.exists() else [] for out in outs]
        short = min(map(len, lines))
        ahead = [line for each in lines for line in each[short : short + 1] if '"error"' in line]
        apart = (apart or time.monotonic()) if ahead else None
        if time.monotonic() - last > PATIENCE_S or (apart is not None and time.monotonic() - apart > 20):
            return


def main() -> None:
    if sys.argv[1] == "--rank":
        return rank(int(sys.argv[2]), sys.argv[3], sys.argv[4])
    out, folder, *names = sys.argv[1:]
    files = sorted(Path(folder).glob("*.json"))
    found = measure(
        {file.stem: json.loads(file.read_text())["config"] for file in files if not names or file.stem in names}
    )
    import torch
    import transformers

    text = json.dumps({
        "measured": f"transformers {transformers.__version__}, torch {torch.__version__}, {RANKS} gloo ranks on a CPU",
        "ranks": RANKS, "batch": BATCH, "tokens": PROMPT + STEPS, "dtype": "float32",
        "encoder": {name: rows[0]["encoder"] for name, rows in found.items() if rows[0].get("encoder")},
        "bytes": {name: [row["bytes"] for row in rows] for name, rows in found.items() if all("bytes" in r for r in rows)},
        "errors": {name: next(row["error"] for row in rows if "error" in row) for name, rows in found.items()
                   if any("error" in row for row in rows)},
    }, separators=(",", ":"), sort_keys=True)  # fmt: skip
    Path(out).write_text(text + "\n")
    return None


if __name__ == "__main__":
    main()

"""llama.cpp's own library, driven through ctypes: what it logs of its caches for a GGUF header.

    python tests/libllama.py FOLDER < requests > answers

FOLDER holds libllama and ggml as shared objects (the npm package @node-llama-cpp/linux-x64: bins/linux-x64).
A request is one line of JSON: {"gguf": path, "contexts": [{"n_ctx": 4096, …}, …]}; an answer is one line with the
lines logged of each context, or with "error". The file needs nothing but metadata: the tensors that the library
misses are added to a copy, in the shapes that it names, until it is content; their data is a hole and never read.
A failed assertion ends the process: the answers so far are valid.

For tests: `spec_of` and `planned` say what kvctl makes of the same keys and contexts.
"""

from __future__ import annotations

import ctypes
import json
import os
import re
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TYPES = {"f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30}


class ModelParams(ctypes.Structure):
    """llama_model_params of the versions 0.5 and 0.6."""

    _fields_ = [
        ("devices", ctypes.c_void_p), ("overrides", ctypes.c_void_p), ("n_gpu_layers", ctypes.c_int32),
        ("split_mode", ctypes.c_int32), ("load_mode", ctypes.c_int32), ("lazy_mode", ctypes.c_int32),
        ("main_gpu", ctypes.c_int32), ("tensor_split", ctypes.c_void_p), ("progress", ctypes.c_void_p),
        ("progress_data", ctypes.c_void_p), ("kv_overrides", ctypes.c_void_p), ("vocab_only", ctypes.c_bool),
        ("check_tensors", ctypes.c_bool), ("use_extra_bufts", ctypes.c_bool), ("no_host", ctypes.c_bool),
        ("no_alloc", ctypes.c_bool), ("load_mtp", ctypes.c_bool),
    ]  # fmt: skip


class ContextParams(ctypes.Structure):
    """llama_context_params of the versions 0.5 and 0.6."""

    _fields_ = [
        *((name, ctypes.c_uint32) for name in (
            "n_ctx", "n_batch", "n_ubatch", "n_seq_max", "n_rs_seq", "n_outputs_max", "n_outputs_max_per_seq")),
        *((name, ctypes.c_int32) for name in (
            "n_threads", "n_threads_batch", "ctx_type", "rope_scaling", "pooling", "attention", "flash_attn")),
        *((name, ctypes.c_float) for name in (
            "rope_freq_base", "rope_freq_scale", "yarn_ext", "yarn_attn", "yarn_fast", "yarn_slow")),
        ("yarn_orig_ctx", ctypes.c_uint32), ("defrag_thold", ctypes.c_float), ("cb_eval", ctypes.c_void_p),
        ("cb_eval_data", ctypes.c_void_p), ("type_k", ctypes.c_int32), ("type_v", ctypes.c_int32),
        ("abort", ctypes.c_void_p), ("abort_data", ctypes.c_void_p), ("embeddings", ctypes.c_bool),
        ("offload_kqv", ctypes.c_bool), ("no_perf", ctypes.c_bool), ("op_offload", ctypes.c_bool),
        ("swa_full", ctypes.c_bool), ("kv_unified", ctypes.c_bool), ("samplers", ctypes.c_void_p),
        ("n_samplers", ctypes.c_size_t), ("ctx_other", ctypes.c_void_p),
    ]  # fmt: skip


LOG = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
MISSING = re.compile(r"(?:missing tensor|tensor) '([^']+)'(?: not found)?$")
OTHER_SHAPE = re.compile(r"tensor '([^']+)' has wrong shape; expected ([\d, ]+), got")
REFUSED = b"(no context)\n"
CACHE = re.compile(r"llama_(kv_cache|memory)\w*: .*(creating .* cells|size = .* MiB \()|.* state = ")
WRONG_NUMBER = re.compile(r"wrong number of tensors")


class _OtherNumber(Exception):
    """The library has no use for some of the tensors."""


def suffix(name: str) -> str:
    """What is left of a tensor's name without its layer."""
    return name.split(".", 2)[2] if name.startswith("blk.") else name


def elements(shape: list[int]) -> int:
    count = 1
    for length in shape:
        count *= length
    return count


def with_tensors(header: bytes, tensors: dict[str, list[int]]) -> bytes:
    """The header of a file without tensors, with these in float32 after its keys."""
    keys = bytearray(header)
    keys[8:16] = struct.pack("<Q", len(tensors))
    start = 0
    for name, shape in tensors.items():
        keys += struct.pack("<Q", len(name)) + name.encode() + struct.pack("<I", len(shape))
        keys += struct.pack(f"<{len(shape)}QIQ", *shape, 0, start)
        start += -(-elements(shape) // 8) * 32
    return bytes(keys) + bytes(-len(keys) % 32)


class Llama:
    """The loaded library and its log."""

    def __init__(self, folder: Path) -> None:
        def load(pattern: str) -> ctypes.CDLL:
            found = sorted(folder.glob(pattern))
            if not found:
                raise FileNotFoundError(f"no {pattern} in {folder}")
            return ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)

        self.base = load("libggml-base*.so*")
        ggml = load("libggml.*so*")
        self.lib = load("libllama.*so*")
        self.lines: list[str] = []
        self._log = LOG(lambda level, text, data: self.lines.append(text.decode("utf-8", "replace").rstrip("\n")))
        self.lib.llama_log_set(self._log, None)
        # The plainest CPU code: nothing is computed, and the folder's others may want another processor.
        ggml.ggml_backend_load.argtypes, ggml.ggml_backend_load.restype = [ctypes.c_char_p], ctypes.c_void_p
        ggml.ggml_backend_load(str(folder / "libggml-cpu-x64.so").encode())
        self.lib.llama_model_default_params.restype = ModelParams
        self.lib.llama_context_default_params.restype = ContextParams
        self.lib.llama_model_load_from_file.argtypes = [ctypes.c_char_p, ModelParams]
        self.lib.llama_model_load_from_file.restype = ctypes.c_void_p
        self.lib.llama_init_from_model.argtypes = [ctypes.c_void_p, ContextParams]
        self.lib.llama_init_from_model.restype = ctypes.c_void_p
        self.lib.llama_free.argtypes = self.lib.llama_model_free.argtypes = [ctypes.c_void_p]
        if self.lib.llama_context_default_params().n_batch != 2048:
            raise RuntimeError("this libllama has other structures than the versions 0.5 and 0.6")

    def contexts(self, path: str, wanted: list[dict[str, Any]]) -> Iterator[list[str]]:
        """The lines logged of each context; those of a refusal start with "refused: "."""
        model = self.model(Path(path).read_bytes())
        for asked in wanted:
            yield self._apart(model, asked)
        self.lib.llama_model_free(model)

    def _apart(self, model: ctypes.c_void_p, asked: dict[str, Any]) -> list[str]:
        """The lines of one context, made in a process of its own: some fall over once their caches are there."""
        ours, theirs = os.pipe()
        child = os.fork()
        if not child:
            log = LOG(lambda level, text, data: os.write(theirs, text) and None)
            self.lib.llama_log_set(log, None)
            if not self.lib.llama_init_from_model(model, self.context_params(asked)):
                os.write(theirs, REFUSED)
            os._exit(0)
        os.close(theirs)
        with os.fdopen(ours, encoding="utf-8", errors="replace") as pipe:
            lines = pipe.read().splitlines()
        os.waitpid(child, 0)
        if lines[-1:] == [REFUSED.decode().strip()]:
            return ["refused: " + " | ".join(lines[-4:-1])]
        return [line for line in lines if CACHE.match(line)]

    def model(self, header: bytes) -> ctypes.c_void_p:
        """The model of a header without tensors; they are found out by trying."""
        try:
            return self._grown(header, alike=True)
        except _OtherNumber:
            # Layers differ: each is asked for its own.
            return self._grown(header, alike=False)

    def _grown(self, header: bytes, *, alike: bool) -> ctypes.c_void_p:
        tensors: dict[str, list[int]] = {}
        shapes: dict[str, list[int]] = {}
        layers = self._layers(header)
        params = self.lib.llama_model_default_params()
        params.no_alloc, params.n_gpu_layers, params.load_mode = True, 0, 0
        with tempfile.NamedTemporaryFile(suffix=".gguf") as file:
            for _ in range(100_000):
                file.seek(0)
                file.truncate()
                file.write(with_tensors(header, tensors))
                file.truncate(file.tell() + 4 * sum(-(-elements(shape) // 8) * 8 for shape in tensors.values()))
                file.flush()
                self.lines.clear()
                if model := self.lib.llama_model_load_from_file(file.name.encode(), params):
                    return ctypes.c_void_p(model)
                said = " | ".join(line.strip() for line in self.lines[-6:] if "error" in line)
                said = said or " | ".join(self.lines[-3:])
                if WRONG_NUMBER.search(said) and alike:
                    raise _OtherNumber
                one = not alike
                if found := OTHER_SHAPE.search(said):
                    name = found[1]
                    shape = [int(length) for length in found[2].split(",")]
                    # A second shape for the same tensor: it differs between layers.
                    one = one or len(shapes.get(suffix(name), [])) > 1 or shapes.get(suffix(name), [1]) != [1]
                elif found := MISSING.search(said):
                    name = found[1]
                    shape = shapes.get(suffix(name), [1])
                else:
                    raise ValueError(f"no model: {said}")
                shapes[suffix(name)] = tensors[name] = shape
                if not one and name.startswith("blk."):
                    tensors |= {f"blk.{layer}.{suffix(name)}": shape for layer in range(layers)}
        raise ValueError("no end of missing tensors")

    @staticmethod
    def _layers(header: bytes) -> int:
        at = header.index(b".block_count") + len(b".block_count")
        return int.from_bytes(header[at + 4 : at + 8], "little")

    def context_params(self, asked: dict[str, Any]) -> ContextParams:
        params: ContextParams = self.lib.llama_context_default_params()
        for name, value in asked.items():
            setattr(params, name, TYPES[value] if name.startswith("type_") else value)
        return params


def spec_of(architecture: str, metadata: dict[str, Any]) -> Any:
    """kvctl's model of a GGUF file with these keys."""
    from kvctl.model import build_spec
    from kvctl.sources import Found
    from kvctl.sources.gguf_config import to_config
    from kvctl.spec import Provenance

    keys = {f"{architecture}.{key}": value for key, value in metadata.items()}
    config = to_config({"general.architecture": architecture} | keys, "test.gguf")
    return build_spec(Found("test", config, Provenance("local", "test.gguf")))


def planned(spec: Any, asked: dict[str, Any], version: str | None = None) -> Any:
    """kvctl's allocation for a context of the library; its own defaults are one slot and a full window cache."""
    from kvctl.allocation import Serving
    from kvctl.engines import llama_cpp
    from kvctl.formats import FP16
    from kvctl.spec import Formats

    key, value = (llama_cpp.kv_dtype(asked.get(name, "f16"), name) for name in ("type_k", "type_v"))
    serving = Serving(
        slots=asked.get("n_seq_max", 1),
        unified=asked.get("kv_unified", False),
        ubatch=asked.get("n_ubatch"),
        batch=asked.get("n_batch"),
        swa_full=asked.get("swa_full", True),
        flash_attention={-1: None, 0: False, 1: True}[asked.get("flash_attn", -1)],
    )
    return llama_cpp.plan(spec, asked["n_ctx"], 1, Formats(FP16, key, value), serving, version)


def main() -> None:
    # Assertions that fail write to stdout: the answers get a copy of it, and the library what is not read.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    os.environ["GGML_NO_BACKTRACE"] = "1"
    llama = Llama(Path(sys.argv[1]))
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer: dict[str, Any] = {"logs": list(llama.contexts(request["gguf"], request["contexts"]))}
        except ValueError as error:
            answer = {"error": str(error)}
        print(json.dumps(answer), flush=True, file=answers)


if __name__ == "__main__":
    main()

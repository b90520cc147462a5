"""What starts an engine: programs, Python modules and container images."""

from __future__ import annotations

import re
from collections.abc import Sequence

from kvctl.record import Record

# Program, what must follow it, engine.
_PROGRAMS = (
    ("vllm", ("serve", "bench", "chat", "complete"), "vllm"),
    ("sglang", ("serve",), "sglang"),
    ("llama-server", (), "llama.cpp"),
    ("llama-cli", (), "llama.cpp"),
    ("llama-completion", (), "llama.cpp"),
    ("llama-mtmd-cli", (), "llama.cpp"),
    ("trtllm-serve", (), "tensorrt-llm"),
    ("ollama", ("serve", "run"), "ollama"),
    ("transformers", ("serve",), "transformers"),
)
_MODULES = (("vllm.entrypoints.", "vllm"), ("sglang.launch_server", "sglang"), ("sglang.bench_", "sglang"),
            ("sglang.srt.", "sglang"), ("dynamo.vllm", "vllm"), ("dynamo.sglang", "sglang"), ("llama_cpp.server", "llama.cpp"))  # fmt: skip
_IMAGE = re.compile(
    r"(?P<registry>(?:[\w.-]+(?::\d+)?/)*)(?:(?P<vllm>vllm-openai|vllm)|(?P<sglang>sglang)|(?P<llama>llama\.cpp)|(?P<ollama>ollama)"
    r"|tensorrt-llm/(?P<trt>release))(?:-\w+)?(?::(?P<tag>[\w.-]+))?(?:@sha256:[0-9a-f]+)?"
)
_OF_IMAGE = {"vllm": "vllm", "sglang": "sglang", "llama": "llama.cpp", "ollama": "ollama", "trt": "tensorrt-llm"}
_TAG = re.compile(r"v?(\d+\.\d+(?:\.\d+)?(?:\.?rc\d+)?)(?:[.-].*|)|(?:.*-)?(b\d{3,6})|.*vllm_(\d+\.\d+\.\d+)(?:_.*)?")
_OF_VARIABLES = (("OLLAMA_", "ollama"), ("LLAMA_ARG_", "llama.cpp"))

ONE_SLOT = ("llama-cli", "llama-completion", "llama-mtmd-cli")
"""Programs of llama.cpp that answer one conversation; llama-server has several slots."""


class Program(Record):
    """An engine as a command names it, and the words after what starts it."""

    engine: str
    version: str | None
    name: str
    """The program; empty where an image alone says the engine."""
    rest: list[str]
    unversioned: bool
    """An image of the engine whose tag (latest, nightly, a month) does not say the version."""


def program(words: Sequence[str], image: str | None) -> Program | None:
    """What a command starts; `image`: the one that it runs in."""
    found = image_engine(image) if image is not None else None
    start = 0
    for index, word in enumerate(words):
        name = re.split(r"[/\\]", word)[-1].removesuffix(".exe")
        for starter, follows, owner in _PROGRAMS:
            if name == starter and (not follows or (index + 1 < len(words) and words[index + 1] in follows)):
                return _started(owner, found, name, _after(words, index + 1 + bool(follows), owner))
        if word == "-m" and index + 1 < len(words):
            for module, owner in _MODULES:
                if words[index + 1].startswith(module):
                    return _started(owner, found, words[index + 1], list(words[index + 2 :]))
        if found is None and index and (word.endswith(".sif") or not word.startswith(("-", "/", ".", "~"))):
            found = image_engine(word)
            start = index + 1
    return _started(found[0], found, "", list(words[start:])) if found is not None else None


def image_engine(word: str) -> tuple[str, str | None] | None:
    """Engine and version of a container image."""
    if word.endswith(".sif"):
        # Apptainer's file of an image, by its usual name: vllm-openai_v0.8.3.sif.
        word = "/" + word.rpartition("/")[2].removesuffix(".sif").replace("_", ":", 1)
    word = word.removeprefix("docker://")
    match = _IMAGE.fullmatch(word.removeprefix("/"))
    if match is None or ("/" not in word and ":" not in word):
        return None
    engine = next(_OF_IMAGE[name] for name in _OF_IMAGE if match[name])
    # NVIDIA's own builds of vLLM and SGLang count by the month (nvcr.io/nvidia/vllm:25.09-py3).
    dated = engine in ("vllm", "sglang") and match["registry"].startswith("nvcr.io/")
    tag = _TAG.fullmatch(match["tag"] or "") if not dated else None
    return engine, (tag[1] or tag[2] or tag[3]) if tag else None


def engine_of_variables(names: Sequence[str]) -> str | None:
    """The engine that environment variables are for."""
    return next((engine for prefix, engine in _OF_VARIABLES if any(name.startswith(prefix) for name in names)), None)


def _started(owner: str, found: tuple[str, str | None] | None, name: str, rest: list[str]) -> Program:
    version = found[1] if found is not None and found[0] == owner else None
    return Program(owner, version, name, rest, unversioned=found is not None and found == (owner, None))


def _after(words: Sequence[str], index: int, owner: str) -> list[str]:
    # trtllm-serve takes its subcommand or none.
    if owner == "tensorrt-llm" and list(words[index : index + 1]) == ["serve"]:
        index += 1
    return list(words[index:])

"""Published speed measurements as kvctl.speed sees them: a layout, a load, and figures to compare.

A record is one of tests/data/speed.jsonl, or of any file in that form: model, engine, engine_version, gpu, gpus, tp, pp, weights, kv_dtype,
input_len, output_len, concurrency, metric. What cannot be read is said and left out.
"""

from __future__ import annotations

import re
from typing import Any

from kvctl.errors import KvctlError
from kvctl.formats import BF16, cache_format, plain
from kvctl.hardware.table import cards, find
from kvctl.model import build_spec
from kvctl.record import Record
from kvctl.sources import resolve
from kvctl.spec import Formats, ModelSpec
from kvctl.speed import CHUNKS, Setup, facts_of, layout_of
from kvctl.speed.efficiency import FEW
from kvctl.speed.machine import family
from kvctl.weight_formats import GGUF_BITS

METRICS = ("decode_tok_s_request", "decode_tok_s_total", "prefill_tok_s", "total_tok_s", "e2e_latency_s", "output_tok_s_total",
           "speed_in_plus_out_tok_s", "ttft_ms", "tpot_ms", "itl_ms")  # fmt: skip

# Names that benchmarks use and the Hub does not, or that the catalogue has under another.
MODELS = {
    "llama-7b": "meta-llama/Llama-2-7b-hf",  # the first Llama has the second's shape
    "llama-13b": "NousResearch/Llama-2-13b-hf",
    "llama-2-7b": "meta-llama/Llama-2-7b-hf",
    "llama-2-13b": "NousResearch/Llama-2-13b-hf",
    "llama-2-70b": "codellama/CodeLlama-70b-hf",  # of Llama 2's shape
    "llama-2-70b-hf": "codellama/CodeLlama-70b-hf",
    "llama-30b": "huggyllama/llama-30b",
    "llama-65b": "huggyllama/llama-65b",
    "llama-3.1-405b": "meta-llama/Llama-3.1-405B-Instruct",
    "meta-llama-3-8b": "meta-llama/Meta-Llama-3-8B",
    "meta-llama-3-70b": "meta-llama/Meta-Llama-3-70B",
    "mistral-7b": "mistralai/Mistral-7B-v0.1",
    "mixtral-8x7b": "mistralai/Mixtral-8x7B-v0.1",
    "mixtral-8x22b": "mistralai/Mixtral-8x22B-v0.1",
    "tinyllama-1.1b": "TinyLlama/TinyLlama-1.1B-Chat-v1.0",
    "cogito-v1-preview-qwen-32b": "Qwen/Qwen2.5-32B-Instruct",  # fine-tuned from it
}
_TAIL = re.compile(
    r"([-:_](fp4|nvfp4|fp8|fp8-kv|mxfp4|mxfp4-q8|q8|4bit|8bit|gptq-8bit|gptq-int4|gptq-int8|int4|int8|awq|gguf|qat|hf|bf16|fp16|exl2|mlx))+$"
)


class Point(Record):
    """One measurement that can be compared."""

    id: str
    source: str
    engine: str
    generation: str
    gpu: str
    weights: str
    group: str
    """Model, GPU and engine: what is left out together."""
    spec: Any
    card: Any
    gpus: int
    tensor: int
    pipeline: int
    data: int
    expert: bool
    fmt: Any
    kv: Any
    input: int | None
    output: int | None
    concurrency: int | None
    before: int
    """Tokens of a prompt that are in the cache already."""
    saturated: bool
    figures: Any
    """Metric → value, as the record has them."""
    trust: float
    """1 where nothing speaks against it, less where the record is graded lower."""


def read(record: dict[str, Any]) -> Point | str:
    """The point, or why it is none."""
    found = model(record["model"], record.get("params_note") or "")
    if found is None:
        return f"model {record['model']}"
    card = gpu(record["gpu"])
    if card is None:
        return f"gpu {record['gpu']}"
    fmt = weights(record, found)
    if fmt is None:
        return f"weights {record['weights']}"
    engine, generation = engine_of(record)
    count, tp, pp = record.get("gpus") or 1, record.get("tp"), record.get("pp") or 1
    data, ep = record.get("attention_dp") or 1, record.get("moe_ep") or record.get("ep") or 1
    if tp is None:
        tp = count // pp
    if tp * pp * data < count and ep > 1:
        tp = count // (pp * data)
    if tp * pp * data > count:
        data = max(1, count // (tp * pp))
    if card.dies > 1 and "source counts" in record["gpu"]:
        # Cards, of which an engine sees every die: 70B parameters in 16 bits do not lie on two dies.
        count, tp = count * card.dies, tp * card.dies
    name = record.get("kv_dtype") or ""
    kv = cache_format("fp8") if "fp8" in name.lower() else cache_format("q8_0") if "q8_0" in name else plain(BF16)
    if not name and fmt in ("fp8", "nvfp4") and engine in ("tensorrt-llm", "vllm"):
        # TensorRT-LLM's performance page: FP8 checkpoints set it. vLLM: as those runs are started, and as many requests need.
        kv = cache_format("fp8")
    figures = {key: value for key, value in record["metric"].items() if key in METRICS}
    grade = {"A": 1.0, "B": 0.7, "C": 0.35}[record.get("grade", "C")]
    return Point(
        id=record["id"], source=re.split(r" row|@", record["source"])[0], engine=engine, generation=generation, gpu=card.name, weights=fmt,
        group=f"{record['model']}|{record['gpu']}|{record['engine']}", spec=found, card=card, gpus=count, tensor=tp, pipeline=pp, data=data,
        expert=ep > 1, fmt=fmt, kv=kv, input=record.get("input_len"), output=record.get("output_len"), concurrency=record.get("concurrency"),
        before=record.get("prefix_in_kv") or 0, saturated=record.get("load") == "saturated", figures=figures, trust=grade,
    )  # fmt: skip


_SPECS: dict[str, ModelSpec | None] = {}


def model(name: str, note: str = "") -> ModelSpec | None:
    """The model of a record, in the catalogue; `note` says its parameters ("46.7B total / 12.9B active MoE")."""
    if name not in _SPECS:
        _SPECS[name] = _model(name) or _alike(name, note)
    return _SPECS[name]


def _model(name: str) -> ModelSpec | None:
    short = name.rpartition("/")[2]
    bare = short.lower()
    tries = [name, short, bare]
    while True:
        tries += [
            MODELS.get(bare),
            bare,
            bare + "-instruct",
            bare + "-it",
            bare + "-hf",
            bare.removesuffix("-instruct"),
        ]
        cut = _TAIL.sub("", bare)
        if cut == bare:
            break
        bare = cut
    for candidate in tries:
        if candidate is None:
            continue
        try:
            return build_spec(resolve(candidate, source="catalogue"))
        except KvctlError:
            continue
    return None


_PARAMETERS = re.compile(r"([\d.]+)\s*([BTM])")


def _alike(name: str, note: str) -> ModelSpec | None:
    """A model of as many parameters, within 6%, whose name is most like it: fine-tuned ones have the shape of their base."""
    import difflib

    from kvctl.sources import catalogue

    counts = [float(number) * {"T": 1e12, "B": 1e9, "M": 1e6}[unit] for number, unit in _PARAMETERS.findall(note)]
    size = re.search(r"(?<![a-z\d.])(\d+(?:\.\d+)?)b(?![a-z])", name.lower())
    total = counts[0] if counts else float(size[1]) * 1e9 if size else None
    if total is None:
        return None
    mixed = "moe" in note.lower() or "active" in note or re.search(r"-a\d+(\.\d+)?b", name.lower()) is not None
    near: list[tuple[float, str]] = []
    short = name.rpartition("/")[2].lower()
    for row in catalogue.matching([""]):
        other, own = row["id"], row["parameters"]
        if own and "incomplete" not in row and abs(own / total - 1) < 0.06:
            near.append((-difflib.SequenceMatcher(None, short, other.rpartition("/")[2].lower()).ratio(), other))
    for _, other in sorted(near):
        found = _model(other)
        if found is not None and bool(_experts(found)) == mixed:
            return found
    return None


def _experts(spec: ModelSpec) -> int:
    from kvctl.speed.work import work_of

    return work_of(spec, Formats(BF16, plain(BF16), plain(BF16))).experts


def gpu(name: str) -> Any:
    """The card of a record."""
    if name == "A100 (memory size not stated)":
        return find("A100 40GB SXM")[0]  # of Polaris, a machine with that card
    plain_name = re.sub(r"\(.*?\)", "", name).strip()
    tries = [
        name,
        plain_name,
        re.sub(r"\s\d+\s?GB.*", "", plain_name),
        re.sub(r"\s\d+-Core GPU", "", re.sub(r"\s\d+\s?GB.*", "", plain_name), flags=re.I),
    ]
    tries.append(re.sub(r"\s\d+-core", "", tries[-1], flags=re.I))
    tries += [f"Apple {text}" for text in tries[-1:]]
    tries += [text.removeprefix("AMD ") for text in tries]
    tries += [re.sub(r"^(RTX|GTX)", r"GeForce \1", text) for text in tries]
    tries += [text.replace(" Server", "") for text in tries]
    for text in tries:
        found = find(text)
        if found:
            size = re.search(r"(\d+)\s?GB", name)
            if size and len(found) > 1:
                return min(found, key=lambda card: abs(card.nominal_gb - int(size[1])))
            return found[0]
    words = plain_name.lower()
    return next((card for card in cards() if card.name.lower() in words), None)


def weights(record: dict[str, Any], spec: ModelSpec) -> str | None:
    """A format's name as kvctl.speed.machine has it."""
    text = record["weights"].lower()
    if "not stated" in text and "bf16" in text:
        return "bf16"
    bpw = re.search(r"exl2 ([\d.]+)", text)
    if bpw:
        return f"exl2-{bpw[1]}"
    if "mlx" in text:
        return "mlx-mxfp4" if "mxfp4" in text else "mlx-4bit"
    if "gptq" in text:
        return "gptq-int8" if "8" in text.replace("q8", "") and "4" not in text else "gptq"
    if spec.model_type == "gpt_oss":
        return "mxfp4"
    for name in sorted(GGUF_BITS, key=len, reverse=True):
        if name in text:
            return name
    for name, near in (("q4_k", "q4_k_m"), ("q5_k", "q5_k_m"), ("q6_k", "q6_k"), ("q4_", "q4_k_s"), ("q5_", "q5_k_m"), ("iq4", "iq4_xs"),
                       ("q3_", "q3_k_m"), ("q8", "q8_0"), ("mxfp4", "mxfp4")):  # fmt: skip
        if name in text:
            return near  # of about as many bits
    if "gguf" in text and "16" in text:
        return "f16"
    if "awq" in text:
        return "awq"
    if "nvfp4" in text or text.startswith("fp4"):
        return "nvfp4"
    if "int4" in text:
        return "w4a16"
    if "fp8" in text:
        return "fp8"
    if "int8" in text:
        return "w8a8"
    if "16" in text or "not stated" in text:
        return "bf16"
    return None


def engine_of(record: dict[str, Any]) -> tuple[str, str]:
    """kvctl's name of the engine, and "old" for those whose performance is of another age."""
    name = {
        "ollama": "llama.cpp",
        "TensorRT-LLM": "tensorrt-llm",
        "NIM (TensorRT-LLM)": "tensorrt-llm",
        "vLLM": "vllm",
        "SGLang": "sglang",
    }.get(record["engine"], record["engine"].lower())
    version = str(record.get("engine_version") or "")
    number = re.match(r"(\d+)\.(\d+)", version)
    minor = (int(number[1]), int(number[2])) if number else None
    old = False
    if name == "vllm":
        old = minor < (0, 8) if minor else "2024" in version or "argonne" in record["source"]
    elif name == "tensorrt-llm":
        old = (minor < (1, 0) and minor[0] == 0) if minor else "argonne" in record["source"]
        old = old and record["engine"] != "NIM (TensorRT-LLM)"
    elif name == "sglang":
        old = minor is not None and minor < (0, 5)
    elif name == "llama.cpp":
        old = "2024" in version
    return name, "old" if old else ""


# -- from a point to demands ------------------------------------------------------------------------------

MOST = 2048
"""Requests in a batch, where memory would hold more."""


FIGURES = {"token": "tpot", "between": "tpot", "first": "ttft", "prompt": "prefill", "prompt ms": "prefill", "batch": "rate",
           "served": "rate", "full": "rate"}  # fmt: skip
"""Kinds of observation → kinds of figure that ranges are kept for."""


class Observation(Record):
    """One figure of a point, with what its prediction needs."""

    point: Point
    metric: str
    value: float
    kind: str
    """Which formula: token, prompt, batch, first, between, served, full."""
    step: Any
    prompt: Any
    others: float
    output: float
    requests: float
    groups: float
    """Groups of ranks that serve side by side."""
    facts: Any

    @property
    def several(self) -> bool:
        """Whether it says how a step grows with the requests in it."""
        if self.kind in ("prompt", "prompt ms"):
            return False
        return self.point.saturated or (self.point.concurrency or 1) / self.point.data > FEW


def setup(point: Point) -> Setup:
    """The point as kvctl.speed takes it."""
    large = family(point.card) == "blackwell" and point.gpus > 8  # racks whose GPUs are all joined by NVLink
    return Setup(point.spec, point.engine, point.card, point.fmt, Formats(BF16, point.kv, point.kv), point.tensor, point.pipeline, point.data,
                 point.expert, node=72 if large else 8, old=bool(point.generation))  # fmt: skip


def capacity(point: Point, laid: Any, tokens: float) -> float:
    """Requests of so many tokens that the memory of the ranks holds; roughly, for what a source does not say."""
    from kvctl.speed.roofline import step

    held = point.card.device_mib * 2**20 * 0.9 - 2.5e9
    demand = step(laid, 1, tokens)
    work, (dense, each, head) = laid.work, laid.bytes_of
    stored = (
        work.dense * dense + 2 * work.head * head
    ) / laid.tensor / laid.pipeline + work.experts * work.expert * each / laid.spread / laid.pipeline
    one = demand.cache * laid.peaks.bandwidth / laid.pipeline
    return max((held - stored) / max(one, 1.0), 0.5) * laid.data


def observations(point: Point) -> list[Observation] | str:
    """Its figures; or why there are none."""
    from kvctl.speed.roofline import prompt, step

    try:
        laid = layout_of(setup(point))
    except KvctlError as error:
        return error.message
    known = facts_of(setup(point), laid)
    chunk = CHUNKS.get(known["E"], 8192)
    if point.engine == "llama.cpp" and "dgx-spark" in point.source:
        chunk = 2048
    i, o, c = point.input, point.output, point.concurrency
    found: list[Observation] = []

    def add(
        metric: str,
        value: float,
        kind: str,
        demand: Any,
        asked: Any,
        others: float = 0.0,
        output: float = 1.0,
        requests: float = 1.0,
        groups: float = 1.0,
    ) -> None:
        found.append(Observation(point, metric, value, kind, demand, asked, others, output, requests, groups, known))

    for metric, value in point.figures.items():
        if value is None or value <= 0:
            continue
        if metric in ("decode_tok_s_request", "decode_tok_s_total"):
            batch = c or 1
            add(
                metric,
                value,
                "token",
                step(laid, batch, (i or 0) + (o or 32) / 2),
                prompt(laid, 1),
                requests=1 if metric.endswith("request") else batch,
            )
            continue
        if metric == "prefill_tok_s":
            add(
                metric,
                value,
                "prompt",
                step(laid, 1, 1),
                prompt(laid, i, c or 1, chunk, before=point.before, pipelined=True),
                requests=(c or 1) * i,
            )
            continue
        if i is None or o is None:
            continue
        length = i + o / 2
        room = capacity(point, laid, i + o if point.engine == "tensorrt-llm" else length)
        if room < laid.data:
            room = float(MOST * laid.data)  # a record that contradicts itself: what did not fit was served
        if point.saturated:
            held = min(room, MOST * laid.data)
            mine = max(held / laid.data, 1.0)
            add(
                metric,
                value,
                "full",
                step(laid, held, length),
                prompt(laid, i, mine, chunk, pipelined=True),
                requests=mine,
                output=o,
                groups=laid.data * o,
            )
            continue
        if c is None:
            continue
        held = min(c, max(room, 1.0))
        mine = max(held / laid.data, 1.0)
        demand = step(laid, held, length)
        if metric in ("e2e_latency_s", "total_tok_s", "speed_in_plus_out_tok_s") or (
            metric == "output_tok_s_total" and "ttft_ms" not in point.figures and "QwenLM" in point.source
        ):
            add(
                metric,
                value,
                "batch",
                demand,
                prompt(laid, i, mine, chunk, pipelined=True),
                output=o,
                requests=c / held,
                groups={"e2e_latency_s": 0.0, "output_tok_s_total": c * o}.get(metric, float(c * (i + o))),
            )
        elif metric == "ttft_ms":
            if o == 1:
                add(metric, value, "prompt ms", demand, prompt(laid, i, mine, chunk))
            else:
                add(
                    metric,
                    value,
                    "first",
                    demand,
                    prompt(laid, i, 1, chunk),
                    others=mine - 1,
                    output=o,
                    requests=c / held,
                )
        elif metric in ("tpot_ms", "itl_ms"):
            add(metric, value, "between", demand, prompt(laid, i, 1, chunk), others=mine - 1, output=o)
        elif metric == "output_tok_s_total":
            add(metric, value, "served", demand, prompt(laid, i, 1, chunk), others=mine - 1, output=o, groups=held * o)
    return found


def predicted(kind: Any, d: Any, p: Any, e: Any, others: Any, output: Any, requests: Any, groups: Any) -> Any:
    """The figure of an observation of one kind; numbers or arrays."""
    from kvctl.speed.load import batch, full, served
    from kvctl.speed.roofline import prompt_seconds, step_seconds

    if kind == "token":
        return requests / step_seconds(d, e)
    if kind == "prompt":
        return requests / prompt_seconds(p, e)
    if kind == "prompt ms":
        return 1000 * prompt_seconds(p, e)
    if kind == "full":
        return full(d, p, e, requests, output) * groups
    if kind == "batch":
        seconds = batch(d, p, e, output) * requests
        return seconds + (groups > 0) * (groups / seconds - seconds)
    first, between = served(d, p, e, others, output)
    if kind == "first":
        # Those that memory does not hold wait until others end.
        return 1000 * (first + (requests - 1) * (first + output * between))
    if kind == "between":
        return 1000 * between
    return groups / (first + output * between)


def load(path: str) -> tuple[list[Observation], dict[str, int]]:
    """Every figure of a file of records (a JSON list, or JSON lines), and why others were left out, with how many."""
    import json
    from pathlib import Path

    text = Path(path).read_text()
    records = (
        json.loads(text)
        if text.lstrip().startswith("[")
        else [json.loads(line) for line in text.splitlines() if line.strip()]
    )
    named = next((record["sources"] for record in records if "sources" in record), {})
    found: list[Observation] = []
    left: dict[str, int] = {}
    for record in records:
        if "sources" in record:
            continue
        point = read({**record, "source": named.get(record.get("source"), record.get("source") or "")})
        mine = point if isinstance(point, str) else observations(point)
        if isinstance(mine, str):
            left[mine] = left.get(mine, 0) + 1
        else:
            found += mine
    return found, left

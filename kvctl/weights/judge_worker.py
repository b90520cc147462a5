"""The process that judges one checkpoint (kvctl.weights.judge starts it with `python -m`)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.sources import jsonfile
from kvctl.units import format_bytes, plural
from kvctl.weights.scoring import Reference, leave, score

if TYPE_CHECKING:
    import torch

Tell = Callable[[Mapping[str, Any]], None]

_LIBRARIES = 600 * 2**20
"""What Python with torch and transformers takes, with some to spare."""


def work(job: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Load, score and generate."""
    from kvctl.measure.hush import quiet

    exam, path = job["exam"], Path(job["path"])
    with quiet():
        import torch

        from kvctl.measure.faults import blaming_weights
        from kvctl.measure.memory import HighWater
        from kvctl.weights.judge import scores_to_dict
        from kvctl.weights.judge_caches import Caches

        mark = HighWater()
        tokenizer = _tokenizer(path)
        ids = _windows(tokenizer, exam)
        prompt = _encoded(tokenizer, exam["prompt"])
        reference = None if job.get("against") is None else Reference(Path(job["against"]), ids, prompt)
        leave_in = None if job.get("leave") is None else Path(job["leave"])
        tell({"stage": "load"})
        began = time.monotonic()
        model, by, notes = _load(path, exam)
        taken = time.monotonic() - began
        _check_vocabulary(model, ids, prompt)
        weights = _weights_bytes(model)

        def scoring(number: int, stage: str = "score") -> None:
            tell({"stage": stage, "done": number, "of": len(ids)})

        with torch.inference_mode(), blaming_weights(model):
            began = time.monotonic()
            caches = Caches(model, path, ids, exam) if exam["caches"] else None
            if caches is None:
                found = score(_logits(model, ids, exam, scoring), ids, reference=reference, leave_in=leave_in)
            else:
                found = caches.plain(scoring, reference, leave_in)
            rate = sum(map(len, ids)) / (time.monotonic() - began)
            tell({"stage": "generate"})
            generated, speed = _generate(model, prompt, exam)
            if leave_in is not None:
                leave(leave_in, ids, prompt, generated, found)
            cells = []
            if caches is not None:
                against = reference or Reference(Path(job["leave"]), ids, prompt)
                for name in ("plain", *exam["caches"]):
                    cells.append(
                        caches.cell(
                            name, found if name == "plain" else None, partial(scoring, stage=f"{name}: score"), against
                        )
                    )
        peak = torch.cuda.max_memory_allocated(exam["device"]) if exam["device"].startswith("cuda") else mark.read()
    return {
        "by": by,
        "dtype": found.dtype,
        "tokens": found.tokens,
        "perplexity": found.perplexity,
        "scores": None if found.scores is None else scores_to_dict(found.scores),
        "generated": generated,
        "text": tokenizer.decode(generated),
        "same": None if reference is None else _same(generated, reference.generated),
        "load_seconds": taken,
        "score_tokens_per_second": rate,
        "tokens_per_second": speed,
        "weights_bytes": weights,
        "peak_bytes": peak,
        "caches": cells,
        "notes": notes,
    }


# -- tokens ---------------------------------------------------------------------------------------------


def _tokenizer(path: Path) -> Any:
    import transformers

    from kvctl.weights.from_gguf import is_gguf

    where = jsonfile.plain(str(path))
    given = {"gguf_file": path.name} if is_gguf(path) else {}
    try:
        return transformers.AutoTokenizer.from_pretrained(
            str(path.parent if given else path), local_files_only=True, trust_remote_code=False, **given
        )
    except Exception as error:
        raise ConfigError(f"{where}: no tokenizer can be loaded from it",
                          hint="copy the model's tokenizer files there") from error  # fmt: skip


def _encoded(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])


def _windows(tokenizer: Any, exam: Mapping[str, Any]) -> list[list[int]]:
    """The beginning of the text in windows that do not overlap."""
    from kvctl import texts
    from kvctl.weights import calibration

    text = texts.read(texts.samples()[0]) if exam["text"] is None else calibration.read(Path(exam["text"]))
    ids, length = _encoded(tokenizer, text), exam["length"]
    if len(ids) < exam["windows"] * length:
        raise UsageError(f"the text has {plural(len(ids), 'token')}: {len(ids) // length} of {exam['windows']} windows of {length:,}",
                         hint="a longer text, or fewer or shorter windows")  # fmt: skip
    return [ids[at : at + length] for at in range(0, exam["windows"] * length, length)]


def _check_vocabulary(model: Any, ids: list[list[int]], prompt: list[int]) -> None:
    rows = int(model.get_input_embeddings().weight.shape[0])
    largest = max(max(map(max, ids)), max(prompt, default=0))
    if largest >= rows:
        raise ConfigError(f"the tokenizer has token {largest:,}, the model {rows:,} of them",
                          hint="the tokenizer is another model's: copy this model's there")  # fmt: skip


# -- loading --------------------------------------------------------------------------------------------


def _load(path: Path, exam: Mapping[str, Any]) -> tuple[Any, str, list[str]]:
    """The model, what runs it, and what is to be said of it."""
    import torch

    from kvctl.quantization import facts_of
    from kvctl.weights.from_gguf import is_gguf

    dtype = "auto" if exam["dtype"] is None else getattr(torch, exam["dtype"])
    if is_gguf(path):
        return (
            _transformers(path.parent, exam, torch.bfloat16 if dtype == "auto" else dtype, path.name),
            "transformers",
            [],
        )
    _check_room(path, exam, 1.0)
    facts = facts_of(jsonfile.read_file(path / "config.json"))
    if facts is not None and facts.get("quant_method") in ("gptq", "compressed-tensors"):
        return _decoded(path, exam, dtype, facts)
    if facts is None or facts.get("quant_method") != "awq":
        model = _transformers(path, exam, dtype)
        return model, "transformers", _plain_kernels(model, exam["device"])
    return _awq(path, exam, dtype)


def _plain_kernels(model: Any, device: str) -> list[str]:
    """bitsandbytes 0.50's kernel for CPUs with AVX512-BF16 fails on shapes that its blocks do not divide: not there."""
    from kvctl.weights.bnb_places import divided

    odd = [module for module in model.modules() if getattr(module, "support_avx512bf16_for_cpu", False)
           and not divided(module.out_features, module.in_features)]  # fmt: skip
    if device != "cpu" or not odd:
        return []
    for module in odd:
        module.support_avx512bf16_for_cpu = False
    return [
        f"{plural(len(odd), 'layer')} ran without bitsandbytes' kernel for AVX512-BF16, which fails on their shapes"
    ]


def _awq(path: Path, exam: Mapping[str, Any], dtype: Any) -> tuple[Any, str, list[str]]:
    """Through gptqmodel's kernels, without which transformers does not run AWQ; else what the packed weights stand for."""
    from importlib.util import find_spec

    import torch

    from kvctl.measure.faults import first_line
    from kvctl.measure.memory import is_out_of_memory
    from kvctl.weights import verify

    notes = []
    if exam["kernels"] and find_spec("gptqmodel") is not None:
        try:
            return _transformers(path, exam, dtype), "transformers + gptqmodel", []
        except Exception as error:
            if is_out_of_memory(error):
                raise
            said = error.message if isinstance(error, KvctlError) else first_line(error)
            notes.append(f"gptqmodel is installed and did not load it: {said}"[:300])
    _check_room(path, exam, 4.0)
    stored = str(jsonfile.read_file(path / "config.json").get("torch_dtype") or "float16")
    wanted = getattr(torch, stored, torch.float16) if dtype == "auto" else dtype
    model = verify.load_dequantized(path, wanted).to(exam["device"]).eval()
    return model, "kvctl's reference dequantizer", notes


def _decoded(path: Path, exam: Mapping[str, Any], dtype: Any, facts: Mapping[str, Any]) -> tuple[Any, str, list[str]]:
    """What the packed weights stand for, by kvctl's own readers: transformers needs packages for each of these formats."""
    import torch

    from kvctl.weights.backends.packed import decoded
    from kvctl.weights.verify import plain_model

    _check_room(path, exam, 4.0)
    stored = str(jsonfile.read_file(path / "config.json").get("torch_dtype") or "bfloat16")
    wanted = getattr(torch, stored, torch.bfloat16) if dtype == "auto" else dtype
    model = plain_model(path, decoded(path, facts), wanted).to(exam["device"]).eval()
    return (
        model,
        "kvctl's reference dequantizer",
        ["weights alone: activations are not rounded as engines may round them"],
    )


def _check_room(path: Path, exam: Mapping[str, Any], factor: float) -> None:
    """Refuses a model that does not fit, before anything of it is loaded."""
    if exam["device"] != "cpu":
        return
    from kvctl.hardware.host import host_device

    size = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    needed, free = int(size * factor) + _LIBRARIES, host_device().available_bytes
    if needed > free:
        raise KvctlError(f"to run {jsonfile.plain(path.name)} takes {format_bytes(needed)} of memory at least, and "
                         f"{format_bytes(free)} are free", hint="a machine with more memory")  # fmt: skip


def _transformers(folder: Path, exam: Mapping[str, Any], dtype: Any, gguf_file: str | None = None) -> Any:
    import transformers

    from kvctl.measure.checkpoint import check_folder, check_gguf
    from kvctl.measure.faults import first_line
    from kvctl.measure.memory import is_out_of_memory
    from kvctl.measure.published import no_bars

    given: dict[str, Any] = {}
    if gguf_file is None:
        check_folder(folder)
    else:
        check_gguf(folder / gguf_file)
        given = {"gguf_file": gguf_file, "quantization_config": transformers.GgufConfig(dequantize=True)}
    where = jsonfile.plain(str(folder if gguf_file is None else folder / gguf_file))
    try:
        with no_bars():
            model, info = transformers.AutoModelForCausalLM.from_pretrained(
                str(folder), dtype=dtype, device_map=exam["device"], local_files_only=True, trust_remote_code=False,
                output_loading_info=True, **given,
            )  # fmt: skip
    except Exception as error:
        if is_out_of_memory(error):
            raise
        hint = "install what is missing" if isinstance(error, ImportError) else None
        raise SourceError(f"{where}: transformers cannot load it: {first_line(error)}", hint=hint) from None
    lost = sorted(map(str, info.get("missing_keys") or ()))
    if lost:
        more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
        raise SourceError(f"{where}: the checkpoint lacks {lost[0][:120]}{more}", hint="quantize it again")
    return model.eval()


def _weights_bytes(model: Any) -> int:
    """Parameters and buffers, and the scales that bitsandbytes keeps beside its tensors."""
    from kvctl.measure.loaded import weights_bytes

    out = weights_bytes(model)
    for parameter in model.parameters():
        state = getattr(parameter, "quant_state", None)
        nested = getattr(state, "state2", None)
        parts = [getattr(parameter, "SCB", None), *(getattr(state, name, None) for name in ("absmax", "code", "offset")),
                 *(getattr(nested, name, None) for name in ("absmax", "code"))]  # fmt: skip
        out += sum(part.numel() * part.element_size() for part in parts if part is not None)
    return out


# -- scoring --------------------------------------------------------------------------------------------


def _logits(
    model: Any, ids: list[list[int]], exam: Mapping[str, Any], tell: Callable[[int], None]
) -> Iterator[torch.Tensor]:
    """Of each window in one pass without a cache, for every token but the first."""
    import torch

    for number, window in enumerate(ids):
        tell(number)
        given = torch.tensor([window], device=exam["device"])
        yield model(input_ids=given, use_cache=False).logits[0, :-1].cpu()
    tell(len(ids))


# -- generating -----------------------------------------------------------------------------------------


class _Clock:
    """What transformers tells of each token as it comes."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: Any) -> None:
        self.times.append(time.monotonic())

    def end(self) -> None:
        pass


def _generate(model: Any, prompt: list[int], exam: Mapping[str, Any]) -> tuple[list[int], float | None]:
    """The likeliest tokens after the prompt, and how many a second came after the first of them."""
    import torch

    room = exam["new_tokens"] if exam["positions"] is None else exam["positions"] - len(prompt)
    count = min(exam["new_tokens"], room)
    if count < 1 or not prompt:
        return [], None
    clock = _Clock()
    given = torch.tensor([prompt], device=exam["device"])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, num_beams=1, max_new_tokens=count,
        streamer=clock, pad_token_id=0, use_cache=True,
    )  # fmt: skip
    ids = [int(one) for one in out[0, len(prompt) :]]
    times = clock.times[1:]  # the first is the prompt
    return ids, (len(times) - 1) / (times[-1] - times[0]) if len(times) > 1 else None


def _same(one: list[int], other: list[int]) -> int:
    count = 0
    for left, right in zip(one, other, strict=False):
        if left != right:
            break
        count += 1
    return count


if __name__ == "__main__":
    from kvctl.weights.children import serve

    serve(work)

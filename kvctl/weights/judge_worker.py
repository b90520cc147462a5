"""The process that judges one checkpoint (kvctl.weights.judge starts it with `python -m`)."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError, SourceError, UsageError
from kvctl.sources import jsonfile
from kvctl.units import format_bytes, plural

if TYPE_CHECKING:
    import torch

    from kvctl.measure.quality import Scores

Tell = Callable[[Mapping[str, Any]], None]

_ROWS = 64
"""Tokens whose distributions are compared at a time, in float32."""
_FACTS, _LOGITS = "reference.json", "logits.bin"
_LIBRARIES = 600 * 2**20
"""What Python with torch and transformers takes, with some to spare."""


def work(job: Mapping[str, Any], tell: Tell) -> Mapping[str, Any]:
    """Load, score and generate."""
    from kvctl.measure.hush import quiet

    exam, path = job["exam"], Path(job["path"])
    with quiet():
        import torch

        from kvctl.measure.memory import HighWater

        mark = HighWater()
        tokenizer = _tokenizer(path)
        ids = _windows(tokenizer, exam)
        prompt = _encoded(tokenizer, exam["prompt"])
        reference = None if job.get("against") is None else _Reference(Path(job["against"]), exam, ids, prompt)
        tell({"stage": "load"})
        began = time.monotonic()
        model, by, notes = _load(path, exam)
        taken = time.monotonic() - began
        _check_vocabulary(model, ids, prompt)
        weights = _weights_bytes(model)
        with torch.inference_mode():
            began = time.monotonic()
            found = _score(model, ids, exam, reference, job.get("leave"), tell)
            rate = sum(map(len, ids)) / (time.monotonic() - began)
            tell({"stage": "generate"})
            generated, speed = _generate(model, prompt, exam)
        if job.get("leave") is not None:
            facts = {
                "ids": ids,
                "prompt": prompt,
                "generated": generated,
                "dtype": found["dtype"],
                "vocabulary": found["rows"],
            }
            (Path(job["leave"]) / _FACTS).write_text(json.dumps(facts), encoding="utf-8")
        peak = torch.cuda.max_memory_allocated(exam["device"]) if exam["device"].startswith("cuda") else mark.read()
    return {
        "by": by,
        "dtype": found["dtype"],
        "tokens": found["tokens"],
        "perplexity": found["perplexity"],
        "scores": found["scores"],
        "generated": generated,
        "text": tokenizer.decode(generated),
        "same": None if reference is None else _same(generated, reference.generated),
        "load_seconds": taken,
        "score_tokens_per_second": rate,
        "tokens_per_second": speed,
        "weights_bytes": weights,
        "peak_bytes": peak,
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


class _Reference:
    """What the original left: its distributions are read some rows at a time."""

    def __init__(self, folder: Path, exam: Mapping[str, Any], ids: list[list[int]], prompt: list[int]) -> None:
        facts = jsonfile.read_file(folder / _FACTS, limit=10**9)
        if facts["ids"] != ids or facts["prompt"] != prompt:
            raise ConfigError("its tokenizer makes other tokens of the text than the original's",
                              hint="copy the original's tokenizer files there")  # fmt: skip
        self.generated: list[int] = facts["generated"]
        self.dtype, self.vocabulary, self.path = facts["dtype"], facts["vocabulary"], folder / _LOGITS

    @contextmanager
    def rows(self) -> Iterator[Callable[[int], torch.Tensor]]:
        """Reads so many of the next rows."""
        import torch

        dtype = getattr(torch, self.dtype)
        with self.path.open("rb") as file:

            def read(count: int) -> torch.Tensor:
                size = count * self.vocabulary * dtype.itemsize
                data = bytearray(file.read(size))
                if len(data) != size:
                    raise KvctlError("what the original left is cut short", hint="judge the original again")
                return torch.frombuffer(data, dtype=dtype).view(count, self.vocabulary)

            yield read


def _score(
    model: Any,
    ids: list[list[int]],
    exam: Mapping[str, Any],
    reference: _Reference | None,
    leave: str | None,
    tell: Tell,
) -> dict[str, Any]:
    """Every token of every window but its first; what the original gives is left, or compared with."""
    import contextlib

    import torch

    from kvctl.measure.quality import Scores
    from kvctl.weights.judge import scores_to_dict

    scores, losses, rows, dtype = Scores(), [], 0, ""
    with contextlib.ExitStack() as stack:
        read = None if reference is None else stack.enter_context(reference.rows())
        out = None if leave is None else stack.enter_context((Path(leave) / _LOGITS).open("wb"))
        for number, window in enumerate(ids):
            tell({"stage": "score", "done": number, "of": len(ids)})
            given = torch.tensor([window], device=exam["device"])
            logits = model(input_ids=given, use_cache=False).logits[0, :-1].cpu()
            rows, dtype = logits.shape[1], str(logits.dtype).removeprefix("torch.")
            if reference is not None and rows != reference.vocabulary:
                raise ConfigError(f"it gives {rows:,} tokens' probabilities, and the original {reference.vocabulary:,}",
                                  hint="it is another model")  # fmt: skip
            if out is not None and number == 0:
                _check_disk(Path(str(leave)), logits, len(ids))
            for at in range(0, len(logits), _ROWS):
                part = logits[at : at + _ROWS]
                true = torch.tensor(window[at + 1 : at + 1 + len(part)])
                if out is not None:
                    out.write(memoryview(part.contiguous().view(-1).view(torch.uint8).numpy()))
                losses += _compare(part, true, None if read is None else read(len(part)), number, scores)
        tell({"stage": "score", "done": len(ids), "of": len(ids)})
    mean = sum(losses) / len(losses)
    return {
        "tokens": len(losses), "perplexity": float(torch.tensor(mean, dtype=torch.float64).exp()), "rows": rows,
        "dtype": dtype, "scores": None if reference is None else scores_to_dict(scores),
    }  # fmt: skip


def _compare(
    part: torch.Tensor, true: torch.Tensor, plain: torch.Tensor | None, window: int, scores: Scores
) -> list[float]:
    """Losses in nats of these rows, which are added to the scores where there is something to compare with."""
    import torch

    own = part.float().log_softmax(-1)
    if not bool(torch.isfinite(own.amax())):
        raise KvctlError("the model makes numbers that are not finite", hint="another dtype may hold them: bfloat16")
    right = own.gather(1, true[:, None])[:, 0]
    if plain is not None:
        first = plain.float().log_softmax(-1)
        kl = (first.exp() * (first - own)).nan_to_num(nan=0.0).sum(-1)  # 0 × infinity: what neither may say
        agrees = first.argmax(-1) == own.argmax(-1)
        of_plain = first.gather(1, true[:, None])[:, 0]
        for row in zip(of_plain.tolist(), right.tolist(), kl.tolist(), agrees.tolist(), strict=True):
            scores.add(window, *row)
    return [-value for value in right.tolist()]


def _check_disk(folder: Path, logits: torch.Tensor, windows: int) -> None:
    needed, free = logits.numel() * logits.element_size() * windows, shutil.disk_usage(folder).free
    if needed > free:
        raise KvctlError(f"the original's distributions take {format_bytes(needed)} on the disk, and {format_bytes(free)} are free",
                         hint="fewer or shorter windows")  # fmt: skip


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

    if not exam["new_tokens"] or not prompt:
        return [], None
    clock = _Clock()
    given = torch.tensor([prompt], device=exam["device"])
    out = model.generate(
        given, attention_mask=torch.ones_like(given), do_sample=False, num_beams=1, max_new_tokens=exam["new_tokens"],
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

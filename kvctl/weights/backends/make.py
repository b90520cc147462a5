"""A model's folder in, a checkpoint that a backend made out: checked, and there whole or not at all."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, SourceError, UsageError
from kvctl.measure.faults import first_line
from kvctl.measure.hush import quiet
from kvctl.record import Record
from kvctl.sources import jsonfile, safetensors
from kvctl.weights import calibration, tensorfile, verify
from kvctl.weights.awq import layout as awq_layout
from kvctl.weights.awq.search import nearest as awq_nearest
from kvctl.weights.awq.structure import architecture, sites
from kvctl.weights.backends import environments, process
from kvctl.weights.backends.compare import Compared, compare, refuse_worse
from kvctl.weights.backends.packed import LAYOUTS, Decoded
from kvctl.weights.backends.process import Progress
from kvctl.weights.backends.table import Backend, backend
from kvctl.weights.checkpoint import Work, check_target, discard, open_source
from kvctl.weights.skeleton import Skeleton
from kvctl.weights.tensorfile import Source

if TYPE_CHECKING:
    import torch

_GROUPED = ("awq", "gptq")


class Settings(Record):
    """What is asked of a backend."""

    backend: str
    format: str
    group: int | None = None
    """Inputs that share a scale (awq, gptq); None: the largest of 128, 64 and 32 that divides all."""
    samples: int = 64
    length: int = 512
    seed: int = 0
    calibration: calibration.Wanted = calibration.Wanted()
    """What samples are drawn from, where none are given."""
    batch: int = 4
    silence: float = process.SILENCE_S
    """Seconds without a message until the worker is given up."""


class Made(Record):
    """A checkpoint, and what was done for it."""

    folder: Path
    files: tuple[Path, ...]
    backend: str
    format: str
    group: int | None
    versions: Mapping[str, str]
    facts: Mapping[str, Any]
    compared: Compared
    packed: int
    """Linear layers."""


def make(
    source: Path,
    target: Path,
    settings: Settings,
    *,
    samples: calibration.Samples | None = None,
    progress: Callable[[Progress], None] = lambda step: None,
    force: bool = False,
    finish: Callable[[Path, Made], Mapping[str, str]] | None = None,
) -> Made:
    """Let a backend quantize the model in folder `source`, and check what it made; its environment has to be there.
    `samples`: what it is calibrated on, where that was drawn already. `finish`: see `Work.place`.

    Raises:
        UsageError: settings that cannot be, a target that is there, a backend that is not installed.
        ConfigError: an architecture or shapes that it is not for; a model that is quantized already.
        SourceError: weights that are missing; a result that is not what its format says.
        KvctlError: the backend failed; its result is worse than rounding to nearest; the disk is full.

    """
    one = backend(settings.backend)
    one.format(settings.format)
    found = environments.state(one.name)
    if found.status != "installed" or found.folder is None:
        raise UsageError(f"{one.name} is {found.status}" + (f": {found.why}" if found.why else ""),
                         hint=None if found.status == "cannot" else "it is installed on first use, after asking")  # fmt: skip
    check_target(target, source, force)
    with environments.used(found.folder), quiet():
        job = _Job(source, settings, samples)
        work = Work(target, "backend", {}, resume=False)
        try:
            out = job.ask(one, found.folder, work.folder, progress)
            compared, packed = job.judge(out, progress)
            progress(Progress("files", 0, 1))
            config = job.config_of(out)
            made = Made(
                target,
                (),
                one.name,
                settings.format,
                job.group,
                job.answer.versions,
                job.answer.facts,
                compared,
                packed,
            )
            last = None if finish is None else lambda folder: finish(folder, made)
            files = work.publish(source, config, job.pieces(out, work.folder), last)
            progress(Progress("files", 1, 1))
        except BaseException:
            discard(target)
            work.close()
            raise
    return made.replace(files=files)


class _Job:
    """A source, what its linear layers are, and the tokens that it is calibrated on."""

    def __init__(self, source: Path, settings: Settings, samples: calibration.Samples | None) -> None:
        self.folder, self.settings = source, settings
        self.source, self.config = open_source(source)
        known = architecture(self.config)
        self.skeleton = Skeleton(_configuration(source), self.source, known)
        self.slots = [[slot for site in sites(layer, known, self.skeleton.config) for slot in site.slots]
                      for layer in self.skeleton.layers]  # fmt: skip
        self.linear = {f"{self.skeleton.name_of(index)}.{slot.name}": tuple(slot.of(self.skeleton.layers[index]).shape)
                       for index, slots in enumerate(self.slots) for slot in slots}  # fmt: skip
        self.group = self._group()
        if samples is None:
            samples = calibration.draw(source, settings.calibration, settings.samples, settings.length, settings.seed)
        calibration.check_vocabulary(samples, self.skeleton.config.vocab_size)
        self.ids = samples.ids
        self.answer = process.Answer({}, {})

    def _group(self) -> int | None:
        widths = [width for _, width in self.linear.values()]
        if self.settings.format in _GROUPED:
            odd = next((name for name, (rows, _) in self.linear.items() if rows % 8), None)
            if odd is not None:
                raise ConfigError(
                    f"{self.settings.format} packs 8 outputs together, and those of {odd} are no multiple of 8"
                )
            return awq_layout.choose_group(widths, self.settings.group)
        if self.settings.group is not None:
            raise UsageError(f"{self.settings.format} has no groups to choose", hint="leave --group out")
        block = LAYOUTS[self.settings.format].group
        if block and any(width % block for width in widths):
            width = next(width for width in widths if width % block)
            raise ConfigError(f"{self.settings.format} has blocks of {block}, which do not divide inputs of {width}")
        return block or None

    def ask(self, one: Backend, folder: Path, work: Path, progress: Callable[[Progress], None]) -> Path:
        """The folder that the backend has written."""
        # The worker's own folder is another one: names have to be whole.
        out, view = work.resolve() / "out", work.resolve() / "view"
        view.mkdir()
        link_old(self.folder, self.config, view)
        request = {"source": str(view), "out": str(out), "format": self.settings.format, "group": self.group,
                   "seed": self.settings.seed, "batch": self.settings.batch, "ids": self.ids.tolist(),
                   "linear": sorted(self.linear)}  # fmt: skip
        script = process.WORKERS / f"{one.name.replace('-', '_')}.py"
        log = environments.log_of(one.name)
        self.answer = process.ask(one.name, folder, script, request, work=view.parent, log=log, tell=progress,
                                  silence=self.settings.silence)  # fmt: skip
        log.path.unlink(missing_ok=True)
        return out

    def judge(self, out: Path, progress: Callable[[Progress], None]) -> tuple[Compared, int]:
        """Names, shapes, dtypes and finite numbers by the format's rules; then errors beside rounding to nearest."""

        config, files = _written(out)
        facts = config.get("quantization_config")
        slack, group = 1.0, self.group or 0
        if self.settings.format == "awq":
            _wants(facts, quant_method="awq", bits=4, version="gemm", zero_point=True, group_size=group)
            for file in files:
                _half_scales(file)
            _write_config(out, self.config_of(out))
            verify.check(out)
            made: Source = verify.Dequantized(out, files)
            nearest: Callable[[torch.Tensor], torch.Tensor] = lambda weight: awq_nearest(weight, group).weight()  # noqa: E731
        else:
            rule = LAYOUTS[self.settings.format]
            _wants(facts, quant_method=rule.method, **({"bits": 4, "group_size": group} if rule.method == "gptq"
                                                       else {"format": rule.format}))  # fmt: skip
            made, slack = Decoded(out, files, rule, self.linear, group), rule.slack
            dtype = _dtype(config)
            nearest = lambda weight: rule.nearest(weight.to(dtype), rule.group or group)  # noqa: E731
        tell = lambda done, of: progress(Progress("compare", done, of))  # noqa: E731
        compared = compare(self.skeleton, made, nearest, self.slots, self.ids, self.settings.batch, tell)
        calibrated = backend(self.settings.backend).format(self.settings.format).calibrates
        refuse_worse(f"{self.settings.backend}'s {self.settings.format}", compared, slack, calibrated=calibrated)
        return compared, len(self.linear)

    def pieces(self, out: Path, work: Path) -> list[str]:
        """What the backend wrote, without a second copy of tied embeddings."""
        _, files = _written(out)
        tied = bool(getattr(self.skeleton.config, "tie_word_embeddings", False))
        pieces = []
        for number, file in enumerate(files):
            names = [name for name in tensorfile.sizes(file) if not (tied and name == "lm_head.weight")]
            piece = work / f"backend-{number:05d}.safetensors"
            tensorfile.join(piece, [file], [names])
            file.unlink()
            pieces.append(piece.name)
        return pieces

    def config_of(self, out: Path) -> dict[str, Any]:
        """The source's configuration with what the backend says of its quantization, and of the rest's dtype."""
        config, _ = _written(out)
        ours = {key: value for key, value in self.config.items() if key not in ("torch_dtype", "dtype", "auto_map")}
        dtype = config.get("torch_dtype") or config.get("dtype") or "float16"
        return {**ours, "torch_dtype": dtype, "quantization_config": config["quantization_config"]}


def link_old(source: Path, config: Mapping[str, Any], view: Path) -> None:
    """A folder with the model's weights and a configuration that transformers 4 and 5 both understand.

    transformers 5 writes rope_parameters, which transformers 4 passes over in silence and takes 10,000 for theta.

    Raises:
        ConfigError: a rotary embedding that transformers 4 has no word for.

    """
    rope = config.get("rope_parameters")
    older = dict(config)
    if isinstance(rope, dict):
        if any(isinstance(value, dict) for value in rope.values()):
            raise ConfigError("its layers have rotary embeddings of several kinds, which backends read in their own ways",
                              hint="kvctl's own search does without them")  # fmt: skip
        older.setdefault("rope_theta", rope.get("rope_theta", 10000.0))
        if rope.get("rope_type", "default") != "default":
            older.setdefault("rope_scaling", {key: value for key, value in rope.items() if key != "rope_theta"})
    if "dtype" in older:
        older.setdefault("torch_dtype", older["dtype"])
    for path in sorted(source.iterdir()):
        if path.is_file() and path.name != "config.json":
            (view / path.name).symlink_to(path.resolve())
    _write_config(view, older)


def _write_config(folder: Path, config: Mapping[str, Any]) -> None:
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _written(out: Path) -> tuple[dict[str, Any], list[Path]]:
    """The configuration and the files of a folder that a backend wrote: plain ones, in it."""
    if not (out / "config.json").is_file():
        raise SourceError("the backend wrote no config.json", hint="nothing was kept")
    config = jsonfile.read_file(out / "config.json")
    files = safetensors.named_files(out)
    for file in files:
        if os.path.islink(file) or not file.is_file():
            raise SourceError(f"the backend wrote no {jsonfile.plain(file.name)}", hint="nothing was kept")
    return config, files


def _dtype(config: Mapping[str, Any]) -> torch.dtype:
    """What a backend loaded the model in and worked in, by the configuration that it wrote."""
    import torch

    name = str(config.get("torch_dtype") or config.get("dtype"))
    return {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(name, torch.float32)


def _half_scales(file: Path) -> None:
    """Scales in float16, as the AWQ layout has them; of those in bfloat16 no bit may be lost.

    Raises:
        SourceError: float16 does not hold one.

    """
    import torch

    source = Source(file.parent, [file])
    odd = [name for name in source.names() if name.endswith(".scales") and source.dtypes[name] == "BF16"]
    if not odd:
        return
    scales = {}
    for name in odd:
        tensor = source.read(name)
        scales[name] = tensor.half()
        if not torch.equal(scales[name].float(), tensor.float()):
            raise SourceError(f"{jsonfile.plain(name)} has scales that float16 does not hold", hint="nothing was kept")
    half, whole = file.with_suffix(".half"), file.with_suffix(".whole")
    tensorfile.write(half, scales)
    tensorfile.join(whole, [file, half], [[name for name in source.names() if name not in scales], odd])
    half.unlink()
    whole.replace(file)


def _wants(facts: Any, **wanted: Any) -> None:
    for key, value in wanted.items():
        found = facts.get(key) if isinstance(facts, dict) else None
        if found != value:
            raise SourceError(f"the backend's quantization_config says {key} {str(found)[:40]!r}, not {value!r}",
                              hint="nothing was kept")  # fmt: skip


def _configuration(folder: Path) -> Any:
    import transformers

    try:
        return transformers.AutoConfig.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
    except Exception as error:
        raise ConfigError(f"transformers cannot read the configuration: {first_line(error)}") from None

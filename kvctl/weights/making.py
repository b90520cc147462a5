"""One format of one model: what will be done for it, and doing it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvctl.errors import UsageError
from kvctl.record import Record
from kvctl.weights import from_gguf
from kvctl.weights.calibration import Samples, Wanted
from kvctl.weights.report import Row

if TYPE_CHECKING:
    from kvctl.weights.awq import make as awq
    from kvctl.weights.backends import make as backends
    from kvctl.weights.ways import Way

Finish = Callable[[Path, Mapping[str, Any]], Mapping[str, str]]
"""Called with a folder that is complete but for its name, and with what else is known for its row; see `Work.place`."""
Tell = Callable[[str, int, int], None]
"""A stage, how much of it is done, and of how much."""


class Settings(Record):
    """What may be asked of formats; each takes what is its own."""

    group: int | None = None
    dtype: str | None = None
    """Of what is not packed: float16, bfloat16, float32."""
    compute: str | None = None
    """bitsandbytes' 4 bits: computed in."""
    threshold: float | None = None
    """LLM.int8's outliers."""
    skip: tuple[str, ...] = ()
    calibration: Wanted = Wanted()
    samples: int = 16
    length: int = 512
    seed: int = 0

    def check(self, ways: Sequence[Way]) -> None:
        """Refuses what none of the formats has.

        Raises:
            UsageError: it is asked for.

        """
        takes = {
            "--group": (self.group, [way for way in ways if way.grouped]),
            "--skip": (self.skip, [way for way in ways if way.by]),
            "--compute-dtype": (self.compute, [way for way in ways if way.by and way.name != "int8"]),
            "--int8-threshold": (self.threshold, [way for way in ways if way.name == "int8"]),
            "--dtype": (self.dtype, [way for way in ways if not way.backend]),
        }
        narrow = next((way.name for way in ways if way.grouped and not way.backend), None)
        if narrow is not None and self.dtype == "float32":
            raise UsageError(f"--dtype fp32: readers of {narrow} know 16 bits", hint="fp16, bf16 or auto")
        for option, (value, takers) in takes.items():
            if value not in (None, ()) and not takers:
                raise UsageError(
                    f"{option} is nothing for {', '.join(way.name for way in ways)[:80]}", hint="leave it out"
                )


class Making:
    """A format, of the model in a folder of safetensors."""

    def __init__(self, way: Way, source: Path, settings: Settings, samples: Samples | None = None) -> None:
        self.way, self.source, self.settings = way, source, settings
        self.samples = samples
        """What it is searched on; None: not drawn yet."""

    def plan(self) -> Row:
        """From headers alone."""
        raise NotImplementedError

    @property
    def readers(self) -> str:
        """A note of what reads it."""
        return f"read by {self.way.readers}"

    def make(self, target: Path, *, resume: bool, force: bool, finish: Finish, tell: Tell) -> None:
        """Write the checkpoint."""
        raise NotImplementedError

    def check(self, folder: Path) -> str:
        """Hold the folder against the format's rules; what was held against what."""
        raise NotImplementedError


class _Awq(Making):
    def _own(self) -> awq.Settings:
        from kvctl.weights.awq import make as awq

        given, searched = self.settings, self.way.name == "awq"
        return awq.Settings(
            given.group, given.samples, given.length, given.seed, given.calibration, given.dtype,
            scale=searched, clip=searched, compensate=searched,
        )  # fmt: skip

    def plan(self) -> Row:
        from kvctl.weights.awq import make as awq

        if from_gguf.is_gguf(self.source):
            raise UsageError(f"what {self.way.name} makes of a GGUF file is not known before that is dequantized",
                             hint="without --dry-run, or give the folder that it was made of")  # fmt: skip
        will = awq.plan(self.source, self._own())
        return Row(
            self.way.name, self.way.title, will.dtype, will.group, will.parameters, will.file_bytes, will.memory_bytes,
            will.disk_bytes, facts={"tensor_parallel": list(will.ranks), "layers": will.layers}, notes=(self.readers,),
        )  # fmt: skip

    def make(self, target: Path, *, resume: bool, force: bool, finish: Finish, tell: Tell) -> None:
        from kvctl.weights.awq import make as awq

        awq.make(
            self.source, target, self._own(), samples=self.samples, resume=resume, force=force,
            finish=lambda folder, made: finish(folder, self._more(made)),
            progress=lambda step: tell(step.stage, step.done, step.of),
        )  # fmt: skip

    def _more(self, made: awq.Made) -> Mapping[str, Any]:
        facts = {
            "tensor_parallel": list(made.ranks), "layers": len(made.layers), "output_error": made.error,
            "output_error_rounded_to_nearest": made.plain_error, "largest_state": made.largest,
            "sites": [report.to_dict() | {"layer": at} for at, reports in enumerate(made.layers) for report in reports],
        }  # fmt: skip
        return {"facts": facts, "notes": (*made.notes, self.readers)}

    def check(self, folder: Path) -> str:
        from kvctl.weights import verify

        found = verify.check(folder)
        return f"{found.packed:,} packed layers and {found.tensors:,} tensors are AutoAWQ's, by name, shape, dtype and the reference dequantizer"


class _Bitsandbytes(Making):
    def _own(self) -> Any:
        from kvctl.weights import bnb

        given, kind = self.settings, self.way.name.removesuffix("-dq")
        more = {} if given.threshold is None or kind != "int8" else {"threshold": given.threshold}
        return bnb.Settings(
            kind,
            self.way.name.endswith("-dq"),
            None if kind == "int8" else given.compute,
            skip=given.skip,
            dtype=given.dtype,
            **more,
        )

    def plan(self) -> Row:
        from kvctl.weights import bnb

        will = bnb.plan(self.source, self._own())
        return Row(
            self.way.name, self.way.title, will.dtype, None if self.way.name == "int8" else 64, will.parameters,
            will.tensor_bytes, will.memory_bytes, will.disk_bytes,
            facts={"layers": will.packed, "kept": list(will.kept)}, notes=(*will.notes, self.readers),
        )  # fmt: skip

    def make(self, target: Path, *, resume: bool, force: bool, finish: Finish, tell: Tell) -> None:
        from kvctl.weights import bnb

        bnb.make(
            self.source, target, self._own(), force=force, finish=lambda folder: finish(folder, {}),
            progress=lambda step: tell(step.stage, step.done, step.of),
        )  # fmt: skip

    def check(self, folder: Path) -> str:
        from kvctl.weights import bnb_verify

        found = bnb_verify.check(folder, self.source)
        return f"{found.packed:,} packed layers and {found.tensors:,} tensors are bitsandbytes', by name, shape and dtype, and stand for the original's weights"


class _Backend(Making):
    """Somebody else's quantizer, in an environment of its own."""

    def plan(self) -> Row:
        from kvctl.weights import checkpoint
        from kvctl.weights.awq import make as awq

        if from_gguf.is_gguf(self.source):
            raise UsageError(f"what {self.way.name} makes of a GGUF file is not known before that is dequantized",
                             hint="without --dry-run, or give the folder that it was made of")  # fmt: skip
        if self.way.name == "awq":
            will = awq.plan(self.source, awq.Settings(self.settings.group))
            return Row(self.way.name, self.way.title, will.dtype, will.group, will.parameters, will.file_bytes,
                       facts={"tensor_parallel": list(will.ranks)}, notes=(self.readers,))  # fmt: skip
        source, _ = checkpoint.open_source(self.source)
        return Row(
            self.way.name,
            self.way.title,
            "",
            None,
            sum(math.prod(shape) for shape in source.shapes.values()),
            None,
            notes=(self.readers,),
        )

    def make(self, target: Path, *, resume: bool, force: bool, finish: Finish, tell: Tell) -> None:
        from kvctl.weights.backends import make as backends

        given = self.settings
        asked = backends.Settings(
            self.way.backend, self.way.name, given.group, given.samples, given.length, given.seed, given.calibration
        )
        backends.make(
            self.source, target, asked, samples=self.samples, force=force, finish=lambda folder, made: finish(folder, self._more(made)),
            progress=lambda step: tell(step.stage, step.done, step.of),
        )  # fmt: skip

    def _more(self, made: backends.Made) -> Mapping[str, Any]:
        facts = {
            "backend": made.backend, "versions": dict(made.versions), "output_error": made.compared.error,
            "output_error_rounded_to_nearest": made.compared.plain_error, **made.facts,
        }  # fmt: skip
        return {"facts": facts, "group": made.group, "dtype": "float16" if self.way.name == "awq" else "bfloat16"}

    def check(self, folder: Path) -> str:
        if self.way.name == "awq":
            return _Awq(self.way, self.source, self.settings).check(folder)
        return "names, shapes and dtypes are the format's, and a reader of kvctl's own finds weights no worse than rounded to nearest"


def making(way: Way, source: Path, settings: Settings, samples: Samples | None = None) -> Making:
    """How this format is made; of `samples`, if it looks at any."""
    kind = _Backend if way.backend else _Bitsandbytes if way.by else _Awq
    return kind(way, source, settings, samples)

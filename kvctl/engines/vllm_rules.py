"""What changed in vLLM's planner between versions, read from the releases themselves.

Sources: v1/core/kv_cache_utils.py (kv_cache_planning.py from 0.33 on), v1/kv_cache_interface.py,
config/{cache,model}.py, model_executor/models/config.py and platforms/interface.py of every
minor release from 0.8.5 to 0.33.0, and of the patch releases that were published after 0.10.
"""

from __future__ import annotations

import re

from kvctl.errors import UsageError
from kvctl.record import Record


class Rules(Record):
    """The rules of a version, from `since` on."""

    since: tuple[int, ...]
    """Minor release, with the patch where a patch release brought the change."""
    capacity: str
    """What the logged token count is: "blocks" (blocks × block size), "groups" (blocks a group ×
    the smallest block size) or "concurrency" (concurrent full requests × their length)."""
    hybrid: bool = True
    """Whether windows are kept apart from full attention, and recurrent layers served at all."""
    even_below: float = 1.5
    """Groups grow to the largest kind where that is less than so many times the smallest; 0: never."""
    pages: str = "padded"
    """Pages of unequal size: "equal" (refused), "scaled" (more tokens in a block where that comes out
    even, else refused) or "padded" (that, and padding elsewhere)."""
    state_caching: str = "default"
    """Prefix caching of recurrent layers: "never", "asked" (off until asked for) or "default"."""
    state_each_block: bool = False
    """Whether some models then keep a state at every block boundary ("all"), not two a request ("align")."""
    align_others: bool = True
    """Whether the models without that keep two; before, caching was turned off for them."""
    draft_blocks: bool = True
    """Whether recurrent layers reserve a block for every draft token."""
    latent_step: int = 64
    """What blocks of a model with latents and states are a multiple of."""
    overlapped: bool = False
    """Whether asynchronous scheduling keeps two batches in flight on a GPU."""
    spare_block: bool = False
    """Whether the check at the start leaves out the block that is always set aside."""
    each_stage: bool = False
    """Whether every pipeline stage logs its own capacity, before the smallest is taken."""
    one_line: bool = False
    """Whether capacity and concurrency stand in one line of the log."""
    ssd_checkpoints: bool = False
    """Whether Mamba 2 reserves a block for a checkpoint of the prefill."""
    delta_checkpoints: bool = False
    """Whether gated delta layers do, where FlashInfer runs their prefill."""
    sparse_fp8: bool = False
    """Whether DeepSeek V3.2 is kept in fp8_ds_mla without being told."""


_CONCURRENCY = Rules((0, 20, 1), "concurrency", state_caching="asked", state_each_block=True)
_OLD = Rules((0, 10), "groups", even_below=0, pages="equal", state_caching="never", draft_blocks=False,
             each_stage=True)  # fmt: skip
_GROUPS = _OLD.replace(each_stage=False)

RULES: tuple[Rules, ...] = (
    Rules((0, 8), "blocks", hybrid=False, even_below=0, pages="equal", state_caching="never",
          each_stage=True),
    _OLD,
    _OLD.replace(since=(0, 11), sparse_fp8=True),
    _GROUPS.replace(since=(0, 11, 1), state_caching="asked", state_each_block=True, align_others=False),
    _GROUPS.replace(
        since=(0, 12), even_below=1.25, pages="scaled", state_caching="asked", state_each_block=True, align_others=False
    ),
    _GROUPS.replace(since=(0, 15), even_below=1.25, pages="scaled", state_caching="asked", state_each_block=True, draft_blocks=True),
    _GROUPS.replace(since=(0, 18), even_below=1.5, pages="scaled", state_caching="asked", state_each_block=True, draft_blocks=True),
    _CONCURRENCY.replace(since=(0, 20), capacity="groups"),
    _CONCURRENCY,
    _CONCURRENCY.replace(since=(0, 26), state_caching="default", overlapped=True),
    _CONCURRENCY.replace(since=(0, 27), state_caching="default", overlapped=True, latent_step=128),
    Rules((0, 28), "concurrency", overlapped=True, latent_step=128, one_line=True),
    Rules((0, 29), "concurrency", overlapped=True, latent_step=128, one_line=True, spare_block=True),
    Rules((0, 32), "concurrency", overlapped=True, latent_step=128, one_line=True, spare_block=True,
          ssd_checkpoints=True),
    Rules((0, 33), "concurrency", overlapped=True, latent_step=128, one_line=True, spare_block=True,
          ssd_checkpoints=True, delta_checkpoints=True),
)  # fmt: skip
"""In order; a version goes by the last row that is not newer than it."""

_OLDEST, _NEWEST = (0, 8), (0, 33)
_VERSION = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?P<between>(?:rc\d+)?(?:\.dev\d+)?)(?:\.post\d+)?(?:\+[\w.]+)?", re.ASCII
)


def rules_for(version: str | None) -> tuple[Rules, str | None]:
    """Rules of a version ("0.32", "v0.32.1", "0.23.1rc1.dev5"), and a warning where they were not read from it.

    A minor release means its last patch.
    """
    if version is None:
        return RULES[-1], None
    match = _VERSION.fullmatch(version.lower())
    if match is None:
        raise UsageError(f"--engine: {version[:40]!r} is no version of vLLM", hint="for example vllm@0.11")
    asked = minor_of(version)
    if not _OLDEST <= asked <= _NEWEST:
        raise UsageError(
            f"--engine: kvctl knows vLLM {dotted(_OLDEST)} to {dotted(_NEWEST)}, not {version[:40]}",
            hint="the rules change between versions; name one of these",
        )
    exact = (*asked, int(match[3]) if match[3] else 9999)
    rules = next(rules for rules in reversed(RULES) if rules.since <= exact)
    if match["between"]:
        return (
            rules,
            f"estimated: vLLM {version[:40]}, a build between releases, goes by the rules of {dotted(rules.since)}",
        )
    return rules, None


def minor_of(version: str) -> tuple[int, int]:
    """The minor release that a version belongs to."""
    major, minor = version.lower().removeprefix("v").split(".")[:2]
    return int(major), int(re.split(r"\D", minor)[0])


def dotted(version: tuple[int, ...]) -> str:
    return ".".join(str(part) for part in version)

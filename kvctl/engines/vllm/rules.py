"""What changed in vLLM's planner between versions, read from the releases themselves.

Sources: v1/core/kv_cache_utils.py (kv_cache_planning.py from 0.33 on), v1/kv_cache_interface.py,
config/{cache,model}.py, model_executor/models/config.py and platforms/interface.py of every
minor release from 0.8.5 to 0.33.0, and of the patch releases that were published after 0.10.
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import Any

from kvctl.engines.versions import dotted, history, unknown
from kvctl.errors import UsageError
from kvctl.record import Record


class Rules(Record):
    """The rules of a version, from `since` on; defaults are those of the oldest."""

    since: tuple[int, ...]
    """Minor release, with the patch where a patch release brought the change."""
    capacity: str = "blocks"
    """What the logged token count is: "blocks" (blocks × block size), "groups" (blocks a group ×
    the smallest block size) or "concurrency" (concurrent full requests × their length)."""
    each_stage: bool = True
    """Whether every pipeline stage logs its own capacity, before the smallest is taken."""
    one_line: bool = False
    """Whether capacity and concurrency stand in one line of the log."""
    hybrid: bool = False
    """Whether windows are kept apart from full attention, and recurrent layers served at all."""
    chunks_apart: bool = False
    """Whether chunked attention is kept apart too without being told."""
    connectors: tuple[str, ...] = ()
    """KV connectors that can do with windows kept apart; with another one they are stored in full."""
    even_below: float = 0
    """Groups grow to the largest kind where that is less than so many times the smallest; 0: never."""
    pages: str = "equal"
    """Pages of unequal size: "equal" (refused), "scaled" (more tokens in a block where that comes out
    even, else refused) or "padded" (that, and padding elsewhere)."""
    state_caching: str = "never"
    """Prefix caching of recurrent layers: "never", "asked" (off until asked for) or "default"."""
    state_each_block: bool = False
    """Whether some models then keep a state at every block boundary ("all"), not two a request ("align")."""
    align_others: bool = True
    """Whether the models without that keep two; before, caching was turned off for them."""
    draft_blocks: bool = False
    """Whether recurrent layers reserve a block for every draft token."""
    latent_step: int = 64
    """What blocks of a model with latents and states are a multiple of."""
    utilization: float = 0.9
    """What share of a GPU's memory it takes without being told."""
    graphs_counted: bool = False
    """Whether CUDA graphs are taken out of that share."""
    overlapped: bool = False
    """Whether asynchronous scheduling keeps two batches in flight on a GPU."""
    spare_block: bool = False
    """Whether the check at the start leaves out the block that is always set aside."""
    ssd_checkpoints: bool = False
    """Whether Mamba 2 reserves a block for a checkpoint of the prefill."""
    delta_checkpoints: bool = False
    """Whether gated delta layers do, where FlashInfer runs their prefill."""
    kda_checkpoints: bool = False
    """Whether Kimi delta layers do, where FlashKDA runs their prefill."""
    dealing: str = ""
    """How tokens are dealt out over ranks: "" (not at all), "decode" (over tensor-parallel ranks), "both" (prefill
    context parallelism divides them further), or "axes" (it does not; the other may span its ranks)."""
    packing: str = ""
    """How pages of DeepSeek V4 lie in a block: "" (not served), "tuples" (places for every page size), "pages"
    (each size has places of its own), "dense" (without gaps), or "balanced" (that, groups chosen anew)."""
    sparse_fp8: bool = False
    """Whether DeepSeek V3.2 is kept in fp8_ds_mla without being told."""
    blackwell_fp8: tuple[str, ...] = ()
    """Model types that a Blackwell GPU keeps in fp8 without being told."""
    pooled: bool = False
    """Whether indexers that pool tokens (GLM-5.3-Flash) are served."""


_CONNECTORS = ("MultiConnector", "ExampleHiddenStatesConnector", "MooncakeConnector", "MooncakeStoreConnector",
               "SimpleCPUOffloadConnector", "OffloadingConnector", "DecodeBenchConnector", "NixlConnector")  # fmt: skip

_CHANGES: tuple[dict[str, Any], ...] = (
    {"since": (0, 8)},
    {"since": (0, 10), "capacity": "groups", "hybrid": True},
    {"since": (0, 10, 2), "dealing": "decode"},
    {"since": (0, 11), "sparse_fp8": True},
    {"since": (0, 11, 1), "sparse_fp8": False, "each_stage": False,
     "state_caching": "asked", "state_each_block": True, "align_others": False},
    {"since": (0, 12), "even_below": 1.25, "pages": "scaled", "dealing": "both"},
    {"since": (0, 14), "chunks_apart": True},
    {"since": (0, 15), "align_others": True, "draft_blocks": True},
    {"since": (0, 18), "even_below": 1.5},
    {"since": (0, 20), "pages": "padded", "utilization": 0.92, "graphs_counted": True, "packing": "tuples"},
    {"since": (0, 20, 1), "capacity": "concurrency"},
    {"since": (0, 22), "connectors": _CONNECTORS},
    {"since": (0, 23), "packing": "pages"},
    {"since": (0, 26), "state_caching": "default", "overlapped": True, "dealing": "axes"},
    {"since": (0, 27), "latent_step": 128, "packing": "dense"},
    {"since": (0, 28), "state_each_block": False, "one_line": True},
    {"since": (0, 29), "spare_block": True, "packing": "balanced", "kda_checkpoints": True},
    {"since": (0, 30), "pooled": True},
    {"since": (0, 32), "ssd_checkpoints": True, "blackwell_fp8": ("glm_moe_dsa",)},
    {"since": (0, 33), "delta_checkpoints": True, "blackwell_fp8": ("glm_moe_dsa", "glm5_next_text"),
     "connectors": (*_CONNECTORS, "MoRIIOConnector", "HiSparseConnector", "UMBPStoreConnector")},
)  # fmt: skip
"""What each version changed; one that is not named goes by the one before it."""


RULES = history(Rules, _CHANGES)

_OLDEST, _NEWEST = (0, 8), (0, 33)
_VERSION = re.compile(
    r"v?(\d{1,4})\.(\d{1,4})(?:\.(\d{1,4}))?(?P<between>(?:rc\d+)?(?:\.dev\d+)?)(?:\.post\d+)?(?:\+[\w.]+)?", re.ASCII
)


@lru_cache(maxsize=64)
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
        raise unknown(version, "vLLM", _OLDEST, _NEWEST)
    exact = (*asked, int(match[3]) if match[3] else 9999)
    rules = next(rules for rules in reversed(RULES) if rules.since <= exact)
    if match["between"]:
        return (
            rules,
            f"estimated: vLLM {version[:40]}, a build between releases, goes by the rules of {dotted(rules.since)}",
        )
    return rules, None


@lru_cache(maxsize=64)
def minor_of(version: str | None) -> tuple[int, int]:
    """The minor release that a version belongs to; None is the newest."""
    if version is None:
        return RULES[-1].since[0], RULES[-1].since[1]
    major, minor = version.lower().removeprefix("v").split(".")[:2]
    return int(major), int(re.split(r"\D", minor)[0])

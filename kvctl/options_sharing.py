"""What --shared-prefix and its companions ask for."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import UsageError
from kvctl.options_profile import DEFAULT_CONTEXTS, asked_contexts, percent, within

if TYPE_CHECKING:
    from kvctl.measure.shared import SharingAsked

_MOST_REQUESTS = 4096


def read_sharing(
    share: str | None, requests: int | None, block: int | None, *, ctx: str | None, decode: int, repeat: int, alone: bool
) -> SharingAsked | None:  # fmt: skip
    """Requests with a common prefix; `alone`: one model in this process, all layers, no techniques, and nothing to draw.

    Raises:
        UsageError: values out of range, or options that do not go together.

    """
    if share is None:
        for option, value in (("--requests", requests), ("--block", block)):
            if value is not None:
                raise UsageError(f"{option} is about prompts that begin alike", hint="--shared-prefix 50%")
        return None
    from kvctl.measure.shared import SharingAsked
    from kvctl.techniques.paging import BLOCK, checked

    part = percent(share, "--shared-prefix")
    assert part is not None
    if not share.endswith("%") and part <= 1:
        part *= 100
    if not 0 < part <= 100:
        raise UsageError(f"--shared-prefix: {share[:40]!r} is no share of a prompt", hint="--shared-prefix 50%")
    if not alone:
        raise UsageError("--shared-prefix is about requests to one model on one device, one after the other",
                         hint="without --technique, --tp, --until-oom, --layers, --batch, --prefill-chunk and --plot")  # fmt: skip
    lengths = asked_contexts(ctx) or DEFAULT_CONTEXTS[:1]
    if len(lengths) > 1:
        raise UsageError("--shared-prefix takes one --ctx: the longest prompt")
    requests = 8 if requests is None else requests
    if not 2 <= requests <= _MOST_REQUESTS:
        raise UsageError(f"--requests: {requests} is out of range", hint=f"from 2 to {_MOST_REQUESTS:,}")
    return SharingAsked(lengths[0], part / 100, requests, checked(BLOCK if block is None else block, "--block"),
                        within(decode, "--decode", 0), within(repeat, "--repeat", 0))  # fmt: skip

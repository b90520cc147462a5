"""transformers and torch without their chatter; what of it matters is kept."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterable, Iterator


class _Collector(logging.Handler):
    """Keeps what a logger says."""

    def __init__(self, into: list[str]) -> None:
        super().__init__(logging.WARNING)
        self._into = into

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(Exception):
            self._into.append(record.getMessage())


@contextlib.contextmanager
def quiet() -> Iterator[list[str]]:
    """transformers and torch without their warnings and progress bars; what transformers warns of is gathered in the list."""
    import warnings

    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    # Else loading a .bin asks the Hub, in a thread of its own, to convert it.
    os.environ.setdefault("DISABLE_SAFETENSORS_CONVERSION", "1")
    with contextlib.ExitStack() as stack:
        stack.enter_context(_muted())
        import transformers

        said: list[str] = []
        logger = logging.getLogger("transformers")
        kept, bars = logger.handlers, transformers.logging.is_progress_bar_enabled()
        logger.handlers = [_Collector(said)]
        transformers.logging.disable_progress_bar()
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                yield said
        finally:
            logger.handlers = kept
            if bars:
                transformers.logging.enable_progress_bar()


@contextlib.contextmanager
def _muted() -> Iterator[None]:
    """accelerate, torch and what has no handler of its own (torchao, bitsandbytes), which logging prints by itself."""
    import torch  # noqa: F401  # it makes its handlers

    accelerate, last = logging.getLogger("accelerate"), logging.lastResort
    handlers = list(logging.getLogger("torch").handlers)
    levels = [handler.level for handler in handlers]
    level = accelerate.level
    accelerate.setLevel(logging.CRITICAL)
    logging.lastResort = logging.NullHandler()
    for handler in handlers:
        handler.setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        accelerate.setLevel(level)
        logging.lastResort = last
        for handler, own in zip(handlers, levels, strict=True):
            handler.setLevel(own)


def slow_kernels(said: Iterable[str]) -> list[str]:
    """Of what transformers said, that it does without the fast kernel for something: that is in the times."""
    return list(dict.fromkeys(line.split(". ")[0][:300] for line in said if "falling back" in line))

"""Models for torch: from a folder, the Hub or a GGUF file, or with random weights from a configuration alone."""

from __future__ import annotations

from typing import TYPE_CHECKING

from kvctl.errors import ConfigError, Hint, KvctlError, UsageError
from kvctl.measure.faults import cannot_build, first_line
from kvctl.measure.hush import quiet
from kvctl.measure.loaded import Loaded, Wanted
from kvctl.measure.memory import OutOfMemoryError, give_back, is_out_of_memory, shortage
from kvctl.measure.published import with_published_weights
from kvctl.measure.random_weights import with_random_weights

if TYPE_CHECKING:
    from kvctl.formats import DType
    from kvctl.spec import ModelSpec

__all__ = ["Loaded", "Wanted", "load"]


def load(spec: ModelSpec, wanted: Wanted, dtype: DType) -> Loaded:
    """A model in `dtype` on its device.

    Raises:
        ConfigError: transformers does not know the type, or it needs code from its repository.
        SourceError: there are no weights, or those there are are broken.
        UsageError: options that do not go together.
        OutOfMemoryError: its weights do not fit into memory.

    """
    if wanted.layers is not None and not wanted.random:
        raise UsageError("--layers keeps a few layers of a model with random weights", hint="add --weights random")
    full = None
    try:
        with quiet():
            return (
                with_random_weights(spec, wanted, dtype)
                if wanted.random
                else with_published_weights(spec, wanted, dtype)
            )
    except KvctlError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            if wanted.layers is not None:
                raise ConfigError(f"{spec.id}: its layers cannot be kept one by one: {first_line(error)}",
                                  hint="without --layers the whole model is built") from error  # fmt: skip
            raise cannot_build(spec, error) from error
        full = shortage(error)
    # Out of the handler, which would keep what was loaded so far.
    give_back()
    raise OutOfMemoryError(f"{spec.id}: its weights do not fit into the memory of {wanted.device}: {full}",
                           hint="fewer --layers, or --dtype bf16, which halves fp32" if wanted.layers is not None
                           else Hint("--layers with --weights random runs a few layers of it; --dtype bf16 halves fp32", "profile",
                                     otherwise="--dtype bf16 halves fp32"))  # fmt: skip

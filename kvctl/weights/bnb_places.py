"""Which tensors of a checkpoint bitsandbytes packs, as transformers would, without loading any of them.

transformers' own model of the configuration stands on torch's meta device, its linear layers are replaced by
bitsandbytes' by transformers' own rule, and transformers' own renaming says where each tensor of the files goes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, SourceError, UsageError
from kvctl.measure.faults import first_line
from kvctl.sources import jsonfile

if TYPE_CHECKING:
    from kvctl.weights.tensorfile import Source

_MADE_ANEW = ("rotary_emb.inv_freq", "attn.bias", "attn.masked_bias")
"""What old checkpoints hold beside weights; models make it themselves."""


def divided(outputs: int, inputs: int) -> bool:
    """Whether bitsandbytes 0.50 runs a 4-bit layer on CPUs with AVX512-BF16 (functional._convert_weight_packed_for_cpu)."""
    return outputs % 32 == 0 and inputs % 64 == 0


class Places:
    """A model without weights, and where a checkpoint's tensors go in it."""

    def __init__(self, config: Any, settings: Mapping[str, Any], skip: Sequence[str]) -> None:
        """`settings` are those of transformers' BitsAndBytesConfig, `skip` names modules that stay as they are.

        Raises:
            ConfigError: transformers knows no language model of this type, or it has no linear layers.

        """
        import transformers
        from accelerate import init_empty_weights
        from transformers.integrations import replace_with_bnb_linear
        from transformers.quantizers.base import get_keys_to_not_convert

        try:
            with init_empty_weights(include_buffers=False):
                self.model: Any = transformers.AutoModelForCausalLM.from_config(config)
        except Exception as error:
            raise ConfigError(f"transformers cannot build it as a language model: {first_line(error)}") from None
        self.model.eval()
        # By name and in order: transformers' own list of what stays is a set's, which is another one in every run.
        own = (*get_keys_to_not_convert(self.model), *(self.model._keep_in_fp32_modules or ()), *skip)
        self.kept: list[str] = sorted(set(own))
        self.settings = transformers.BitsAndBytesConfig(**settings, llm_int8_skip_modules=self.kept)
        replace_with_bnb_linear(self.model, modules_to_not_convert=self.kept, quantization_config=self.settings)
        import bitsandbytes

        kinds = (bitsandbytes.nn.Linear4bit, bitsandbytes.nn.Linear8bitLt)
        self.linears: dict[str, Any] = {
            name: module for name, module in self.model.named_modules() if isinstance(module, kinds)
        }
        if not self.linears:
            raise ConfigError(f"{type(self.model).__name__} has no linear layers that bitsandbytes packs")

    def of(self, source: Source) -> dict[str, str | None]:
        """For every tensor of the files that belongs to the model: the linear layer whose weight it is, or None.

        Raises:
            SourceError: the files lack a tensor, or have one of another shape.
            ConfigError: transformers makes one linear layer of several tensors, or several of one.

        """
        wanted = {name: tuple(tensor.shape) for name, tensor in self.model.state_dict().items()}
        tied = dict(self.model.all_tied_weights_keys)
        keys = self._keys(source.names(), wanted)
        by_key = {key: name for name, (key, _) in keys.items()}
        out: dict[str, str | None] = {}
        for name, (key, converted) in keys.items():
            if name.endswith(_MADE_ANEW) and key not in wanted:
                continue
            twin = by_key.get(tied.get(key, ""))
            if twin is not None and _same(source, name, twin):
                continue
            if key not in wanted and not converted:
                raise SourceError(f"the checkpoint has {name[:120]}, unlike {type(self.model).__name__}")
            module = key.removesuffix(".weight") if key.removesuffix(".weight") in self.linears else None
            if converted and module is not None:
                raise ConfigError(f"transformers makes {key[:120]} of other tensors than the files have, and bitsandbytes packs "
                                  "only whole ones", hint="save the model anew with transformers first")  # fmt: skip
            if not converted:
                _check_shape(name, source.shapes[name], wanted[key])
            out[name] = module
        self._check_complete(wanted, by_key, tied)
        return out

    def check_words(self, skip: Sequence[str]) -> None:
        """Refuses words that no module has: a typing error would quantize what was to stay.

        Raises:
            UsageError: there is one.

        """
        from transformers.quantizers.quantizers_utils import should_convert_module

        names = [name for name, _ in self.model.named_modules() if name]
        for word in skip:
            try:
                unknown = all(should_convert_module(name, [word]) for name in names)
            except Exception:
                unknown = True  # no regular expression
            if not word or unknown:
                raise UsageError(f"no module is called {jsonfile.plain(word)[:80]!r}",
                                 hint="names of modules, or ends of them: lm_head, o_proj, model.layers.0")  # fmt: skip

    def linears_of(self, names: Iterable[str]) -> dict[str, str]:
        """Of tensors' names in files, those that are a packed layer's weight, and the layer."""
        wanted = self.model.state_dict()
        keys = {name: key.removesuffix(".weight") for name, (key, _) in self._keys(names, wanted).items()}
        return {name: module for name, module in keys.items() if module in self.linears}

    def _keys(self, names: Iterable[str], wanted: Mapping[str, Any]) -> dict[str, tuple[str, bool]]:
        """Each tensor's key in the model, and whether transformers converts it on the way."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

        rules = get_model_conversion_mapping(self.model)
        renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
        converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
        prefix = self.model.base_model_prefix
        out = {}
        for name in names:
            key, pattern = rename_source_key(name, renamings, converters, prefix, wanted)
            if key not in wanted and name in wanted:
                key, pattern = rename_source_key(name, [], [], prefix, wanted)
            out[name] = (key, pattern is not None)
        return out

    def _check_complete(self, wanted: Mapping[str, Any], there: Mapping[str, str], tied: Mapping[str, str]) -> None:
        shared: dict[str, set[str]] = {}
        for one, other in tied.items():
            shared.setdefault(one, set()).add(other)
            shared.setdefault(other, set()).add(one)
        made = {name for name, _ in self.model.named_buffers()}
        lost = [key for key in wanted
                if key not in there and key not in made and not shared.get(key, set()) & there.keys() and not self._converted(key)]  # fmt: skip
        if lost:
            more = f" and {len(lost) - 1} more" if len(lost) > 1 else ""
            raise SourceError(f"the checkpoint lacks {min(lost)[:120]}{more}, unlike {type(self.model).__name__}",
                              hint="download it again")  # fmt: skip

    def _converted(self, key: str) -> bool:
        """Whether transformers makes it of tensors with other names; what they are is its own business."""
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter

        rules = [rule for rule in get_model_conversion_mapping(self.model) if isinstance(rule, WeightConverter)]
        return any(pattern in key for rule in rules for pattern in rule.target_patterns)


def _same(source: Source, one: str, other: str) -> bool:
    """Whether a tied matrix that is stored twice is the same twice; transformers keeps both where it is not."""
    import torch

    return source.shapes[one] == source.shapes[other] and bool(torch.equal(source.read(one), source.read(other)))


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted and found != wanted[::-1]:  # a Conv1D's weight lies the other way round
        raise SourceError(f"{name[:120]} is {found}, the configuration says {wanted}")

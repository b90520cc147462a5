"""A model without weights, whose decoder layers are filled and emptied one at a time."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, SourceError
from kvctl.weights.awq.structure import Architecture, file_names

if TYPE_CHECKING:
    import torch

    from kvctl.weights.tensorfile import Source

_BUFFERS = ("rotary_emb.inv_freq", "attn.bias", "masked_bias")
"""What old checkpoints hold beside weights; models make it themselves."""


class Skeleton:
    """transformers' own model of a configuration on torch's meta device, and where a checkpoint's tensors go in it."""

    def __init__(self, config: Any, source: Source, known: Architecture) -> None:
        import transformers
        from accelerate import init_empty_weights

        # Buffers (rotary frequencies, scales of embeddings) are made for real: they are small, and in no file.
        with init_empty_weights(include_buffers=False):
            self.model: Any = transformers.AutoModelForCausalLM.from_config(config, **_experts(config))
        self.model.eval()
        self.config, self._source, self.known = config, source, known
        self.body: Any = self.model.model
        self.layers: list[Any] = list(self.body.layers)
        self.prefix = "model." if any(name.startswith("model.layers.") for name in source.names()) else ""
        """Of the names in the files: that of the body, which some leave out."""
        self._check_names()

    def _check_names(self) -> None:
        """Refuses files that lack a tensor of the model, or have one that it does not."""
        wanted = {f"{self.prefix}{name}": tuple(tensor.shape) for name, tensor in self.body.named_parameters()
                  if not name.startswith("layers.")}  # fmt: skip
        for index in range(len(self.layers)):
            wanted |= self._layer_shapes(index)
        if not config_ties(self.config):
            wanted["lm_head.weight"] = tuple(self.model.lm_head.weight.shape)
        if getattr(self.model.lm_head, "bias", None) is not None:
            wanted["lm_head.bias"] = tuple(self.model.lm_head.bias.shape)
        there = {name for name in self._source.names() if not name.endswith(_BUFFERS)}
        there -= {"lm_head.weight"} - wanted.keys()
        for what, names in (("lacks", wanted.keys() - there), ("has", there - wanted.keys())):
            if names:
                more = f" and {len(names) - 1} more" if len(names) > 1 else ""
                raise SourceError(f"the checkpoint {what} {min(names)[:120]}{more}, unlike {type(self.model).__name__}",
                                  hint="download it again" if what == "lacks" else None)  # fmt: skip
        for name, shape in wanted.items():
            if self._source.shapes[name] != shape:
                raise SourceError(f"{name[:120]} is {self._source.shapes[name]}, the configuration says {shape}")
        self.outside = [name for name in self._source.names() if name in wanted and not self._of_layer(name)]
        """Tensors that belong to no layer."""

    def _of_layer(self, name: str) -> bool:
        return name.startswith(f"{self.prefix}layers.")

    def _layer_shapes(self, index: int) -> dict[str, tuple[int, ...]]:
        out = {}
        for path, parameter in self.layers[index].named_parameters():
            shape = tuple(parameter.shape)
            for name, expert, rows in file_names(path, shape, self.known):
                part = shape if expert is None else shape[1:]
                part = part if rows is None else (rows[1] - rows[0], *part[1:])
                out[f"{self.name_of(index)}.{name}"] = part
        return out

    def name_of(self, index: int) -> str:
        """A layer's name in the files."""
        return f"{self.prefix}layers.{index}"

    @contextmanager
    def filled(self, index: int, dtype: torch.dtype) -> Iterator[Any]:
        """A layer with its weights in `dtype`; they go when it is left."""
        layer = self.layers[index]
        try:
            self._fill(index, dtype)
            yield layer
        finally:
            self._empty(layer, dtype)

    def _fill(self, index: int, dtype: torch.dtype) -> None:
        import torch

        layer, state = self.layers[index], {}
        for path, parameter in layer.named_parameters():
            whole = torch.empty(parameter.shape, dtype=dtype)
            for name, expert, rows in file_names(path, tuple(parameter.shape), self.known):
                part = whole if expert is None else whole[expert]
                part = part if rows is None else part[rows[0] : rows[1]]
                part.copy_(self._source.read(f"{self.name_of(index)}.{name}"))
            if not torch.isfinite(whole).all():
                raise SourceError(
                    f"{self.name_of(index)}.{path} has numbers that are not finite", hint="download it again"
                )
            state[path] = whole
        layer.load_state_dict(state, strict=False, assign=True)
        for parameter in layer.parameters():
            parameter.requires_grad_(False)

    def filled_model(self, dtype: torch.dtype) -> Any:
        """The whole model with its weights in `dtype`."""
        for index in range(len(self.layers)):
            self._fill(index, dtype)
        outside = {name if name.startswith("lm_head.") or self.prefix else f"model.{name}": self._source.read(name).to(dtype)
                   for name in self.outside}  # fmt: skip
        self.model.load_state_dict(outside, strict=False, assign=True)
        self.model.tie_weights()
        return self.model

    def _empty(self, layer: Any, dtype: torch.dtype) -> None:
        import torch

        for module in layer.modules():
            for name, parameter in list(module._parameters.items()):
                if parameter is not None:
                    module._parameters[name] = torch.nn.Parameter(
                        torch.empty(parameter.shape, dtype=dtype, device="meta"), requires_grad=False
                    )

    def enter(self, ids: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, list[dict[str, Any]]]:
        """Of token ids [samples, length]: what the first layer is given [samples, length, width], and what every layer
        is given beside it (positions, masks), which holds for one sample as for many.

        The model's own forward says it: its layers are stood in for by ones that do nothing.
        """
        import torch

        name = f"{self.prefix}embed_tokens.weight"
        embedding = self.body.embed_tokens
        kept, padding = embedding._parameters["weight"], embedding.padding_idx
        # Only rows of tokens that occur.
        used, own = torch.unique(ids, return_inverse=True)
        rows = self._source.read_rows(name, used).to(dtype)
        if not torch.isfinite(rows).all():
            raise SourceError(f"{name} has numbers that are not finite", hint="download it again")
        embedding._parameters["weight"] = torch.nn.Parameter(rows, requires_grad=False)
        embedding.padding_idx = None
        beside: list[dict[str, Any]] = [{} for _ in self.layers]
        first: list[torch.Tensor] = []
        try:
            with _instead(self.layers, self.body.norm, beside, first), torch.no_grad():
                for sample in own:
                    self.body(input_ids=sample[None], use_cache=False)
        finally:
            embedding._parameters["weight"], embedding.padding_idx = kept, padding
        return torch.cat(first), beside


@contextmanager
def _instead(layers: list[Any], norm: Any, beside: list[dict[str, Any]], first: list[torch.Tensor]) -> Iterator[None]:
    """Layers that note what they are given and return it."""

    def stand_in(index: int) -> Any:
        def forward(hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
            if args:
                raise ConfigError("this model gives its layers what is not known to kvctl")
            if index == 0:
                first.append(hidden_states.clone())
            beside[index] = kwargs
            return hidden_states

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.forward = stand_in(index)
        norm.forward = lambda hidden_states: hidden_states
        yield
    finally:
        for module in (*layers, norm):
            module.__dict__.pop("forward", None)


def config_ties(config: Any) -> bool:
    """Whether the head is the embeddings' matrix, which is stored once."""
    return bool(getattr(config, "tie_word_embeddings", False))


def _experts(config: Any) -> Mapping[str, Any]:
    """Experts one after another, whose code is plain; only where there are any."""
    many = any(getattr(config, name, None) for name in ("num_local_experts", "num_experts"))
    return {"experts_implementation": "eager"} if many else {}


def run(layer: Any, states: torch.Tensor, beside: Mapping[str, Any]) -> torch.Tensor:
    """What a layer makes of [samples, length, width]."""
    import torch

    with torch.no_grad():
        out = layer(states, **beside)
    found: torch.Tensor = out[0] if isinstance(out, tuple) else out
    return found

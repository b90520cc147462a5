"""Prefill and decode of one model, as a plain loop: forward, the likeliest token, forward."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from time import perf_counter
from typing import TYPE_CHECKING, Any

from kvctl.errors import ConfigError, KvctlError
from kvctl.measure import foreign
from kvctl.measure.devices import synchronizer
from kvctl.record import Record

if TYPE_CHECKING:
    from kvctl.spec import ModelSpec
    from kvctl.techniques import Technique

_CACHE_NAMES = ("cache", "past_key_values", "cache_params", "state", "mems", "past_buckets_states")
"""What models call their cache, in arguments and outputs (transformers renamed past_key_values in 5.23)."""


class PassTimes(Record):
    """One run: seconds to the first token, and of every step after it."""

    ttft: float
    steps: tuple[float, ...]


class Passes:
    """A model that is fed tokens; it holds the cache of the run at hand.

    `encoder_tokens`: positions that cross attention sees, of models with an encoder; `layers`: those that keep a cache.
    """

    def __init__(self, model: Any, device: str, encoder_tokens: int = 0, layers: int = 0, seed: int = 0) -> None:
        self.model = model
        self.device = device
        self.cache: Any = None
        self._encoder_tokens = encoder_tokens
        self._layers = layers
        self._seed = seed
        takes = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in _CACHE_NAMES if name in takes), None)
        self._is_encoder_decoder = bool(getattr(model.config, "is_encoder_decoder", False))
        # As generate() does: the head looks at the last position alone, where the model lets it.
        self._fixed: dict[str, Any] = {"use_cache": True} | ({"logits_to_keep": 1} if "logits_to_keep" in takes else {})
        self._ids_name = "decoder_input_ids" if self._is_encoder_decoder else "input_ids"
        self._beside: dict[str, Any] = {}
        decoder = model.config.get_text_config(decoder=True)
        self._codebooks = getattr(decoder, "num_codebooks", None) if _of(model, "musicgen") else None
        self._channels = getattr(decoder, "num_channels", None) if _of(model, "dia") else None
        self.synchronize = synchronizer((device,))
        self.line_up: Callable[[], None] = lambda: None
        """Called before a run is timed: waits for other ranks, where there are any."""
        self.technique: Technique | None = None
        """What makes the cache smaller; None is the plain one."""
        self._seen = 0
        self.indexes: tuple[int, ...] = ()
        """Layers of the cache that it works on."""
        self._restore: Callable[[], None] = lambda: None
        """Makes the model what it was, where a technique changed it."""

    def use(self, technique: Technique, indexes: tuple[int, ...], spec: ModelSpec) -> None:
        """From now on with `technique`, on the layers at `indexes`; `spec` tells of the model as it was loaded.

        Raises:
            ConfigError: it changes models first, and not such a one; the model is as it was loaded.

        """
        self.drop()
        self._restore()
        self._restore = lambda: None
        self.technique, self.indexes = technique, indexes
        if technique.convert is not None:
            self._restore = technique.convert.apply(self.model, spec)

    def begin(self, batch: int) -> None:
        """An empty cache, and for an encoder-decoder what its cross attention looks at."""
        self.cache = self._empty_cache()
        if self.technique is not None and not self.technique.plain:
            self._equip(self.technique)
        self._beside = self._encoder_states(batch) if self._is_encoder_decoder else {}
        self._seen = 0

    def feed(self, ids: Any) -> Any:
        """Logits [batch, vocabulary] after tokens [batch, length], which join the cache."""
        if self._codebooks:
            ids = ids.repeat_interleave(self._codebooks, 0)
        elif self._channels:
            ids = ids[..., None].expand(-1, -1, self._channels)
        out = self.model(**self._given(ids, self._fixed))
        for name in _CACHE_NAMES:
            found = getattr(out, name, None)
            if found is not None:
                self.cache = found
                # A forward that takes it among its keywords does not name it.
                self._cache_name = self._cache_name or name
                break
        logits = out.logits
        if self._codebooks or self._channels:
            # One book speaks for all: which token comes next is of no matter to what is measured.
            logits = logits.reshape(ids.shape[0] // (self._codebooks or 1), -1, *logits.shape[-2:])[:, 0]
        return logits[:, -1]

    def logits(self, ids: Any) -> Any:
        """Logits [batch, length, vocabulary] after each of the tokens [batch, length], which join the cache."""
        return self.model(**self._given(ids, {"use_cache": True})).logits

    def _given(self, ids: Any, settings: dict[str, Any]) -> dict[str, Any]:
        """What a pass of the model is called with."""
        given = {**settings, **self._beside, self._ids_name: ids}
        if self.cache is not None and self._cache_name is not None:
            given[self._cache_name] = self.cache
        if self.technique is not None and self.technique.foreign is not None and self.technique.foreign.shortens:
            import torch

            given["position_ids"] = torch.arange(self._seen, self._seen + ids.shape[1], device=ids.device)[None]
            self._seen += ids.shape[1]
        return given

    def _equip(self, technique: Technique) -> None:
        """Put the technique's layers in the place of plain ones.

        Raises:
            ConfigError: the model's cache or attention is not one that it works with.

        """
        if self.cache is None:
            raise ConfigError(f"{technique.name}: {type(self.model).__name__} keeps a cache of its own kind",
                              hint="kvctl size MODEL --technique … predicts it")  # fmt: skip
        from kvctl.techniques import attention
        from kvctl.techniques.caches import equipped

        attention.remove(self.model)
        if technique.foreign is not None:
            foreign.equip(technique.foreign, self.cache, self.model)
            return
        equipped(self.cache, self.model, technique, self.indexes)
        attention.install(self.model, technique)

    def prefill(self, ids: Any, chunk: int | None = None) -> Any:
        """Logits after a prompt, in one piece or in chunks of so many tokens."""
        if self.technique is not None and self.technique.foreign is not None:
            with foreign.around_prompt(self.technique.foreign, self.model):
                return self._prompt(ids, chunk)
        return self._prompt(ids, chunk)

    def _prompt(self, ids: Any, chunk: int | None) -> Any:
        if chunk is None or chunk >= ids.shape[1]:
            return self.feed(ids)
        for start in range(0, ids.shape[1], chunk):
            logits = self.feed(ids[:, start : start + chunk])
        return logits

    def timed(
        self, ids: Any, decode: int, chunk: int | None = None, step_done: Callable[[], None] | None = None
    ) -> PassTimes:
        """One run by the clock: a prompt, its first token, and so many more; the device is waited for after each."""
        self.begin(ids.shape[0])
        steps = []
        wait = self.synchronize
        wait()
        self.line_up()
        start = perf_counter()
        token = self.prefill(ids, chunk).argmax(-1, keepdim=True)
        wait()
        last = perf_counter()
        ttft = last - start
        for _ in range(decode):
            token = self.feed(token).argmax(-1, keepdim=True)
            wait()
            now = perf_counter()
            steps.append(now - last)
            last = now
            if step_done is not None:
                step_done()
        return PassTimes(ttft, tuple(steps))

    def drop(self) -> None:
        """Let go of the cache."""
        self.cache, self._beside = None, {}
        if self.technique is not None and not self.technique.plain:
            from kvctl.techniques import attention

            attention.remove(self.model)

    def _empty_cache(self) -> Any:
        """The cache that generate() makes; None for models that bring their own."""
        import transformers

        if self._cache_name not in _CACHE_NAMES[:2] or not _default_cache(self.model):
            return None
        made = [transformers.DynamicCache(config=self.model.config.get_text_config(decoder=True)) for _ in range(2)]
        plain = all(type(layer).__name__ == "DynamicLayer" for layer in made[0].layers)
        if plain and len(made[0].layers) < self._layers:
            # Some composite configurations tell the number of layers of another part (evolla, t5 with more
            # layers in its decoder); without one the cache grows a layer for every layer that asks.
            made = [transformers.DynamicCache() for _ in range(2)]
        if _of(self.model, "t5gemma") or _of(self.model, "t5gemma2"):
            # Their windows are not those of cross attention, and generate() asks them for the cache.
            made[1] = transformers.DynamicCache()
        return transformers.EncoderDecoderCache(*made) if self._is_encoder_decoder else made[0]

    def _encoder_states(self, batch: int) -> dict[str, Any]:
        """What an encoder would have given: random states, as wide as it says, seeded."""
        import torch
        from transformers.modeling_outputs import BaseModelOutput

        width = _encoder_width(self.model.config)
        if width is None:
            raise KvctlError(f"how wide {type(self.model).__name__}'s encoder is cannot be told from its configuration",
                             hint="kvctl size MODEL --engine transformers predicts its cache")  # fmt: skip
        generator = torch.Generator(device="cpu").manual_seed(self._seed)
        states = torch.randn(batch, self._encoder_tokens, width, generator=generator)
        out: Any = BaseModelOutput(last_hidden_state=states.to(device=self.device, dtype=self.model.dtype))
        # What encoders of some classes say beside it.
        out.attention_mask = out.router_logits = None
        return {"encoder_outputs": out}


def _of(model: Any, family: str) -> bool:
    return type(model).__module__.startswith(f"transformers.models.{family}.")


def _encoder_width(config: Any) -> int | None:
    """Width of what the decoder's cross attention looks at."""
    parts = [getattr(config, name, None) for name in ("encoder", "encoder_config", "audio_encoder")]
    widths = (getattr(part, name, None) for part in (*parts, config) for name in ("hidden_size", "d_model"))
    return next((width for width in widths if isinstance(width, int)), None)


def _default_cache(model: Any) -> bool:
    """Whether generate() would make a DynamicCache for this model."""
    supports = getattr(model, "_supports_default_dynamic_cache", None)
    return bool(supports()) if supports is not None else False


def random_ids(vocabulary: int, batch: int, length: int, seed: int) -> Any:
    """Token ids [batch, length], the same for the same seed."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    # The first few ids are often special: padding, begin and end of text.
    low = min(8, max(vocabulary - 1, 0))
    return torch.randint(low, vocabulary, (batch, length), generator=generator)


def repeated(ids: Sequence[int], batch: int, length: int) -> Any:
    """Token ids [batch, length] of a text: repeated where it is shorter, and begun elsewhere for every sequence."""
    import torch

    text = torch.tensor(list(ids), dtype=torch.long)
    starts = torch.arange(batch) * (len(text) // max(batch, 1))
    return text[(starts[:, None] + torch.arange(length)[None, :]) % len(text)]

"""Key-value caches whose layers take padded keys and values: Hugging Face's `StaticCache`, counting valid tokens.

`StaticLayer.update` counts by `key_states.shape`, which is the bucket size of a PaddedTensor. Here the count is the
true size, on the device; padded positions write the same values as the first valid one, to the same place.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import Cache, DynamicCache, EncoderDecoderCache, StaticCache
from transformers.cache_utils import CacheLayerMixin, StaticLayer

from subtensors.dispatch.ops.errors import RuleError
from subtensors.padded.autograd import unwrap_with_grad
from subtensors.padded.padded_tensor import PaddedTensor


class PaddedStaticLayer(StaticLayer):  # type: ignore[no-untyped-call]
    """One layer's keys and values, (rows, heads, length, head size), at addresses that never change."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate both, in a dtype of their own each: autocast may give keys another one than values."""
        super().lazy_initialization(key_states, value_states)  # type: ignore[no-untyped-call]  # transformers'
        assert self.values is not None
        self.values = self.values.to(value_states.dtype)

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Append keys and values, (rows, heads, new, head size); return the whole cache, unfilled places included."""
        if not isinstance(key_states, PaddedTensor) or not isinstance(value_states, PaddedTensor):
            return super().update(key_states, value_states, *args, **kwargs)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        count = key_states.count(2)
        positions = torch.arange(key_states.shape[2], device=self.device)
        positions = torch.where(positions < count, positions, 0) + self.cumulative_length
        keys, values = self._keys_and_values()
        for cached, states in ((keys, key_states), (values, value_states)):
            cached.index_copy_(2, positions, unwrap_with_grad(states).edge_filled([2]))
        self.cumulative_length.add_(count)
        return keys, values

    def reset(self) -> None:
        """Zero the keys and values, in one kernel, and their count."""
        if self.is_initialized:
            torch._foreach_zero_(self._keys_and_values())
        self.cumulative_length.zero_()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder the rows in place, since graphs read them there."""
        for cached in self._keys_and_values() if self.is_initialized else ():
            cached.copy_(cached.index_select(0, beam_idx.to(cached.device)))

    def _keys_and_values(self) -> tuple[Tensor, Tensor]:
        assert self.keys is not None
        assert self.values is not None
        return self.keys, self.values


class UncachedLayer(CacheLayerMixin):  # type: ignore[no-untyped-call]
    """A layer that keeps nothing: an encoder's keys and values are computed anew, at the sizes of each call."""

    is_compileable = True

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Allocate nothing: the layer keeps no memory."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: object, **kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Return the same keys and values."""
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Return length and offset of the keys; the mask is made from the encoder's output."""
        return query_length, 0

    def get_seq_length(self) -> int:
        """Return the number of tokens kept: none."""
        return 0

    def get_max_length(self) -> int:
        """Return -1: there is no maximum."""
        return -1

    def reorder_cache(self, beam_idx: Tensor) -> None:
        """Reorder nothing: the layer keeps no rows."""


class NeverUpdated(dict[int, bool]):
    """A map that says, by layer, whether the encoder's keys and values are kept: always False."""

    def __setitem__(self, layer: int, is_updated: bool) -> None:
        super().__setitem__(layer, False)


def padded_cache(model: Any, length: int) -> Cache:
    """Make a cache that the model's `generate` takes.

    Args:
        model: a Hugging Face model that generates.
        length: the number of tokens it holds.

    Raises:
        RuleError: a layer keeps something else than all keys and values; or the model's class doesn't say that it can
            be compiled with such a cache, as one with a window of its own can't, which takes the cache's end for the
            text's.
    """
    if not getattr(model, "_can_compile_fullgraph", True):
        raise RuleError("its class doesn't say that it can be compiled with one: _can_compile_fullgraph is False")
    cache = StaticCache(config=model.config, max_cache_len=length)
    unsupported = [type(layer).__name__ for layer in cache.layers if type(layer) is not StaticLayer]
    if unsupported:
        raise RuleError(f"a layer has a {unsupported[0]} for its cache")
    cache.layers = [PaddedStaticLayer(max_cache_len=length) for _ in cache.layers]
    if not model.config.is_encoder_decoder:
        return cache
    crossing = StaticCache(config=model.config, max_cache_len=length)
    crossing.layers = [UncachedLayer() for _ in cache.layers]  # type: ignore[no-untyped-call]
    both = EncoderDecoderCache(cache, crossing)
    both.is_updated = NeverUpdated(dict.fromkeys(range(len(cache.layers)), False))
    return both


def growing_copy(cache: Cache, length: int) -> Cache:
    """Copy what a padded cache holds into one of the caller's own, to which tokens can be appended.

    Args:
        cache: of `padded_cache`.
        length: the number of tokens that it holds.
    """
    if isinstance(cache, EncoderDecoderCache):  # whose keys and values of the encoder's output are computed anew
        return EncoderDecoderCache(growing_copy(cache.self_attention_cache, length), DynamicCache())
    copy = DynamicCache()
    for i, layer in enumerate(cache.layers):
        assert isinstance(layer, PaddedStaticLayer)
        keys, values = (x[:, :, :length].clone() for x in layer._keys_and_values())
        copy.update(keys, values, i)
    return copy

"""`run.generate`: a Hugging Face model's own `generate`, whose prompts are padded and whose decode steps are replays.

During a call, the model's `forward` is replaced by a bucketed program with one more bucket, of size 1, for the decode
step, which has no padding. Keys and values are in a cache of fixed length that is kept from call to call, since graphs
read and write it in place. The encoder of an encoder-decoder is a bucketed program of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, Generic, Protocol, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from subtensors.bucketed.statistics import Fallbacks, summarize_error
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.dims import Dim

CACHE_NAMES = "cache", "past_key_values"
"""The names of the argument that is a cache: since transformers 5.24, and before."""

UNSUPPORTED_OPTIONS = (
    *CACHE_NAMES,
    "assistant_model",
    "custom_generate",
    "cache_implementation",
    "prompt_lookup_num_tokens",
)
"""Arguments of `generate` that ask for another cache or another loop."""


Options: TypeAlias = dict[str, PyTree]
"""The arguments of `generate`."""


class BucketedProgram(Protocol):
    """A bucketed program as generation needs it."""

    program: Callable[..., PyTree]

    def __call__(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Call the program."""
        ...

    def settled(self) -> AbstractContextManager[None]:
        """Return a context in which nothing replaces what the program reads."""
        ...

    def no_graph_reasons(self) -> list[str]:
        """Return the reasons why buckets could not be captured."""
        ...

    def release(self) -> None:
        """Drop the graphs."""
        ...


P = TypeVar("P", bound=BucketedProgram)


class Generation(Generic[P]):
    """The programs and caches that a model generates with.

    Args:
        model: a Hugging Face model.
        seq: the Dim that its prompts are padded on; its max is the most tokens of a prompt and its continuation.
        make: buckets a program on some dims.
    """

    def __init__(self, model: Any, seq: Dim, make: Callable[[Callable[..., PyTree], Mapping[str, object]], P]) -> None:
        if seq.max is None:
            raise ValueError(f"generate needs the most tokens of a text: give Dim {seq.name!r} a max")
        self.model, self.seq, self.length = model, seq, seq.max
        self.programs: dict[str, P] = {}
        self._caches: dict[int, Any] = {}
        self._active_cache: object = None
        """The cache of the current call."""
        self._cached_tokens = 0
        self._contexts = ExitStack()
        """What ends with the current call."""
        self._no_graph_reason = ""
        """The reason why a part of a call has no graph, or ""; later calls don't try again."""
        one_or_more = Sizes(sorted({1, *seq.buckets}))
        if model.config.is_encoder_decoder:
            new = Dim(f"{seq.name}_new", max=seq.max, min=1, buckets=one_or_more)
            self._encoder: Any = model.get_encoder()
            self.programs["encoder"] = make(
                self._encoder.forward,
                _accepted_dims(self._encoder, {"input_ids": {1: seq}, "attention_mask": {1: seq}}),
            )
            decoder = {"decoder_input_ids": {1: new}, "decoder_attention_mask": {2: new}}
            dims = {**decoder, "encoder_outputs": {1: seq}, "attention_mask": {1: seq}}
        else:
            new = Dim(seq.name, max=seq.max, min=1, buckets=one_or_more)
            dims = {"input_ids": {1: new}, "attention_mask": {2: new}, "position_ids": {1: new}}
        self._tokens = next(iter(dims))
        names = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])
        self._dims = _accepted_dims(model, dims)
        self._make: Callable[[Mapping[str, object]], P] = functools.partial(make, model.forward)
        self.programs["decoder"] = self._make(self._dims)
        # `generate` reads the model's parameters from the signature.
        self._forward = functools.update_wrapper(functools.partial(self._decode), model.forward)

    def run(self, inputs: Tensor | None, options: Options, fallbacks: Fallbacks) -> PyTree:
        """Run `model.generate(inputs, **options)` through the bucketed programs or, counting the reason, unchanged."""
        reason = self.no_graph_reason(inputs, options)
        if not reason:
            try:
                return self.generate(inputs, options)
            except RuleError as error:
                reason = str(error)
        fallbacks.refuse(reason)
        result = self.model.generate(inputs, **options)
        fallbacks.count(reason)
        return result

    def no_graph_reason(self, inputs: Tensor | None, options: Options) -> str:
        """Return the reason why the bucketed programs can't generate, or "" if they can."""
        unsupported = [name for name in UNSUPPORTED_OPTIONS if options.get(name) is not None]
        if self._no_graph_reason:
            return self._no_graph_reason
        if unsupported:
            return f"generate is asked for {unsupported[0]}"
        config = options.get("generation_config") or self.model.generation_config
        if options.get("use_cache", config.use_cache) is False:
            return "generate is asked for no cache"
        prompt = inputs if inputs is not None else options.get("input_ids")
        if not isinstance(prompt, Tensor) or prompt.dim() != 2:
            return "generate is given something other than tokens"
        length = 1 if self.model.config.is_encoder_decoder else prompt.shape[1]
        given = options.get("decoder_input_ids")
        length = given.shape[1] if given is not None else length
        if length + _max_new_tokens(config, options, length) > self.length or prompt.shape[1] > self.length:
            return f"a text may get longer than {self.seq.name}'s max of {self.length}"
        try:
            self._cache(prompt, config, options)
        except RuleError as error:
            return str(error)
        return ""

    def generate(self, inputs: Tensor | None, options: Options) -> PyTree:
        """Run `model.generate(inputs, **options)` through the bucketed programs.

        Raises:
            RuleError: a program can't be captured; the random number generators are restored.
        """
        rng_state = capture.rng_state(self.model.device)
        try:
            return self._generate(inputs, options)
        except Exception as error:  # a rule's, CUDA's, or the model's own
            reasons = [reason for program in self.programs.values() for reason in program.no_graph_reasons()]
            self._no_graph_reason = next(iter(reasons), "")
            if not self._no_graph_reason and not isinstance(error, RuleError | SizeError):
                raise
            capture.set_rng_state(self.model.device, rng_state)
            raise RuleError(self._no_graph_reason or str(error)) from error

    def _generate(self, inputs: Tensor | None, options: Options) -> PyTree:
        config = options.get("generation_config") or self.model.generation_config
        cache = self._cache(inputs if inputs is not None else options["input_ids"], config, options)
        cache.reset()
        self._active_cache, self._cached_tokens = cache, 0
        with ExitStack() as contexts:
            self._contexts = contexts
            contexts.enter_context(_replaced_forward(self.model, self._forward))
            if "encoder" in self.programs:
                contexts.enter_context(_replaced_forward(self._encoder, self.programs["encoder"]))
            # A decode step writes to the cache; to check all weights before each would take too long.
            for program in self.programs.values():
                contexts.enter_context(program.settled())
            return self.model.generate(inputs, **options, **{self._cache_name: cache}, disable_compile=True)

    def _cache(self, prompt: Tensor, config: Any, options: Options) -> Any:
        """Return the cache for the number of rows that the model is called with: each prompt's beams or samples."""
        times = [options.get(name, getattr(config, name)) or 1 for name in ("num_beams", "num_return_sequences")]
        rows = int(prompt.shape[0] * max(times))
        if rows not in self._caches:
            from subtensors.bucketed.padded_cache import padded_cache

            cache = padded_cache(self.model, self.length)
            # Layers make their memory in their first run, which must not be a trace or a capture.
            token = prompt[:1, :1].expand(rows, 1)
            once: Options = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1}
            once |= {"attention_mask": torch.ones_like(token), self._cache_name: cache, "disable_compile": True}
            try:
                self.model.generate(token, **once)
            except Exception as error:  # whatever a model raises for a cache that it doesn't know
                self._no_graph_reason = (
                    f"{type(self.model).__name__} takes no cache of fixed length: {summarize_error(error)}"
                )
                raise RuleError(self._no_graph_reason) from error
            self._caches[rows] = cache
        return self._caches[rows]

    def _decode(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the model's forward; raise if the tokens don't fit into the cache.

        Other code may call the model during a call, as a logits processor does for guidance. It uses a cache of its
        own, and runs the program without buckets.
        """
        if kwargs.get(self._cache_name) is not self._active_cache:
            return self.programs["decoder"].program(*args, **kwargs)
        self._cached_tokens += kwargs[self._tokens].shape[1]
        if self._cached_tokens > self.length:
            raise SizeError(f"the text got longer than {self.length}; raise max in st.Dim({self.seq.name!r}, ...)")
        return self._decoder(kwargs)(*args, **kwargs)

    def _decoder(self, kwargs: Mapping[str, PyTree]) -> P:
        """Return the program for a call: a mask of the cache alone, as BLOOM's, has no dim of new tokens."""
        lacking = [name for name, dims in self._dims.items() if _lacks(kwargs.get(name), dims)]
        name = " without ".join(["decoder", *lacking])
        if name not in self.programs:
            self.programs[name] = self._make({key: dims for key, dims in self._dims.items() if key not in lacking})
            self._contexts.enter_context(self.programs[name].settled())
        return self.programs[name]

    def release(self) -> None:
        """Drop graphs and caches."""
        for program in self.programs.values():
            program.release()
        self._caches.clear()


def prompt_dim(model: Any, dims: Mapping[str | int, PyTree]) -> Dim:
    """Return the Dim that the prompts of a generating model are padded on.

    Raises:
        RuleError: it doesn't generate, or its tokens aren't padded.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise RuleError(f"generate is a method of Hugging Face models, and {type(model).__name__} has none")
    found = (dims.get("input_ids") or {}).get(1)
    if not isinstance(found, Dim):
        raise RuleError("generate needs the dims that prompts are padded on: {'input_ids': {1: st.Dim(...)}}")
    return found


def _max_new_tokens(config: Any, options: Options, length: int) -> int:
    """Return the largest number of new tokens, as `generate` reads its options."""
    new = options.get("max_new_tokens", config.max_new_tokens)
    if new is not None:
        return int(new)
    total = options.get("max_length", config.max_length)
    # Hugging Face's default of 20 tokens is of new ones.
    return max(int(total) - length, 0) if total is not None and total != 20 else 20


def _accepted_dims(module: Any, dims: dict[str, dict[int, Dim]]) -> dict[str, dict[int, Dim]]:
    """Return the entries of `dims` whose arguments the module's forward takes."""
    names = inspect.signature(module.forward).parameters
    return {name: given for name, given in dims.items() if name in names}


def _lacks(x: PyTree, dims: Mapping[int, Dim]) -> bool:
    """Return whether an argument is a tensor without one of these dims."""
    return isinstance(x, Tensor) and x.dim() <= max(dims)


@contextmanager
def _replaced_forward(module: Any, forward: Callable[..., PyTree]) -> Iterator[None]:
    """A context in which a module has another `forward`."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before

"""`run.generate`: a Hugging Face model's own `generate`, whose prompts are padded and whose decode steps are replays.

During a call, the model's `forward` is replaced by a bucketed program with one more bucket, of size 1, for the decode
step, which has no padding. Keys and values are in a cache of fixed length that is kept from call to call, since graphs
read and write it in place. The encoder of an encoder-decoder is a bucketed program of its own.
"""

from __future__ import annotations

import functools
import inspect
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from subtensors.bucketed.call_key import autocast_dtype
from subtensors.bucketed.statistics import Fallbacks, summarize_error
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.dispatch.ops.tree import Args, PyTree
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.dims import Dim

CACHE_NAMES = "cache", "past_key_values"
"""The names of the argument that is a cache: since transformers 5.24, and before."""

UNSUPPORTED_OPTIONS = (
    *CACHE_NAMES,
    "assistant_model",
    "assistant_early_exit",
    "custom_generate",
    "cache_implementation",
    "penalty_alpha",
    "prompt_lookup_num_tokens",
    "output_attentions",
)
"""Options of `generate` that ask for another cache, another loop, or attention over a cache of the text's length."""


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


_LOCKS: WeakKeyDictionary[nn.Module, threading.RLock] = WeakKeyDictionary()
"""Held while a model's `forward` is replaced: runners of one model, in several threads, take turns."""


class ResumedStreamer:
    """A streamer for a text that may start over: tokens that it was given are not given to it again.

    Args:
        streamer: the caller's.
    """

    def __init__(self, streamer: Any) -> None:
        self._streamer = streamer
        self._given = self._position = 0

    def start_over(self) -> None:
        """Expect the text from its prompt on."""
        self._position = 0

    def put(self, tokens: Tensor) -> None:
        """Give the next tokens to the streamer, unless it has them."""
        self._position += 1
        if self._position > self._given:
            self._given = self._position
            self._streamer.put(tokens)

    def end(self) -> None:
        """Tell the streamer that the text has ended."""
        self._streamer.end()


@dataclass
class _Call:
    """One call of `generate`.

    Args:
        cache: of its decode steps.
        contexts: what ends with it.
        thread: that called.
        cached_tokens: how many the cache has.
    """

    cache: object
    contexts: ExitStack
    thread: int = field(default_factory=threading.get_ident)
    cached_tokens: int = 0


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
        # An adapter's `generate`, as PEFT's, calls the `forward` of the model inside.
        self._generate_of, model = model, getattr(model, "get_base_model", lambda: model)()
        self.model, self.seq, self.length = model, seq, seq.max
        self.programs: dict[str, P] = {}
        self._caches: dict[object, Any] = {}
        self._call: _Call | None = None
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
        self._tokens_name = next(iter(dims))
        names = inspect.signature(model.forward).parameters
        self._cache_name = next((name for name in CACHE_NAMES if name in names), CACHE_NAMES[-1])
        self._dims = _accepted_dims(model, dims)
        self._make: Callable[[Mapping[str, object]], P] = functools.partial(make, model.forward)
        self.programs["decoder"] = self._make(self._dims)
        # `generate` reads the model's parameters from the signature.
        self._forward = functools.update_wrapper(functools.partial(self._decode), model.forward)

    def run(self, args: Args, options: Options, fallbacks: Fallbacks) -> PyTree:
        """Run `model.generate(*args, **options)` through the bucketed programs or, counting the reason, unchanged."""
        options = {**dict(zip(inspect.signature(self.model.generate).parameters, args, strict=False)), **options}
        if options.get("streamer") is not None:
            options["streamer"] = ResumedStreamer(options["streamer"])
        if reason := self.no_graph_reason(options):
            fallbacks.refuse(reason)
            result = self._generate_of.generate(**options)
        else:
            try:
                return self.generate(options)
            except RuleError as error:
                reason = str(error)
            fallbacks.refuse(reason)
            if isinstance(streamer := options.get("streamer"), ResumedStreamer):
                streamer.start_over()
            try:
                result = self._generate_of.generate(**options)
            except Exception:  # whatever the model raises, and raised again
                if self._no_graph_reason:  # which is the caller's error, and says nothing of graphs
                    self.release()
                raise
        fallbacks.count(reason)
        return result

    def no_graph_reason(self, options: Options) -> str:
        """Return the reason why the bucketed programs can't generate, or "" if they can."""
        if self._no_graph_reason:
            return self._no_graph_reason
        if self._call is not None:
            return "generate is called within a call of it"
        for name in UNSUPPORTED_OPTIONS:
            if self._option(options, name) not in (None, False):
                return f"generate is asked for {name}"
        if self._option(options, "use_cache") is False:
            return "generate is asked for no cache"
        prompt = _prompt(options)
        if not isinstance(prompt, Tensor) or prompt.dim() != 2:
            return "generate is given something other than tokens"
        length = 1 if self.model.config.is_encoder_decoder else prompt.shape[1]
        given = options.get("decoder_input_ids")
        length = given.shape[1] if given is not None else length
        if length + self._max_new_tokens(options, length) > self.length or prompt.shape[1] > self.length:
            return f"a text may get longer than {self.seq.name}'s max of {self.length}"
        try:
            self._cache(prompt, options)
        except RuleError as error:
            return str(error)
        return ""

    def generate(self, options: Options) -> PyTree:
        """Run `model.generate(**options)` through the bucketed programs.

        Raises:
            RuleError: a program can't be captured; the random number generators are restored.
        """
        rng_state = capture.rng_state(self.model.device)
        try:
            return self._generate(options)
        except Exception as error:  # a rule's, CUDA's, or the model's own
            reasons = [reason for program in self.programs.values() for reason in program.no_graph_reasons()]
            self._no_graph_reason = next(iter(reasons), "")
            if not self._no_graph_reason and not isinstance(error, RuleError | SizeError):
                raise
            capture.set_rng_state(self.model.device, rng_state)
            raise RuleError(self._no_graph_reason or str(error)) from error

    def _generate(self, options: Options) -> PyTree:
        with ExitStack() as contexts:
            contexts.enter_context(_LOCKS.setdefault(self.model, threading.RLock()))
            cache = self._cache(_prompt(options), options)
            cache.reset()
            self._call = call = _Call(cache, contexts)
            contexts.callback(setattr, self, "_call", None)
            contexts.enter_context(_replaced_forward(self.model, self._forward))
            if "encoder" in self.programs:
                encode = functools.update_wrapper(functools.partial(self._encode), self._encoder.forward)
                contexts.enter_context(_replaced_forward(self._encoder, encode))
            # A decode step writes to the cache; to check all weights before each would take too long.
            for program in self.programs.values():
                contexts.enter_context(program.settled())
            result = self._generate_of.generate(**{**options, self._cache_name: cache, "disable_compile": True})
        if isinstance(result, dict):
            from subtensors.bucketed.padded_cache import growing_copy

            for name in [name for name, x in result.items() if x is cache]:
                result[name] = growing_copy(cache, call.cached_tokens)
        return result

    def _cache(self, prompt: Tensor, options: Options) -> Any:
        """Return the cache for the number of rows that the model is called with: each prompt's beams or samples."""
        times = [self._option(options, name) or 1 for name in ("num_beams", "num_return_sequences")]
        rows, device = int(prompt.shape[0] * max(times)), self.model.device
        key = rows, device, self.model.dtype, autocast_dtype(device.type)
        if key not in self._caches:
            # Layers make their memory in their first run, which must not be a trace or a capture.
            token = torch.zeros(rows, 1, dtype=torch.long, device=device)
            rng_state = capture.rng_state(device)
            try:
                with torch.inference_mode(False), torch.no_grad():
                    from subtensors.bucketed.padded_cache import padded_cache

                    cache = padded_cache(self.model, self.length)
                    once = {"input_ids": token, self._tokens_name: token, self._cache_name: cache}
                    self.model(**once, use_cache=True)
            except Exception as error:  # whatever a model raises for a cache that it doesn't know
                self._no_graph_reason = (
                    f"{type(self.model).__name__} takes no cache of fixed length: {summarize_error(error)}"
                )
                raise RuleError(self._no_graph_reason) from error
            finally:
                capture.set_rng_state(device, rng_state)
            self._caches[key] = cache
        return self._caches[key]

    def _option(self, options: Options, name: str) -> PyTree:
        """Return an option as `generate` reads it: an argument's, the given config's or else the model's."""
        if name in options:
            return options[name]
        given = getattr(options.get("generation_config"), name, None)
        return given if given is not None else getattr(self.model.generation_config, name, None)

    def _max_new_tokens(self, options: Options, length: int) -> int:
        """Return the largest number of new tokens, as `generate` reads its options."""
        new = self._option(options, "max_new_tokens")
        if new is not None:
            return int(new)
        total = self._option(options, "max_length")
        # Hugging Face's default of 20 tokens is of new ones.
        return max(int(total) - length, 0) if total is not None and total != 20 else 20

    def _encode(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the encoder's forward: the program without buckets where another thread calls the model."""
        encoder, call = self.programs["encoder"], self._call
        is_own = call is not None and call.thread == threading.get_ident()
        return (encoder if is_own else encoder.program)(*args, **kwargs)

    def _decode(self, *args: PyTree, **kwargs: PyTree) -> PyTree:
        """Run the model's forward; raise if the tokens don't fit into the cache.

        Other code may call the model during a call, as a logits processor does for guidance. It uses a cache of its
        own, and runs the program without buckets.
        """
        call, tokens = self._call, kwargs.get(self._tokens_name)
        if call is None or kwargs.get(self._cache_name) is not call.cache:
            return self.programs["decoder"].program(*args, **kwargs)
        if tokens is None:
            raise RuleError("generate begins with something other than tokens")
        call.cached_tokens += tokens.shape[1]
        if call.cached_tokens > self.length:
            raise SizeError(f"the text got longer than {self.length}; raise max in st.Dim({self.seq.name!r}, ...)")
        return self._decoder(kwargs, call.contexts)(*args, **kwargs)

    def _decoder(self, kwargs: Mapping[str, PyTree], contexts: ExitStack) -> P:
        """Return the program for a call: a mask of the cache alone, as BLOOM's, has no dim of new tokens."""
        lacking = [name for name, dims in self._dims.items() if _lacks(kwargs.get(name), dims)]
        name = " without ".join(["decoder", *lacking])
        if name not in self.programs:
            self.programs[name] = self._make({key: dims for key, dims in self._dims.items() if key not in lacking})
            contexts.enter_context(self.programs[name].settled())
        return self.programs[name]

    def release(self) -> None:
        """Drop graphs and caches, and what is known of calls that can't have them."""
        self._no_graph_reason = ""
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


def _prompt(options: Options) -> PyTree:
    """Return the tokens to go on from, under the names that `generate` takes them."""
    inputs = options.get("inputs")
    return inputs if inputs is not None else options.get("input_ids")


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

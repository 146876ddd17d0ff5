"""`run.generate`: a Hugging Face model's own `generate`, whose prompts are padded and whose decode steps are replays.

During a call, the model's `forward` is replaced by a bucketed program with one more bucket, of size 1, for the decode
step, which has no padding. Keys and values are in a cache of fixed length that is kept from call to call, since graphs
read and write it in place. The encoder of an encoder-decoder is a bucketed program of its own.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from subtensors.bucketed.fallbacks import summarize_error
from subtensors.dispatch.graphs import capture
from subtensors.dispatch.ops.errors import RuleError, SizeError
from subtensors.sizes.bucket_policies import Sizes
from subtensors.sizes.dims import Dim

if TYPE_CHECKING:
    from subtensors.bucketed.runner import Bucketed

OWN_WAYS = ("past_key_values", "assistant_model", "custom_generate", "cache_implementation", "prompt_lookup_num_tokens")
"""Arguments of `generate` that ask for another cache or another loop."""


class Generation:
    """The programs and caches that a model generates with.

    Args:
        run: a bucketed Hugging Face model.
        seq: the Dim that its prompts are padded on; its max is the most tokens of a prompt and its continuation.
    """

    def __init__(self, run: Bucketed, seq: Dim) -> None:
        model: Any = run.program
        make = functools.partial(_likewise, run)
        if seq.max is None:
            raise ValueError(f"generate needs the most tokens of a text: give Dim {seq.name!r} a max")
        self.model, self.seq, self.length = model, seq, seq.max
        self.programs: dict[str, Bucketed] = {}
        self._caches: dict[int, Any] = {}
        self._cache_now: Any = None
        """The cache of the current call."""
        self._filled = 0
        self._refusal = ""
        """The reason why a part of a call has no graph, or ""; later calls don't try again."""
        one_or_more = Sizes(sorted({1, *seq.buckets}))
        if model.config.is_encoder_decoder:
            new = Dim(f"{seq.name}_new", max=seq.max, min=1, buckets=one_or_more)
            self._encoder: Any = model.get_encoder()
            self.programs["encoder"] = make(
                self._encoder.forward, _taken(self._encoder, {"input_ids": {1: seq}, "attention_mask": {1: seq}})
            )
            decoder = {"decoder_input_ids": {1: new}, "decoder_attention_mask": {2: new}}
            dims = {**decoder, "encoder_outputs": {1: seq}, "attention_mask": {1: seq}}
        else:
            new = Dim(seq.name, max=seq.max, min=1, buckets=one_or_more)
            dims = {"input_ids": {1: new}, "attention_mask": {2: new}, "position_ids": {1: new}}
        self._tokens = next(iter(dims))
        self.programs["decoder"] = make(model.forward, _taken(model, dims))
        # `generate` reads from the signature what the model takes.
        self._forward = functools.update_wrapper(functools.partial(self._decode), model.forward)

    def answer(self, inputs: Tensor | None, options: dict[str, Any], note: Callable[[str], None]) -> Any:
        """Run `model.generate(inputs, **options)` through the bucketed programs or, noting the reason, unchanged."""
        why = self.refusal(inputs, options)
        if not why:
            try:
                return self.generate(inputs, options)
            except RuleError as error:
                why = str(error)
        note(why)
        return self.model.generate(inputs, **options)

    def refusal(self, inputs: Tensor | None, options: Mapping[str, Any]) -> str:
        """Return the reason why the bucketed programs can't generate, or "" if they can."""
        asked = [name for name in OWN_WAYS if options.get(name) is not None]
        if self._refusal:
            return self._refusal
        if asked:
            return f"generate is asked for {asked[0]}"
        config = options.get("generation_config") or self.model.generation_config
        if options.get("use_cache", config.use_cache) is False:
            return "generate is asked for no cache"
        prompt = inputs if inputs is not None else options.get("input_ids")
        if not isinstance(prompt, Tensor) or prompt.dim() != 2:
            return "generate is given something else than tokens"
        length = 1 if self.model.config.is_encoder_decoder else prompt.shape[1]
        given = options.get("decoder_input_ids")
        length = given.shape[1] if given is not None else length
        if length + _most_new(config, options, length) > self.length or prompt.shape[1] > self.length:
            return f"a text may get longer than {self.seq.name}'s max of {self.length}"
        try:
            self._cache(prompt, config, options)
        except RuleError as error:
            return str(error)
        return ""

    def generate(self, inputs: Tensor | None, options: dict[str, Any]) -> Any:
        """Run `model.generate(inputs, **options)` through the bucketed programs.

        Raises:
            RuleError: a program can't be captured; the random number generators are restored.
        """
        place = capture.rng_state(self.model.device)
        try:
            return self._generate(inputs, options)
        except Exception as error:  # of a rule, of CUDA's, or the model's own
            buckets = [b for program in self.programs.values() for b in program.recorder.buckets.values()]
            self._refusal = next((b.refusal for b in buckets if b.refusal), "")
            if not self._refusal and not isinstance(error, RuleError | SizeError):
                raise
            capture.set_rng_state(self.model.device, place)
            raise RuleError(self._refusal or str(error)) from error

    def _generate(self, inputs: Tensor | None, options: dict[str, Any]) -> Any:
        config = options.get("generation_config") or self.model.generation_config
        cache = self._cache(inputs if inputs is not None else options["input_ids"], config, options)
        cache.reset()
        self._cache_now, self._filled = cache, 0
        with ExitStack() as meanwhile:
            meanwhile.enter_context(_forward_of(self.model, self._forward))
            if "encoder" in self.programs:
                meanwhile.enter_context(_forward_of(self._encoder, self.programs["encoder"]))
            # A step writes to the cache, and has no time to look at all weights first.
            for program in self.programs.values():
                meanwhile.enter_context(program.settled())
            return self.model.generate(inputs, **options, past_key_values=cache, disable_compile=True)

    def _cache(self, prompt: Tensor, config: Any, options: Mapping[str, Any]) -> Any:
        """Return the cache for the number of rows that the model is called with: each prompt's beams or samples."""
        times = [options.get(name, getattr(config, name)) or 1 for name in ("num_beams", "num_return_sequences")]
        rows = int(prompt.shape[0] * max(times))
        if rows not in self._caches:
            from subtensors.bucketed.generation.padded_cache import padded_cache

            cache = padded_cache(self.model, self.length)
            # Layers make their memory in their first run, which must not be a trace or a capture.
            token = prompt[:1, :1].expand(rows, 1)
            once: dict[str, Any] = {"do_sample": False, "num_beams": 1, "num_return_sequences": 1, "max_new_tokens": 1}
            once |= {"attention_mask": torch.ones_like(token), "past_key_values": cache, "disable_compile": True}
            try:
                self.model.generate(token, **once)
            except Exception as error:  # whatever a model says of a cache that it doesn't know
                self._refusal = f"{type(self.model).__name__} takes no cache of fixed length: {summarize_error(error)}"
                raise RuleError(self._refusal) from error
            self._caches[rows] = cache
        return self._caches[rows]

    def _decode(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model's forward; raise if the tokens don't fit into the cache.

        Others may also call the model during a call, as a logits processor does for guidance. They use a cache of their
        own, and run the program without buckets.
        """
        if kwargs.get("past_key_values") is not self._cache_now:
            return self.programs["decoder"].program(*args, **kwargs)
        self._filled += kwargs[self._tokens].shape[1]
        if self._filled > self.length:
            raise SizeError(f"the text got longer than {self.length}; raise max in st.Dim({self.seq.name!r}, ...)")
        return self.programs["decoder"](*args, **kwargs)

    def release(self) -> None:
        """Drop graphs and caches."""
        for program in self.programs.values():
            program.release()
        self._caches.clear()


def tokens_dim(model: Any, dims: Mapping[Any, Any]) -> Dim:
    """Return the Dim that the prompts of a generating model are padded on.

    Raises:
        RuleError: it doesn't generate, or its tokens aren't padded.
    """
    if not isinstance(model, nn.Module) or not callable(getattr(model, "generate", None)):
        raise RuleError(f"generate is of Hugging Face models that have it, and {type(model).__name__} doesn't")
    found = (dims.get("input_ids") or {}).get(1)
    if not isinstance(found, Dim):
        raise RuleError("generate needs dims that say what prompts are padded on: {'input_ids': {1: st.Dim(...)}}")
    return found


def _most_new(config: Any, options: Mapping[str, Any], length: int) -> int:
    """The largest number of new tokens, as `generate` reads its options."""
    new = options.get("max_new_tokens", config.max_new_tokens)
    if new is not None:
        return int(new)
    total = options.get("max_length", config.max_length)
    # Hugging Face's default of 20 tokens is of new ones.
    return max(int(total) - length, 0) if total is not None and total != 20 else 20


def _likewise(run: Bucketed, program: Callable[..., Any], dims: Mapping[Any, Any]) -> Bucketed:
    """Bucket another program with the options of `run`; calls of it that have no graph are errors."""
    r = run.recorder
    made = type(run)(program, dims, r.max_graphs, r.memory_limit, "capture", None, r.compile_options)
    made.fallbacks.are_errors = True
    made.visits.are_bounded = False  # there is one cache for each number of rows
    return made


def _taken(module: Any, dims: dict[str, Any]) -> dict[str, Any]:
    """The entries of `dims` whose arguments the module's forward takes."""
    names = inspect.signature(module.forward).parameters
    return {name: given for name, given in dims.items() if name in names}


@contextmanager
def _forward_of(module: Any, forward: Callable[..., Any]) -> Iterator[None]:
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

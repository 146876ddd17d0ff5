"""Checks of a bucketed call: the bucket's results beside those of the plain program on unpadded arguments.

A padded size that the program computes with in Python, a rule that is wrong, a value that Python keeps and no guard
watches: whatever makes a bucket compute something else shows where both run on the same call.

```
    call -+-> plain program: results, gradients, writes --> state restored --.
          |                                                                  v
          '-> bucket: first run or replay: the same ------------------> compare (compare_runs.py)
                                                                             |-- equal: the bucket's results
                                                                             '-- not: state restored; the plain
                                                                                 program answers, now and later
```

A call that draws random numbers can't be compared, nor can one whose writes can't be undone; `stats()` counts both. One
draws if a second run in a row moves the generators, too, or has other results: not where the program seeds them.
What a call can't show is compared in two runs aside, on padded and on unpadded arguments: without dropout, with other
numbers for zeros, with rows of one length.
"""

from __future__ import annotations

import operator
import weakref
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Literal, TypeAlias
from weakref import WeakSet

import torch
from torch import Tensor

from subtensors.bucketed.bucket import Bucket, Call
from subtensors.bucketed.call_cache import CachedCall
from subtensors.bucketed.call_key import READ_IN_PLACE, callers_tensors
from subtensors.bucketed.call_spec import CallSpec, padded_leaves
from subtensors.bucketed.compare_runs import (
    NOISE_RUNS,
    CheckReport,
    Observed,
    WithoutDropout,
    all_zero,
    filled,
    first_difference,
    full_float32,
    moved,
    observe,
    uniform_batches,
    unit_in_the_last_place,
)
from subtensors.bucketed.outputs import plain_result
from subtensors.bucketed.program_state import State
from subtensors.bucketed.reachable_state import generators_in
from subtensors.bucketed.side_effects import ObjectSnapshot, Snapshot, dense_of, is_room_for
from subtensors.bucketed.statistics import summarize_error
from subtensors.bucketed.trained_bucket import TrainedBucket
from subtensors.dispatch.graphs.collectives import is_distributed
from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.tree import PyTree
from subtensors.dispatch.padded.size_conditions import HostSize
from subtensors.dispatch.torch_internals import autograd
from subtensors.padded.padded_tensor import PaddedTensor
from subtensors.padded.size_debug import padded_size_lines

Schedule: TypeAlias = "Literal['first', False] | int"

DRAWS = "it draws random numbers"
"""The reason why a call that does is not compared."""

UNKNOWN = "it draws random numbers and takes a padded size as a number, so that no comparison shows what that does"
"""The reason why the program runs at its true sizes then."""

COPIES = 5
"""The copies of what a program writes to that there are at once at most: two snapshots, and values of three runs."""

ASIDE_PRECISION = 1e-5
"""The precision of runs aside, at least."""


@dataclass
class Expected:
    """The outcome of the plain program for a call.

    Args:
        result: its result, kept only if the writes of the run can't be undone: it is then the call's answer.
        is_final: True in that case.
        observed: of the run; None if it can't be compared.
        written: the tensors that it wrote to, by name.
        not_checked: the reason why it can't be compared, or "".
        error: raised by the program, which the call is to raise too.
    """

    result: PyTree = None
    is_final: bool = False
    observed: Observed | None = None
    written: dict[str, Tensor] = field(default_factory=dict)
    not_checked: str = ""
    error: Exception | None = None


class Checker:
    """Runs the plain program for calls that are to be checked, and compares.

    Args:
        state: of the program.
        schedule: "first" for each bucket's first calls, an int for every n-th call as well, False for none.
    """

    def __init__(self, state: State, schedule: Schedule) -> None:
        self._state, self._schedule = state, schedule
        self.every = 0 if isinstance(schedule, (str, bool)) else schedule  # one in so many calls is checked; 0: none
        self._calls = 0
        self._compared_aside: WeakSet[Bucket] = WeakSet()
        """The buckets whose calls can't be compared, and that were compared in runs aside."""
        self._shown: dict[int, set[int]] = {}
        """The zeros that runs aside have filled, for each family of calls."""
        self._large: dict[int, weakref.ref[Tensor]] = {}
        """By id, tensors that the program wrote to, and of which no snapshot had a copy: the next one has."""
        self._noise: dict[int, dict[str, float]] = {}
        """For each family of calls, how far rounding goes, as far as that was measured."""
        self._places: list[str] = []  # of the arguments of the call that is checked
        self.checked = 0  # calls that were compared with the plain program
        self.not_checked: Counter[str] = Counter()
        """Calls that were due for a check and could not be compared, by reason."""

    def is_due(self, call: CachedCall) -> bool:
        """Return whether a call is to be checked.

        Those at a bucket's first two true sizes are, since what depends on the size shows at two, at 0 and 1, which are
        broadcast, and at the smallest yet, from which on a count of blocks is that of the bucket. So is one that
        decides a branch otherwise than the bucket, and that at any new size where Python got one as a number. The size
        of a ragged batch is that of its longest row.
        """
        bucket, spec = call.bucket, call.spec
        if self._schedule is False or bucket is None or spec is None or bucket.no_graph_reason:
            return False
        if autograd.has_saved_tensor_hooks():  # a checkpoint's, which count what is saved
            return False
        self._calls += 1
        if is_distributed() and not bucket.is_captured:
            return False  # it may call collectives, as its first run will tell; its second call is due
        if self.every and self._calls % self.every == 0:
            return True
        if spec.true_sizes in bucket.checked_sizes or self._state.no_capture_reason():
            return False
        longest = _longest(spec.true_sizes)
        is_smallest = not _are_above(longest, bucket.smallest_checked)
        is_early = len(bucket.checked_sizes) < 2 or any(n < 2 for n in spec.sizes) or is_smallest
        is_new_number = bucket.conditions.is_number_read and longest not in bucket.checked_longest
        if is_new_number or bucket.conditions.unmet(spec.host):
            return True
        if is_early and not self._is_room():
            bucket.checked_sizes[spec.true_sizes] = False  # is asked once a size
            return False
        return is_early

    def answer_and_check(
        self, call: CachedCall, leaves: list[PyTree], answer: Callable[[], PyTree], fall_back: Callable[..., PyTree]
    ) -> tuple[PyTree, CheckReport]:
        """Answer a call, and compare the answer with the plain program's; if they differ, that is the answer.

        A call without a right answer gets None, and its bucket `has_no_answer`.

        Args:
            call: has a bucket.
            leaves: of the call.
            answer: answers the call.
            fall_back: answers it at its true sizes, for a reason and an error or None.
        """
        bucket, spec, elements = call.bucket, call.spec, call.elements
        assert bucket is not None
        assert spec is not None
        sizes = {dim.name: size for dim, size in zip(spec.dims, spec.sizes, strict=True)}
        self._places = [f"argument {place.removeprefix('argument ')}" for place in call.places]
        before = self.snapshot(bucket, leaves)
        expected = self._run_plain(bucket, leaves, spec.true_sizes, before)
        if expected.is_final:
            return expected.result, self._report(sizes, expected.not_checked)
        is_replay, calls = bucket.is_captured, bucket.statistics.calls
        if expected.error is not None:
            call.calls -= 1  # the next one is due, too, or the bucket would answer it
            return fall_back(expected.not_checked, expected.error), self._report(sizes, expected.not_checked)

        def refuse(difference: str) -> tuple[PyTree, CheckReport]:
            lines = padded_size_lines(lambda: _call_here(bucket.call, padded_leaves(leaves, spec, bucket.device)))
            before.restore()
            bucket.checked_sizes[spec.true_sizes] = False
            if unmet := bucket.unmet_condition(spec):
                call.reason = f"{unmet}, and its results differ"
                return fall_back(call.reason, None), CheckReport(sizes, difference, lines=lines)
            head = "" if difference == UNKNOWN else "its results differ from the program's: "
            bucket.no_graph_reason = head + "; ".join([difference, *lines])
            bucket.drop()
            answered = None if bucket.has_no_answer else fall_back(bucket.no_graph_reason, None)
            return answered, CheckReport(sizes, difference, lines=lines)

        if difference := self._compare_aside(bucket, leaves, spec, expected.not_checked, before):
            # A ragged batch runs on padded rows in eager mode, too.
            bucket.has_no_answer = _is_ragged(spec)
            return refuse(difference)
        result = answer()
        ran_padded = bucket.statistics.calls > calls
        if reason := expected.not_checked or (bucket.no_graph_reason or bucket.unmet_condition(spec)) * (
            not ran_padded
        ):
            return result, self._report(sizes, reason)
        difference = self._compare(bucket, leaves, expected, result, before)
        if not difference and not (isinstance(bucket, TrainedBucket) and bucket.is_differentiable):
            return result, CheckReport(sizes)
        before.restore()
        bucket.count_call(elements, is_hit=is_replay, by=-1)
        if not difference:
            result = answer()  # the comparison took gradients through the call's graph
            bucket.statistics.hits -= not (is_replay or bucket.no_graph_reason)
            return result, CheckReport(sizes)
        return refuse(difference)

    def _compare_aside(
        self, bucket: Bucket, leaves: Sequence[PyTree], spec: CallSpec, not_checked: str, before: Snapshot
    ) -> str:
        """Return the first difference that the call itself can't show, or "".

        The program is run on padded and on unpadded arguments: without dropout, with rows of one length for a ragged
        batch, and with other numbers for tensors that are zero, which hide what they are multiplied with. Buckets whose
        calls nothing else compares need that once each; what a zero hides, the first bucket with padding shows for all.
        """
        if not before.can_restore():
            return ""
        shown = self._shown.setdefault(hash(spec.family_key), set())
        own = {-1 - i: x for i, x in enumerate(leaves) if not isinstance(x, READ_IN_PLACE)}
        named = own | {id(t): t for t in self._state.tensors()}
        zeros = all_zero({name: x for name, x in named.items() if name not in shown})
        needs_run = bucket not in self._compared_aside or bucket.conditions.is_number_read
        is_alone = (not_checked == DRAWS or _is_ragged(spec)) and needs_run
        if not zeros and not is_alone:
            return ""
        given = uniform_batches(filled(x) if -1 - i in zeros else x for i, x in enumerate(leaves))
        own_zeros = [t for name, t in zeros.items() if name >= 0]

        def run(unit: float = 0.0, direction: int = 0, padded: CallSpec | None = None) -> Observed | None:
            return self._run_again(bucket, given, {}, unit, direction, before, own_zeros, padded, bool(not_checked))

        expected, got = run(), run(padded=spec)
        found = ""
        if expected is None and not_checked == DRAWS and bucket.conditions.is_number_read:
            return UNKNOWN
        if expected is not None and got is not None:
            unit = max(self._precision(bucket, leaves), ASIDE_PRECISION)
            found = first_difference(got, expected, unit, lambda direction: run(unit, direction))
        if not found and all(n < most for n, most in zip(spec.sizes, spec.buckets, strict=True)):
            self._compared_aside.add(bucket)
            shown.update(zeros)
        return found and f"{found}, in a run without dropout, with numbers for zeros and rows of one length"

    def _report(self, sizes: Mapping[str, int], reason: str) -> CheckReport:
        """Count a call that can't be compared, and report why."""
        self.not_checked[reason] += 1
        return CheckReport(sizes, not_checked=reason)

    def snapshot(self, bucket: Bucket, leaves: Sequence[PyTree], extra: Iterable[Tensor] = ()) -> Snapshot:
        """Return a snapshot of what a call may write to: the state, modules, and tensors and objects it is given."""
        given = [dense_of(x) for x in leaves if isinstance(x, Tensor)]
        others = [x for x in leaves if not isinstance(x, Tensor)]
        modules = [module for root in self._state.guard.roots for module in root.modules()]
        undo, own = [ObjectSnapshot([*others, *modules]).restore], generators_in(others)
        tensors = [*extra, *given, *callers_tensors(others)]
        always = self._known_large() if self._is_room() else []
        return Snapshot(self._state, [bucket.device], always, tensors, undo, own)

    def _known_large(self) -> list[Tensor]:
        """Return what the program is known to write to, with what its optimizers made of it since."""
        found = [t for ref in self._large.values() if (t := ref()) is not None]
        return list({id(t): t for t in [*found, *self._state.stepped_tensors()]}.values()) if found else []

    def _is_room(self) -> bool:
        """Return whether a call's writes can be undone, as far as they are known."""
        return is_room_for(self._known_large(), COPIES)

    def _run_plain(
        self, bucket: Bucket, leaves: Sequence[PyTree], sizes: tuple[HostSize, ...], before: Snapshot
    ) -> Expected:
        """Run the plain program on unpadded arguments, and undo what it wrote since the snapshot."""
        expected, has_result = Expected(), False
        try:
            expected.result, has_result = _call_here(bucket.call, [_unpadded(x) for x in leaves]), True
        except RuleError as error:  # what the program does can't be captured; the call itself will say so
            expected.not_checked = summarize_error(error)
        except Exception as error:
            expected.not_checked, expected.error = f"the plain program raises {summarize_error(error)}", error
        else:
            try:
                written = before.written_ids()
                expected.written = {name: t for name, t in self._state.named_tensors().items() if id(t) in written}
                expected.observed = self._observe(expected.result, leaves, expected.written)
            except Exception as error:  # of a result whose gradients can't be taken
                expected.not_checked = f"its results can't be compared: {summarize_error(error)}"
        if before.has_drawn() and not expected.not_checked:
            again = self._run_again(bucket, leaves, expected.written, draws=True) if before.can_restore() else None
            if again is None or first_difference(again, expected.observed or {}, 0.0, lambda _: None):
                expected.not_checked = DRAWS
        if before.can_restore():
            before.restore()
            expected.result = None
        else:
            if expected.error is not None:
                raise expected.error  # another run would write once more
            expected.is_final = has_result
            self._large = {id(t): weakref.ref(t) for t in [*self._known_large(), *before.lost()]}
            expected.not_checked = "it writes to a tensor that is too large for a copy"
        if expected.error is None:
            bucket.checked_sizes[sizes] = not expected.not_checked  # until they differ
            bucket.checked_longest.add(longest := _longest(sizes))
            if not _are_above(longest, bucket.smallest_checked):
                others = [s for s in bucket.smallest_checked if not _are_above(s, [longest])]
                bucket.smallest_checked = [longest, *others]
        return expected

    def _observe(
        self,
        result: PyTree,
        leaves: Sequence[PyTree],
        written: Mapping[str, Tensor],
        unit: float = 0.0,
        direction: int = 0,
        keeps_graph: bool = False,
    ) -> Observed:
        inputs: dict[str, Tensor] = {}
        if torch.is_grad_enabled():
            given = {place: x for place, x in zip(self._places, leaves, strict=True) if isinstance(x, Tensor)}
            inputs = {name: t for name, t in (given | self._state.named_tensors()).items() if t.requires_grad}
        return observe(result, leaves, inputs, written, unit, direction, keeps_graph)

    def _compare(
        self, bucket: Bucket, leaves: Sequence[PyTree], expected: Expected, result: PyTree, start: Snapshot
    ) -> str:
        """Return the first difference between a bucket's result and the plain program's, or ""."""
        self.checked += 1
        got = self._observe(result, leaves, expected.written, keeps_graph=bool(bucket.no_graph_reason))
        unit = self._precision(bucket, leaves)
        again = partial(self._run_again, bucket, leaves, expected.written, unit, start=start)
        known = self._noise.setdefault(hash(bucket.spec.family_key), {})
        return first_difference(got, expected.observed or {}, unit, again, known)

    def _precision(self, bucket: Bucket, leaves: Sequence[PyTree]) -> float:
        return unit_in_the_last_place([*self._state.tensors(), *leaves], bucket.conditions.dtypes)

    def _run_again(
        self,
        bucket: Bucket,
        leaves: Sequence[PyTree],
        written: Mapping[str, Tensor],
        unit: float = 0.0,
        direction: int = 0,
        start: Snapshot | None = None,
        zeros: Collection[Tensor] | None = None,
        padded: CallSpec | None = None,
        draws: bool = False,
    ) -> Observed | None:
        """Run the program with other numbers from the start, and undo what it wrote; None if that raises.

        Args:
            bucket: of the call.
            leaves: the arguments.
            written: the tensors that the program may have written to, by name.
            unit: how far parameters, arguments and cotangents are moved, as a fraction of each.
            direction: in which of `NOISE_RUNS`; the last is none: there it runs without TF32.
            start: a snapshot of what the program starts from; by default the present.
            zeros: the tensors of the state to fill in a run aside, which has neither TF32 nor dropout.
            padded: the spec of the call, for a run on padded arguments.
            draws: return None if the run draws random numbers.
        """
        is_aside, is_last = zeros is not None, direction == NOISE_RUNS - 1
        unit = 0.0 if is_last else unit
        parameters = [t for t in self._state.tensors() if unit and (t.is_floating_point() or t.is_complex())]
        before = self.snapshot(bucket, leaves, [*parameters, *(zeros or ())])
        if start is not None:
            start.restore()
        try:
            call, given = bucket.call, [_unpadded(x) for x in leaves]
            if padded is not None:
                call, given = bucket.call_program, padded_leaves(leaves, padded, bucket.device)
            is_moved = [isinstance(x, Tensor) and not isinstance(x, READ_IN_PLACE) for x in given]
            given = [moved(x, unit, direction) if m else x for x, m in zip(given, is_moved, strict=True)]
            with torch.no_grad(), autograd.without_version_bumps([*parameters, *(zeros or ())]):
                for t in filter(before.has_copy, zeros or ()):
                    t.copy_(filled(t))
                for t in filter(before.has_copy, parameters):
                    t.copy_(moved(t, unit, direction))
            with (
                full_float32() if is_aside or is_last else nullcontext(),
                WithoutDropout() if is_aside else nullcontext(),
            ):
                result = _call_here(call, given)
                observed = self._observe(result, given if padded is None else leaves, written, unit, direction)
            return None if draws and before.has_drawn() else observed
        except Exception:  # such as an assertion of the program's, which the call itself raises, too
            return None
        finally:
            before.restore()


def _longest(sizes: tuple[HostSize, ...]) -> tuple[int, ...]:
    """Return sizes with that of the longest row for a ragged batch, whose rows Python never gets as numbers."""
    return tuple([n if isinstance(n, int) else max(n, default=0) for n in sizes])


def _are_above(sizes: tuple[int, ...], others: Iterable[tuple[int, ...]]) -> bool:
    """Return whether sizes are nowhere smaller than some of the others."""
    return any(all(map(operator.le, other, sizes)) for other in others)


def _is_ragged(spec: CallSpec) -> bool:
    """Return whether a PaddedTensor of the caller's has rows of several lengths."""
    return any(len(caller.shape) > 1 for caller in spec.caller_sizes)


def _call_here(call: Call, leaves: Sequence[PyTree]) -> PyTree:
    """Call the program; a backward of its own runs on this thread, as `Snapshot` needs it."""
    with torch.autograd.set_multithreading_enabled(False):
        result = call(leaves)
    return plain_result(result, [x for x in leaves if isinstance(x, PaddedTensor)])


def _unpadded(x: PyTree) -> PyTree:
    """Return the plain tensor that a PaddedTensor stands for; a ragged one, which stands for none, as other values."""
    plain = x.unpad() if isinstance(x, PaddedTensor) else x
    return x if isinstance(plain, list) and isinstance(x, PaddedTensor) else plain

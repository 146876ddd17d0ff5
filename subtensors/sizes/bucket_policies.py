"""Bucket policies: the few sizes that all sizes of a dimension are padded to."""

from __future__ import annotations

import bisect
import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from subtensors.arguments import shown
from subtensors.arguments import size as checked_size
from subtensors.dispatch.ops.errors import SizeError

MAX_BUCKETS = 1 << 20
"""The most buckets that are listed: those of a larger range would fill the memory."""


class BucketPolicy(ABC):
    """An increasing sequence of sizes, endless or not. A size is padded to the first of them that holds it."""

    @abstractmethod
    def bucket(self, size: int) -> int | None:
        """Return the smallest bucket of at least `size`; None if the sequence ends before it."""

    def up_to(self, limit: int) -> tuple[int, ...]:
        """Return the buckets for sizes up to `limit`, the last of which is `limit` itself.

        Raises:
            TypeError: the limit is no int.
            SizeError: there are too many of them.
        """
        limit = checked_size("limit", limit)
        found: list[int] = []
        while not found or found[-1] < limit:
            if len(found) == MAX_BUCKETS:
                raise SizeError(
                    f"{self} has more than {MAX_BUCKETS} buckets up to {limit}; lower max, or give it larger steps"
                )
            found.append(min(self.bucket(found[-1] + 1 if found else 1) or limit, limit))
        return tuple(found)


@dataclass(frozen=True)
class Linear(BucketPolicy):
    """Every multiple of a step.

    Args:
        step: the distance of two buckets, at least 1; up to `step - 1` elements of a size are padding.

    Raises:
        ValueError: the step is no positive int.

    Example:
        >>> Linear(64).bucket(77), Linear(64).up_to(200)
        (128, (64, 128, 192, 200))
    """

    step: int

    def __post_init__(self) -> None:
        if not _is_positive_int(self.step):
            raise ValueError(f"Linear takes a step of at least 1, got {self.step!r}")

    def bucket(self, size: int) -> int:
        """The smallest multiple of the step of at least `size`, and at least the step."""
        return max(-(-checked_size("size", size) // self.step), 1) * self.step


@dataclass(frozen=True)
class Geometric(BucketPolicy):
    """Sizes that grow by a factor, each rounded up to a whole number.

    Args:
        base: the factor, above 1; at most the fraction `1 - 1 / base` of a bucket is padding, once past `start`.
        start: the smallest bucket, at least 1.

    Raises:
        ValueError: the factor is not above 1, or the start is no positive int.

    Example:
        >>> Geometric(2, start=16).bucket(77), Geometric(1.5, start=16).up_to(100)
        (128, (16, 24, 36, 54, 81, 100))
    """

    base: float = 2.0
    start: int = 16

    def __post_init__(self) -> None:
        if not (isinstance(self.base, (int, float)) and 1 < self.base < math.inf):
            raise ValueError(f"Geometric takes a finite base above 1, got {self.base!r}")
        if not _is_positive_int(self.start):
            raise ValueError(f"Geometric takes a start of at least 1, got {self.start!r}")

    def bucket(self, size: int) -> int:
        """The smallest of `start`, `start * base`, `start * base ** 2`, ... of at least `size`."""
        size = checked_size("size", size)
        found, power = self.start, 0
        while found < size:
            power += 1
            # The next power can round up to the bucket before it.
            found = max(math.ceil(self.start * self.base**power), found + 1)
        return found


@dataclass(frozen=True, init=False)
class Sizes(BucketPolicy):
    """A list of bucket sizes.

    Args:
        sizes: positive ints in any order; duplicates are one.

    Raises:
        ValueError: there are none, or one is no positive int.

    Example:
        >>> Sizes([128, 32]).bucket(33), Sizes([128, 32]).bucket(129)
        (128, None)
    """

    sizes: tuple[int, ...]

    def __init__(self, sizes: Iterable[int]) -> None:
        try:
            given: Sequence[int] = tuple(sizes)
        except (TypeError, RuntimeError):  # RuntimeError: a tensor that can't be taken apart
            raise TypeError(f"Sizes takes a list of one or more ints, got {shown(sizes)}") from None
        wrong = [size for size in given if not _is_positive_int(size)]
        if wrong or not given:
            raise ValueError(f"Sizes takes one or more ints of at least 1, got {shown(wrong[0] if wrong else given)}")
        object.__setattr__(self, "sizes", tuple(sorted(set(given))))

    def bucket(self, size: int) -> int | None:
        """The smallest of the sizes of at least `size`; None beyond the last."""
        index = bisect.bisect_left(self.sizes, checked_size("size", size))
        return self.sizes[index] if index < len(self.sizes) else None


def bucket_policy(given: BucketPolicy | int | Iterable[int]) -> BucketPolicy:
    """Return the policy of a user's short form.

    Args:
        given: a policy; an int, the step of a `Linear` one; or a list, the buckets themselves.

    Raises:
        TypeError: it is none of these.
        ValueError: a number in it is no positive int.

    Example:
        >>> bucket_policy(64), bucket_policy([32, 128])
        (Linear(step=64), Sizes(sizes=(32, 128)))
    """
    if isinstance(given, BucketPolicy):
        return given
    if isinstance(given, int):
        return Linear(given)
    if isinstance(given, Iterable) and not isinstance(given, (str, bytes)):
        return Sizes(given)
    raise TypeError(f"buckets are a policy such as st.Linear(64), an int (a step) or a list of sizes, got {given!r}")


def _is_positive_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1

"""Named dimensions whose size varies, and the sizes that tensors of one call give them."""

from __future__ import annotations

import logging
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from subtensors.arguments import flag, shown
from subtensors.dispatch.ops.errors import SizeError
from subtensors.dispatch.sizes.expressions import size_symbol
from subtensors.sizes.bucket_policies import BucketPolicy, Geometric, Sizes, bucket_policy

if TYPE_CHECKING:
    import sympy

logger = logging.getLogger("subtensors.sizes")


@dataclass(frozen=True, init=False)
class Dim:
    """A dimension whose size varies from call to call, and the bucket sizes that stand for it.

    Two Dims of the same name, range, buckets and strictness are equal: they are one dimension, also in a copy or in
    another process. Tensors that are padded on one Dim must agree on its size.

    Args:
        name: an identifier; it stands in size expressions and in messages.
        max: the largest size; without one sizes are not limited, or by the last of `st.Sizes`.
        min: the smallest size.
        buckets: a policy (`st.Linear`, `st.Geometric`, `st.Sizes`), an int (the step of a linear one) or a list of
            sizes. No bucket exceeds `max`: where the policy's next one would, it is `max` itself.
        strict: False makes this a hint: a size that does not fit, or that another tensor disagrees with, is not padded
            but specialised on, and nothing is raised.

    Raises:
        ValueError: the name is no identifier, the range is empty, or a listed bucket is out of it.
        TypeError: `buckets` is none of those.

    Example:
        >>> import subtensors as st
        >>> seq = st.Dim("seq", max=512, buckets=st.Linear(64))
        >>> seq.bucket(77), seq.buckets
        (128, (64, 128, 192, 256, 320, 384, 448, 512))
        >>> seq.bucket(600)
        Traceback (most recent call last):
            ...
        subtensors.SizeError: seq is 600, beyond its max of 512; raise max in st.Dim('seq', ...), ...
    """

    name: str
    max: int | None
    min: int
    policy: BucketPolicy
    strict: bool

    def __init__(
        self,
        name: str,
        max: int | None = None,
        min: int = 0,
        buckets: BucketPolicy | int | Iterable[int] | None = None,
        strict: bool = True,
    ) -> None:
        if not isinstance(name, str) or not name.isidentifier():
            raise ValueError(f"a Dim's name is an identifier, got {shown(name)}")
        policy = Geometric() if buckets is None else bucket_policy(buckets)
        if max is None and isinstance(policy, Sizes):
            max = policy.sizes[-1]
        for bound, minimum, value in (("min", 0, min), ("max", 1, max)):
            is_open = bound == "max" and value is None
            if not is_open and (not isinstance(value, int) or isinstance(value, bool) or value < minimum):
                raise ValueError(f"{bound} of Dim {name!r} is an int of at least {minimum}, got {shown(value)}")
        if max is not None and min > max:
            raise ValueError(f"Dim {name!r} has min {min} above max {max}")
        if max is not None and isinstance(policy, Sizes) and policy.sizes[-1] > max:
            raise ValueError(f"Dim {name!r} lists a bucket of {policy.sizes[-1]}, beyond its max of {max}")
        flag(f"strict of Dim {name!r}", strict)
        for field, given in (("name", name), ("max", max), ("min", min), ("policy", policy), ("strict", strict)):
            object.__setattr__(self, field, given)

    def bucket(self, size: int) -> int:
        """The smallest bucket of at least `size`.

        Args:
            size: a true size.

        Returns:
            The bucket; for a Dim with `strict=False`, `size` itself where it is out of range.

        Raises:
            SizeError: the size is out of range.
            TypeError: it is no int.

        Example:
            >>> Dim("n", max=100, buckets=[10, 50]).bucket(51)
            100
        """
        if type(size) is not int:
            size = self._as_int(size)
        if not self.admits(size):
            if self.strict:
                raise SizeError(self._range_error(size))
            logger.info("%s is %s, out of its range: not padded", self.name, size)
            return size
        bucket = self.policy.bucket(size)
        if self.max is not None:
            return self.max if bucket is None else min(bucket, self.max)
        assert bucket is not None, "only Sizes end, and they give a Dim its max"
        return bucket

    @property
    def buckets(self) -> tuple[int, ...]:
        """Every bucket that a size of this Dim can have, in increasing order.

        Raises:
            SizeError: the Dim has no max.

        Example:
            >>> Dim("n", max=100, min=30, buckets=Geometric(2, start=16)).buckets
            (32, 64, 100)
        """
        if self.max is None:
            raise SizeError(f"Dim {self.name!r} has no max, so its buckets have no end; give it one: max=...")
        first = self.bucket(max(self.min, 1))
        return tuple(bucket for bucket in self.policy.up_to(self.max) if bucket >= first)

    @property
    def symbol(self) -> sympy.Symbol:
        """The symbol of this Dim's true size in size expressions."""
        return size_symbol(self.name)

    def admits(self, size: int) -> bool:
        """Return whether a size is within the Dim's range."""
        return size >= self.min and (self.max is None or size <= self.max)

    def _as_int(self, size: int) -> int:
        """Return a whole number of another type, such as numpy's, as an int."""
        try:
            return operator.index(size)
        except TypeError:
            raise TypeError(f"a size of {self.name} is an int, got {shown(size)}") from None

    def _range_error(self, size: int) -> str:
        if size < self.min:
            return f"{self.name} is {size}, below its min of {self.min}; lower min in st.Dim({self.name!r}, ...)"
        return (
            f"{self.name} is {size}, beyond its max of {self.max}; raise max in st.Dim({self.name!r}, ...), "
            "cut the input, or pass strict=False to run such sizes unpadded"
        )

    def __repr__(self) -> str:
        options = [f"max={self.max}"] * (self.max is not None) + [f"min={self.min}"] * (self.min != 0)
        options += [f"buckets={self.policy}"] + ["strict=False"] * (not self.strict)
        return f"Dim({self.name!r}, {', '.join(options)})"


class SizeAgreement:
    """The true sizes that the tensors of one call give to its Dims.

    Example:
        >>> sizes, seq = SizeAgreement(), Dim("seq", max=512)
        >>> sizes.bind(seq, 77, "dim 1 of input_ids")
        True
        >>> sizes.bind(seq, 80, "dim 1 of attention_mask")
        Traceback (most recent call last):
            ...
        subtensors.SizeError: seq is 80 in dim 1 of attention_mask and 77 in dim 1 of input_ids; ...
        >>> sizes.sizes
        {Dim('seq', max=512, buckets=Geometric(base=2.0, start=16)): 77}
    """

    def __init__(self) -> None:
        self.sizes: dict[Dim, int | tuple[int, ...]] = {}
        self._places: dict[str, tuple[Dim, str]] = {}

    def bind(self, dim: Dim, size: int | tuple[int, ...], place: str) -> bool:
        """Record a tensor's size along a Dim, and check that it agrees with the sizes recorded before.

        Args:
            dim: the Dim.
            size: the tensor's true size; for a ragged dim one per row.
            place: the tensor and dim, as an error message names them: "dim 1 of input_ids".

        Returns:
            Whether the tensor may be padded on the Dim; False only for a Dim with `strict=False`, if the
            size is out of its range or another tensor disagrees.

        Raises:
            SizeError: the size is out of range, another tensor gave the Dim another one, or another Dim has its name.
        """
        for each in (size,) if isinstance(size, int) else size:
            if not dim.admits(each):
                dim.bucket(each)  # raises or logs it
                return False
        known, first = self._places.setdefault(dim.name, (dim, place))
        if known != dim:
            raise SizeError(
                f"two Dims are named {dim.name!r}: {known} in {first} and {dim} in {place}; "
                "make one and share it, or give them two names"
            )
        agreed = self.sizes.setdefault(dim, size)
        if agreed == size:
            return True
        message = f"{dim.name} is {_listed(size)} in {place} and {_listed(agreed)} in {first}"
        if dim.strict:
            raise SizeError(f"{message}; tensors padded on one Dim have one size along it")
        logger.info("%s: the latter is not padded", message)
        return False


def _listed(size: int | tuple[int, ...]) -> str:
    """Return a size as text, with only the first few of many lengths."""
    if isinstance(size, int):
        return str(size)
    return f"[{', '.join(map(str, size[:8]))}{', ...' * (len(size) > 8)}]"

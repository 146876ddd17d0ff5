"""Rows of a cross entropy by products that give exponentials: logits are neither written nor read.

A chunk of rows takes a product whose epilogue writes E = exp(y - c) and its sums, and the two products that read E
(`exp_rows_kernel.py` has the math). The kernel of the first is written in Gluon, for Hopper GPUs; elsewhere, and for
what the kernel does not take, `linear_cross_entropy.py` computes logits and overwrites them by their gradient.
"""

from __future__ import annotations

import functools
import logging
import math

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, GradientFactors, RowStatistics
from subtensors.kernels.cross_entropy.logits_block import LinearHead
from subtensors.kernels.runtime.async_compile import wait_for_triton
from subtensors.kernels.runtime.launcher import CachedLauncher, is_capturing, launching_on, multiprocessors

COLUMNS = 128
"""The columns of E whose sum is one number; the classes are a multiple."""

SAMPLES = 256
"""The logits of a row that its shift is taken from."""

MARGIN = 58.0
"""The powers of two between the largest of these and the shift."""

MOST_WIDTH, LEAST_ELEMENTS = 3072, 2**35
"""The width up to which reading logits takes longer than what a library's product is faster by, and the
multiplications of a chunk's product from which on the further launches are worth it: those of an H100."""

HIDDEN_BLOCKS, WEIGHT_BLOCKS, TILES = 3, 6, 8
"""The blocks in the kernel's rings, and the rows of tiles that meet in the L2: the fastest on an H100."""

_log = logging.getLogger(__name__)
_works: dict[torch.device, bool] = {}


def chunk_row_bytes(classes: int, itemsize: int) -> int:
    """Return the bytes of a chunk's row beside E: the sums and the sampled logits."""
    return 4 * -(-classes // COLUMNS) + SAMPLES * itemsize


def is_worth_exponentials(rows: int, classes: int, width: int) -> bool:
    """Return whether a chunk of some rows is large enough.

    >>> is_worth_exponentials(2048, 50304, 768), is_worth_exponentials(64, 50304, 768)
    (True, False)
    """
    return rows * width * classes >= LEAST_ELEMENTS


def head_has_exponentials(dtype: torch.dtype, width: int, classes: int, device: torch.device) -> bool:
    """Return whether the products of a head without bias, (V, H), give exponentials on a device.

    >>> head_has_exponentials(torch.bfloat16, 768, 50304, torch.device("cpu"))
    False
    """
    fits = width % 8 == 0 and 64 < width <= MOST_WIDTH and classes % COLUMNS == 0 and classes >= SAMPLES
    return dtype == torch.bfloat16 and device.type == "cuda" and fits and kernel_works(device)


def takes_exponentials(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, options: CrossEntropy
) -> bool:
    """Return whether a loss goes by exponentials where its chunks are large enough.

    Args:
        hidden: (N, H).
        weight: (V, H), of this dtype or one that it is computed from.
        bias: (V,), or None.
        target: (N,) class indices, or (N, V) distributions.
        options: of the loss.
    """
    return (
        hidden.is_cuda
        and type(hidden) is Tensor
        and target.dim() == 1
        and bias is None
        and options.softcap is None
        and not options.label_smoothing
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (hidden, weight))
        and head_has_exponentials(hidden.dtype, hidden.shape[1], weight.shape[0], hidden.device)
    )


def kernel_works(device: torch.device) -> bool:
    """Return whether the product's kernel compiles and is right on a device; found out once, outside of captures.

    Gluon is experimental, and its names change between versions of Triton. Checked on Triton 3.6; compiled by 3.9.
    """
    if device not in _works:
        if torch.cuda.get_device_capability(device) != (9, 0):
            return _works.setdefault(device, False)
        if is_capturing(device):
            return False
        _works[device] = _is_right(device)
    return _works[device]


def _is_right(device: torch.device) -> bool:
    numbers = torch.arange(1024 * 192, device=device, dtype=torch.float32).mul_(0.37).cos_().view(1024, 192).bfloat16()
    hidden, weight, shifts = numbers[:300], numbers[:384], torch.full((300,), 3.0, device=device)
    memory = [(torch.empty(300, 384, device=device, dtype=x), torch.empty(3, 300, device=device)) for x in _DTYPES]
    try:
        wait_for_triton()
        product_by_kernel(hidden, weight, shifts, 0.25, *memory[0])
    except Exception as error:
        _log.info("cross entropies compute logits on %s: %s: %s", device, type(error).__name__, error)
        return False
    product_by_torch(hidden, weight, shifts, 0.25, *memory[1])
    (found, sums), (exact, exact_sums) = memory
    return found.float().allclose(exact, rtol=1e-2) and sums.allclose(exact_sums, rtol=1e-3)


_DTYPES = torch.bfloat16, torch.float32


def product_by_kernel(
    hidden: Tensor, weight: Tensor, shifts: Tensor, scale: float, exponentials: Tensor, sums: Tensor
) -> None:
    """Compute E = exp2(scale X W^T - shifts) and its sums by the Gluon kernel.

    Args:
        hidden: (rows, H) bfloat16, contiguous.
        weight: (V, H), likewise.
        shifts: (rows,) float32.
        scale: of the product.
        exponentials: E, (rows, V).
        sums: (V / 128, rows) float32, contiguous.
    """
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    from subtensors.kernels.cross_entropy.exp_product_kernel import exp_product_kernel

    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    described = [TensorDescriptor.from_tensor(x, [128, 64], layout) for x in (hidden, weight, exponentials)]
    (rows, width), classes = hidden.shape, weight.shape[0]
    tiles = -(-rows // 256), classes // COLUMNS
    programs = min(multiprocessors(hidden.device), tiles[0] * tiles[1])
    with launching_on(hidden.device):
        exp_product_kernel[(programs,)](
            *described,
            *(shifts, sums, rows, width, *tiles, TILES, programs, scale),
            HIDDEN=HIDDEN_BLOCKS,
            WEIGHT=WEIGHT_BLOCKS,
            num_warps=4,
        )


def product_by_torch(
    hidden: Tensor, weight: Tensor, shifts: Tensor, scale: float, exponentials: Tensor, sums: Tensor
) -> None:
    """Compute the same in plain torch: the kernel's reference."""
    found = (hidden.float() @ weight.float().t()).mul_(scale).sub_(shifts[:, None]).exp2_()
    exponentials.copy_(found)
    sums.copy_(found.view(len(hidden), -1, COLUMNS).sum(2).t())


@functools.cache
def _launch(name: str) -> CachedLauncher:
    """Return the launch of a kernel of `exp_rows_kernel.py`."""
    from subtensors.kernels.cross_entropy import exp_rows_kernel

    return CachedLauncher(getattr(exp_rows_kernel, name))


class ExponentialPasses:
    """The passes of a loss over chunks of complete rows, by exponentials.

    Args:
        head: the operands.
        class_indices: (N,) int64, -1 for an ignored row.
        options: of the loss.
        statistics: of all rows; a chunk's are written with it.
        factors: of the gradient.
        rows: of the longest chunk.
    """

    def __init__(
        self,
        head: LinearHead,
        class_indices: Tensor,
        options: CrossEntropy,
        statistics: RowStatistics,
        factors: GradientFactors,
        rows: int,
    ) -> None:
        self.head, self.class_indices, self.options = head, class_indices, options
        self.statistics, self.factors = statistics, factors
        count, classes = head.hidden.shape[0], head.weight.shape[0]
        self._sums: Tensor | None = head.hidden.new_empty(classes // COLUMNS * rows, dtype=torch.float32)
        self._inverses, self._at_targets = head.hidden.new_empty(2, count, dtype=torch.float32).unbind()

    def write(self, memory: Tensor, begin: int, end: int, scaled: Tensor | None) -> None:
        """Write E of rows [begin, end), 0 at the targets, and the other operand of its product for dW.

        Args:
            memory: (rows or more, V).
            begin, end: of the rows.
            scaled: (rows, H); None where the weight needs no gradient.
        """
        head, statistics, rows = self.head, self.statistics, end - begin
        hidden, weight, (classes, width) = head.hidden, head.weight, head.weight.shape
        temperature, found = float(self.options.temperature), memory[:rows]
        scale = math.log2(math.e) / temperature
        shifts, targets = statistics.row_max, self.class_indices
        assert self._sums is not None
        sums = self._sums[: classes // COLUMNS * rows].view(-1, rows)
        samples = torch.mm(hidden[begin:end], weight[:: classes // SAMPLES][:SAMPLES].t())
        _launch("shifts_kernel")(
            rows,
            (hidden, weight, targets, samples, shifts, statistics.target_logit),
            *(begin, width, scale),
            MARGIN=MARGIN,
            SAMPLES=SAMPLES,
            BLOCK=256,
            num_warps=2,
        )
        product = product_by_kernel if hidden.is_cuda else product_by_torch
        product(hidden[begin:end], weight, shifts[begin:end], scale, found, sums)
        _launch("rows_kernel")(
            rows,
            (
                *(sums, found, hidden, weight, targets, shifts, statistics.sum_exp, statistics.target_logit),
                *(self._inverses, self._at_targets, *self.factors[:3], found if scaled is None else scaled),
            ),
            *(begin, rows, classes, width, scale, temperature),
            HAS_Z_LOSS=self.options.z_loss != 0,
            SCALES=scaled is not None,
            SUMS=len(sums),
            BLOCK_SUMS=1 << (len(sums) - 1).bit_length(),
            BLOCK_CLASSES=16,
            BLOCK=256,
            num_warps=4,
        )

    def release(self) -> None:
        """Free what only chunks need."""
        self._sums = None

    def complete(self, hidden_grad: Tensor | None, weight_grad: Tensor | None) -> None:
        """Complete the gradients, which hold the products of E, in place."""
        head, targets, (count, width) = self.head, self.class_indices, self.head.hidden.shape
        options = {"BLOCK": min(1024, 1 << (width - 1).bit_length()), "num_warps": 4}
        if hidden_grad is not None:
            operands = (hidden_grad, head.weight, targets, self._inverses, self._at_targets)
            _launch("hidden_grad_kernel")(count, operands, width, **options)
        if weight_grad is not None:
            classes, order = targets.sort(stable=True)
            operands = (weight_grad, head.hidden, classes, order, self._at_targets)
            _launch("weight_grad_kernel")(count, operands, *(count, width), ROWS=8, **options)

"""Rows of a cross entropy by products that give exponentials: logits are neither written nor read.

A chunk of rows takes a product whose epilogue writes E = exp(y - c) and its sums, and the two products that read E
(`exp_rows_kernel.py` has the math). The kernel of the first is written in Gluon, for Hopper GPUs; elsewhere, and for
what the kernel does not take, `linear_cross_entropy.py` computes logits and overwrites them by their gradient.
"""

from __future__ import annotations

import logging
import math

import torch
from torch import Tensor

from subtensors.kernels.cross_entropy.cross_entropy import CrossEntropy, GradientFactors, RowStatistics
from subtensors.kernels.cross_entropy.logits_block import GradFlags, LinearHead, product_into
from subtensors.kernels.runtime.async_compile import wait_for_triton
from subtensors.kernels.runtime.launcher import cached_launcher, is_capturing, launching_on, multiprocessors

COLUMNS = 128
"""The columns of E whose sum is one number; the classes are a multiple."""

SAMPLES = 256
"""The logits of a row that its shift is taken from."""

MARGIN = 85.0
"""The powers of two that the shift is above the largest of these and the target's logit. Another logit may be 175
powers of two above that; what is more than 41 below it is lost."""

MOST_WIDTH, LEAST_ELEMENTS = 3072, 2**35
"""The width above which cuBLAS's faster product outweighs the pass over logits that is saved, and the multiplications
of a chunk's product from which on the further launches are worth it: those of an H100."""

HIDDEN_BLOCKS, WEIGHT_BLOCKS, TILES = 3, 6, 8
"""The blocks in the kernel's rings, and the rows of tiles that meet in the L2: the fastest on an H100."""

LEAST_WIDTH = 64 * (WEIGHT_BLOCKS - 2) + 1
"""So wide that the ring of W's blocks keeps the warps of one half of a tile from being two tiles ahead of the other's,
which wait for them by the parity of a barrier."""

_KERNELS = "cross_entropy.exp_rows_kernel"

_log = logging.getLogger(__name__)
_works: dict[torch.device, bool] = {}


def chunk_row_bytes(classes: int) -> int:
    """Return the bytes of a chunk's row beside E: the sums."""
    return 4 * -(-classes // COLUMNS)


def is_worth_exponentials(rows: int, classes: int, width: int) -> bool:
    """Return whether a chunk of some rows is large enough.

    >>> is_worth_exponentials(2048, 50304, 768), is_worth_exponentials(64, 50304, 768)
    (True, False)
    """
    return rows * width * classes >= LEAST_ELEMENTS


def head_has_exponentials(
    dtype: torch.dtype, width: int, classes: int, device: torch.device, tries: bool = True
) -> bool:
    """Return whether the products of a head without bias, (V, H), give exponentials on a device.

    Args:
        dtype: of the hidden states.
        width, classes: H, V.
        device: of the hidden states.
        tries: whether to try the kernel where that was not done yet.

    >>> head_has_exponentials(torch.bfloat16, 768, 50304, torch.device("cpu"))
    False
    """
    if dtype != torch.bfloat16 or device.type != "cuda" or width % 8 or classes % COLUMNS or classes < 2 * SAMPLES:
        return False
    return LEAST_WIDTH <= width <= MOST_WIDTH and (kernel_works(device) if tries else _works.get(device, False))


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
        and type(hidden) in (Tensor, torch.nn.Parameter)
        and hidden.dtype == torch.bfloat16
        and target.dim() == 1
        and bias is None
        and options.softcap is None
        and not options.label_smoothing
        and all(x.is_contiguous() and x.data_ptr() % 16 == 0 for x in (hidden, weight))
        and head_has_exponentials(hidden.dtype, hidden.shape[1], weight.shape[0], hidden.device)
    )


def kernel_works(device: torch.device) -> bool:
    """Return whether the kernels compile and are right on a device; found out once, outside of captures.

    Gluon is experimental, and its names change between versions of Triton. Checked on Triton 3.6; compiled by 3.9.
    """
    if device not in _works:
        if torch.cuda.get_device_capability(device) != (9, 0):
            return _works.setdefault(device, False)
        with launching_on(device):
            if is_capturing(device):
                return False
            _works[device] = is_right(device, torch.bfloat16)
    return _works[device]


@torch.no_grad()
def is_right(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether a small loss by exponentials is right: its statistics and its gradients."""
    with torch.autocast(device.type, enabled=False):
        exact = torch.arange(512 * 320, device=device, dtype=torch.float32).mul_(0.37).cos_().view(512, 320)
        weight = exact.to(dtype)
        hidden, targets = weight[:384:2].contiguous(), torch.arange(192, device=device).mul_(5).remainder_(512)
        targets[::7] = -1
        shares = exact.new_full((192,), 0.5).masked_fill_(targets < 0, 0.0)
        statistics = RowStatistics.uninitialized(192, torch.float32, device)
        head = LinearHead(hidden, weight, None, GradFlags(), dtype, None)
        passes = ExponentialPasses(head, targets, CrossEntropy(), statistics, GradientFactors(*[shares] * 4), 192)
        memory, scaled = hidden.new_empty(192, 512), torch.empty_like(hidden)
        try:
            wait_for_triton()
            passes.write(memory, 0, 192, scaled)
            found = memory @ weight, memory.t() @ scaled
            passes.complete(*found)
        except Exception as error:
            _log.info("cross entropies compute logits on %s: %s: %s", device, type(error).__name__, error)
            return False
        logits = wide_product(hidden, weight)
        gradient = logits.softmax(1) - (targets[:, None] == torch.arange(512, device=device)).float()
        gradient.mul_(shares[:, None])
        pairs = [
            (statistics.log_sum_exp()[targets >= 0], logits.logsumexp(1)[targets >= 0]),
            (found[0], wide_product(gradient, weight.t())),
            (found[1], wide_product(gradient.t(), hidden.t())),
        ]
        # In 16 bits the gradients are rounded to a few parts in a thousand; a kernel that is off misses by far more.
        return all(bool((mine - true).norm() <= 0.02 * true.norm()) for mine, true in pairs)


def wide_product(a: Tensor, b: Tensor) -> Tensor:
    """Return a @ b.T, summed in float64 and rounded to float32."""
    return (a.double() @ b.double().t()).float()


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

    layout = gl.NVMMASharedLayout.get_default_for([128, 64], gl.bfloat16)
    described = [TensorDescriptor.from_tensor(x, [128, 64], layout) for x in (hidden, weight, exponentials)]
    (rows, width), classes = hidden.shape, weight.shape[0]
    tiles = -(-rows // 256), classes // COLUMNS
    programs = min(multiprocessors(hidden.device), tiles[0] * tiles[1])
    cached_launcher("cross_entropy.exp_product_kernel", "exp_product_kernel")(
        programs,
        (shifts, sums),
        *(*described, rows, width, *tiles, TILES, programs, scale),
        HIDDEN=HIDDEN_BLOCKS,
        WEIGHT=WEIGHT_BLOCKS,
        num_warps=4,
    )


def product_by_torch(
    hidden: Tensor, weight: Tensor, shifts: Tensor, scale: float, exponentials: Tensor, sums: Tensor
) -> None:
    """Compute the same in plain torch: the kernel's reference."""
    found = wide_product(hidden, weight).mul_(scale).sub_(shifts[:, None]).exp2_()
    exponentials.copy_(found)
    sums.copy_(found.view(len(hidden), -1, COLUMNS).sum(2).t())


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
        samples = found.view(torch.float32).view(-1)[: rows * SAMPLES].view(rows, SAMPLES)  # read before E is written
        product_into(samples, hidden[begin:end], weight[:: classes // SAMPLES][:SAMPLES].t(), accumulate=False)
        cached_launcher(_KERNELS, "shifts_kernel")(
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
        cached_launcher(_KERNELS, "rows_kernel")(
            rows,
            (
                *(sums, found, hidden, weight, targets, shifts, statistics.sum_exp, statistics.target_logit),
                *(self._inverses, self._at_targets, *self.factors[:3]),
                found if scaled is None else scaled,  # which is not written then
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
            cached_launcher(_KERNELS, "hidden_grad_kernel")(count, operands, width, **options)
        if weight_grad is not None:
            classes, order = targets.sort(stable=True)
            operands = (weight_grad, head.hidden, classes, order, self._at_targets)
            cached_launcher(_KERNELS, "weight_grad_kernel")(count, operands, *(count, width), ROWS=8, **options)

"""Composite ops and functions of torch that may be decomposed with the bucket's sizes.

A composite function asks for sizes, and gets the bucket's. If it only passes them to views and slices, the rules notice
what doesn't fit; if it computes with them (`x.sum() / x.shape[0]`), nothing does. So a function is decomposed only if
it is listed here, after a look at its use of sizes and a sweep of torch's `op_db` that compared it with the unpadded
program. All others run on the unpadded data.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable

import torch
from torch._ops import OpOverload

from subtensors.dispatch.ops.errors import RuleError
from subtensors.dispatch.ops.op_classes import overload_name
from subtensors.dispatch.ops.tree import Args, Kwargs, PyTree
from subtensors.dispatch.padded.true_sizes import rows_symbol
from subtensors.dispatch.sizes.dim_factors import is_padded


class MustDecompose(Exception):
    """Signal that an op is to be decomposed into simpler ones."""


class NotDecomposed(RuleError):
    """A composite function that may compute with the bucket's sizes."""


OPS = frozenset(
    """argsort argwhere atleast_1d atleast_2d atleast_3d cartesian_prod column_stack cumulative_trapezoid dsplit msort
    nanmean nonzero_numpy where.default linalg_vecdot corrcoef diag diagflat linalg_solve linalg_solve_ex
    dstack einsum fft_fft fft_fft2 fft_fftn fft_hfft fft_hfft2 fft_hfftn fft_ifft fft_ifft2 fft_ifftn fft_ihfft
    fft_ihfft2 fft_ihfftn fft_irfft fft_irfft2 fft_irfftn fft_rfft fft_rfft2 fft_rfftn flatten.using_ints fliplr flipud
    hsplit hstack imag inner item kron linalg_norm mH matrix_H max_pool1d max_pool1d_with_indices max_pool2d max_pool3d
    movedim pairwise_distance prelu ravel real repeat_interleave.self_int repeat_interleave.self_Tensor reshape_as
    result_type tensordot trapezoid trapz view_as vsplit vstack moveaxis swapaxes swapdims unflatten.int
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d _convolution _convolution_mode
    dropout_ feature_dropout alpha_dropout l1_loss square
    concat type_as to.dtype to.device to.other to.dtype_layout relu6 selu
    where.ScalarSelf where.ScalarOther where.Scalar
    chalf var std var_mean std_mean cosine_embedding_loss triplet_margin_loss
    index_select_backward poisson_nll_loss hinge_embedding_loss kl_div margin_ranking_loss""".split()
)
"""Composite ops, by name or overload."""

aten = torch.ops.aten

CAST_INSIDE = frozenset(
    [aten.lstm, aten.gru, aten.rnn_tanh, aten.rnn_relu, aten.cov, aten.nll_loss_nd, aten.cross_entropy_loss, aten.pad]
)
"""Composite ops with a rule of their own, inside of which autocast casts; other ops are cast before the call or not."""

FUNCTIONS = frozenset(
    f"{owner}.{name}"
    for owner, names in {
        "torch._tensor.Tensor": """__rdiv__ __rmatmul__ __rmod__ __rpow__ __rsub__ __rfloordiv__ __floordiv__
            __contains__ __rlshift__ __rrshift__ split norm unflatten unique unique_consecutive""",
        "torch._tensor.TensorBase": "pow pow_",
        "torch.functional": """boolean_dispatch.<locals>.fn atleast_1d atleast_2d atleast_3d broadcast_tensors
            cartesian_prod cdist einsum meshgrid norm split tensordot unravel_index""",
        "torch.nn.functional": """_threshold adaptive_avg_pool2d adaptive_avg_pool3d
            adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices
            alpha_dropout batch_norm binary_cross_entropy binary_cross_entropy_with_logits
            boolean_dispatch.<locals>.fn celu cross_entropy ctc_loss dropout dropout1d dropout2d dropout3d elu
            embedding feature_alpha_dropout glu group_norm hardsigmoid hardswish hardtanh huber_loss instance_norm
            interpolate l1_loss layer_norm leaky_relu log_softmax lp_pool1d lp_pool2d lp_pool3d
            max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices mish mse_loss
            cosine_embedding_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss
            multilabel_soft_margin_loss grid_sample kl_div multi_head_attention_forward gumbel_softmax
            local_response_norm unfold nll_loss normalize pad gaussian_nll_loss poisson_nll_loss relu relu6 rms_norm
            rrelu selu silu smooth_l1_loss soft_margin_loss softmax softmin softsign tanhshrink
            triplet_margin_with_distance_loss hinge_embedding_loss margin_ranking_loss max_pool1d max_pool2d
            max_pool3d adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d _max_pool1d _max_pool2d
            _max_pool3d _adaptive_max_pool1d _adaptive_max_pool2d _adaptive_max_pool3d""",
    }.items()
    for name in names.split()
)
"""Functions of torch, written in Python, that may run on padded tensors."""

EXCEPT: dict[str, Callable[[Args, list[str]], bool]] = {
    # The mean over the batch divides by the batch size.
    "torch.nn.functional.kl_div": lambda args, words: "batchmean" in words and _counts_padding(args, 0),
    # The mean over the classes divides by their number.
    "torch.nn.functional.multilabel_soft_margin_loss": lambda args, words: _counts_padding(args, -1),
}
"""Conditions, on the arguments and the strings among them, under which a listed function computes with sizes."""


def check_function(func: types.FunctionType, args: Args, kwargs: Kwargs) -> None:
    """Raise NotDecomposed for a Python function that isn't listed; torch itself decomposes functions written in C++."""
    name = f"{func.__module__}.{func.__qualname__}"
    words = [a for a in (*args, *kwargs.values()) if isinstance(a, str)]
    if name not in FUNCTIONS or (name in EXCEPT and EXCEPT[name](args, words)):
        raise NotDecomposed(f"PaddedTensor has no rule for {name}, which may compute with the bucket's sizes")


def _counts_padding(args: Args, d: int) -> bool:
    """Return whether this dim of the first argument counts padding; the rows of a ragged batch are all valid."""
    dims = getattr(args[0], "_dims", None) if args else None
    return not dims or (is_padded(dims[d]) and [f.size for f in dims[d]] != [rows_symbol()])


def check_caller(frame: types.FrameType, is_padded_alike: Callable[[object], bool]) -> None:
    """Raise RuleError if Python code of torch that no type can intercept is about to count a bucket's elements.

    Args:
        frame: the frame that reads a tensor's layout, which these functions do first.
        is_padded_alike: tells if a value is padded wherever that tensor is; with such a mask they count valid elements.
    """
    if frame.f_globals.get("__name__") != "torch.masked._ops" or frame.f_code.co_name not in COUNTING:
        return
    if not is_padded_alike(frame.f_locals.get("mask")):
        raise RuleError(
            f"torch.masked.{COUNTING[frame.f_code.co_name]} would divide by a number of elements that counts padding: "
            f"call the method of the PaddedTensor, or give it a mask padded as it is"
        )


COUNTING = {"mean": "mean", "_std_var": "std or var"}
"""Functions of `torch.masked` that divide by a count of `torch.ones(x.shape)` or of their mask."""


@functools.cache
def is_composite(op: OpOverload) -> bool:
    """Return whether this op may be decomposed."""
    if op.namespace != "aten":
        return False
    name = overload_name(op)
    return (name in OPS or name.split(".")[0] in OPS) and op._can_decompose()


def decompose(op: OpOverload, args: Args, kwargs: Kwargs) -> PyTree:
    """Run an op as its decomposition.

    Raises:
        NotDecomposed: torch has no decomposition for these arguments.
    """
    out = op.decompose(*args, **kwargs)
    if out is NotImplemented:
        raise NotDecomposed(f"{op} has no rule and no simpler parts")
    return out

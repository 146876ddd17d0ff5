"""The op classes, and the ops that a class lists by name because torch does not declare it for them.

Each group gives the one reason its ops have the class's property; tests prove it by running the ops. Tags
differ between torch versions: an entry stays while any supported version needs it.
"""

from __future__ import annotations

import enum

import torch


class OpClass(enum.Enum):
    """The class of an op: an algebraic property that a rule can rely on.

    Example:
        >>> from subtensors.dispatch.ops.op_classes import op_class
        >>> op_class(torch.ops.aten.mm.default)
        <OpClass.CONTRACTION: 'contraction'>
    """

    POINTWISE = "pointwise"  # out[i] is a function of the broadcast operands at i, whatever the size
    REDUCTION = "reduction"  # a slice becomes one value that no permutation of the slice changes
    VIEW = "view"  # the output is the input's storage under another shape (or a copy, where strides forbid it)
    CONTRACTION = "contraction"  # affine in each operand: products summed over shared positions
    FACTORY = "factory"  # values depend on no tensor's values
    RANDOM = "random"  # values drawn from a generator: a function of its state
    COPY = "copy"  # each output element is an input element or a constant; which one, the shapes alone decide
    NORMALISATION = "normalisation"  # a slice is rescaled by statistics of itself, keeping its shape
    SCAN = "scan"  # out[i] along one dim depends on elements <= i
    SORT_SELECT = "sort_select"  # values picked or positions found by comparing: commutes with increasing maps
    SCATTER_GATHER = "scatter_gather"  # an integer or bool tensor says where; affine in each value operand
    OTHER = "other"  # none of these: needs a rule of its own


SUPPLEMENT = """
[pointwise]
# another name of a tagged op
  __and__ __or__ __xor__ __lshift__ __rshift__ absolute arccos arccosh arcsin arcsinh arctan arctan2 arctanh clip
  divide fix greater greater_equal less less_equal multiply negative not_equal subtract true_divide special_digamma
  special_erf special_erfc special_erfinv special_exp2 special_expit special_expm1 special_gammainc special_gammaincc
  special_gammaln special_i0 special_log1p special_logit special_multigammaln special_ndtr special_polygamma
  special_psi special_round special_sinc special_xlogy
# the value is kept, its dtype may change (`to` may return its input itself)
  copy _to_copy to type_as chalf _cast_Byte _cast_Char _cast_Double _cast_Float _cast_Half _cast_Int _cast_Long
  _cast_Short _autocast_to_full_precision _autocast_to_reduced_precision
# every element becomes the same 0-d value
  fill zero
# negation or conjugation, made real instead of lazy
  _conj_copy _neg_view_copy
# arithmetic on the broadcast elements that torch does not tag
  _conj_physical leaky_relu rsub floor_divide complex polar hardswish celu elu log_sigmoid log_sigmoid_forward isclose
  isreal isfinite masked_fill where.self where.ScalarOther where.ScalarSelf where.Scalar _add_relu _prelu_kernel
  _masked_scale _standard_gamma_grad _dirichlet_grad
# f'(x) * grad of an elementwise f: both are read at the same position
  elu_backward gelu_backward hardshrink_backward hardsigmoid_backward hardswish_backward hardtanh_backward
  leaky_relu_backward log_sigmoid_backward mish_backward sigmoid_backward silu_backward softplus_backward
  softshrink_backward tanh_backward threshold_backward infinitely_differentiable_gelu_backward _prelu_kernel_backward
  rrelu_with_noise_backward
[reduction]
# a symmetric function of the slice
  nanmean dist native_norm frobenius_norm special_logsumexp sum_to_size _is_all_true _is_any_true _aminmax hash_tensor
# a mean or sum of per-sample losses: permuting the samples of every operand alike changes nothing
  binary_cross_entropy binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss hinge_embedding_loss
  huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss
  multilabel_margin_loss_forward nll_loss nll_loss2d nll_loss2d_forward nll_loss_forward nll_loss_nd poisson_nll_loss
  smooth_l1_loss soft_margin_loss triplet_margin_loss
[view]
# returns its input's storage though its schema declares no alias
  _unsafe_view unsafe_split unsafe_split_with_sizes unsafe_chunk lift
# a view of each tensor of a list
  atleast_1d atleast_2d atleast_3d broadcast_tensors meshgrid unflatten_dense_tensors
[contraction]
# a product of matrices or vectors, plus at most one added operand
  mm bmm addmm addbmm baddbmm addmv addr mv dot vdot inner outer ger kron matmul linear bilinear einsum tensordot
  chain_matmul linalg_matmul linalg_multi_dot linalg_vecdot _trilinear _compute_linear_combination _int_mm _scaled_mm
  _scaled_mm_v2 _grouped_mm _scaled_grouped_mm _scaled_grouped_mm_v2 _weight_int4pack_mm _weight_int4pack_mm_for_cpu
  _weight_int4pack_mm_with_scales_and_zeros _weight_int8pack_mm _mixed_dtypes_linear mkldnn_linear hspmm smm sspaddmm
  sparse_sampled_addmm _sparse_mm _sparse_addmm _sparse_sparse_matmul
# einsum with a fixed tensor: the identity for a trace, the Levi-Civita symbol for a cross product
  trace cross linalg_cross
# a sum over channels and window positions of input times weight
  convolution _convolution _convolution_mode convolution_overrideable conv1d conv2d conv3d conv_transpose1d
  conv_transpose2d conv_transpose3d conv_tbc conv_depthwise3d _conv_depthwise2d thnn_conv2d slow_conv3d
  slow_conv3d_forward slow_conv_dilated2d slow_conv_dilated3d slow_conv_transpose2d slow_conv_transpose3d
  _slow_conv2d_forward cudnn_convolution cudnn_convolution_transpose mkldnn_convolution miopen_convolution
  miopen_convolution_transpose miopen_depthwise_convolution _mps_convolution _mps_convolution_transpose
  _nnpack_spatial_convolution
# the derivative of a product is the gradient times the other factor
  convolution_backward convolution_backward_overrideable _convolution_double_backward conv_tbc_backward
  _slow_conv2d_backward linear_backward matmul_backward mkldnn_linear_backward mkldnn_linear_backward_input
  mkldnn_linear_backward_weights mps_convolution_backward mps_convolution_transpose_backward
[factory]
# filled from sizes, a fill value or a formula of the position
  arange range linspace logspace eye full ones zeros scalar_tensor tril_indices triu_indices _dim_arange full_like
  ones_like zeros_like new_full new_ones new_zeros bartlett_window blackman_window hamming_window hann_window
  kaiser_window fft_fftfreq fft_rfftfreq _efficientzerotensor _new_zeros_with_same_feature_meta _shape_as_tensor
# not filled at all
  empty empty_like empty_permuted empty_quantized empty_strided new_empty new_empty_strided
[copy]
# tensors laid side by side, or one laid out again and again
  cat concat concatenate stack _stack hstack vstack dstack column_stack row_stack block_diag repeat tile
  repeat_interleave.self_int cartesian_prod combinations flatten_dense_tensors pad_sequence _chunk_cat
# elements moved within a tensor, or repeated from its border
  flip fliplr flipud roll rot90 fft_fftshift fft_ifftshift pixel_shuffle pixel_unshuffle channel_shuffle
  native_channel_shuffle im2col reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d
  replication_pad3d _pad_circular _pad_enum pad _pin_memory upsample_nearest1d upsample_nearest2d upsample_nearest3d
  _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d
# a constant at positions that shapes and integers fix, the input elsewhere
  tril triu constant_pad_nd diag diagflat diag_embed fill_diagonal_ select_scatter slice_scatter diagonal_scatter
  as_strided_scatter slice_backward select_backward diagonal_backward trace_backward
# a view made dense
  _reshape_copy narrow_copy
[normalisation]
# softmax: exponentials over their sum, unchanged when a constant is added to the slice
  softmax log_softmax special_softmax special_log_softmax _softmax _log_softmax _safe_softmax _masked_softmax
  _sparse_softmax _sparse_log_softmax
# divided by a norm or a deviation of the slice, unchanged when the slice is scaled
  layer_norm native_layer_norm group_norm native_group_norm instance_norm rms_norm _fused_rms_norm batch_norm
  native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional _batch_norm_with_update
  _batch_norm_with_update_functional _batch_norm_impl_index cudnn_batch_norm miopen_batch_norm _weight_norm
  _weight_norm_interface
# batch norm with statistics given, or its parts on one process of several
  _native_batch_norm_legit_no_training _batch_norm_no_update batch_norm_elemt batch_norm_stats batch_norm_gather_stats
  batch_norm_gather_stats_with_counts batch_norm_update_stats
# a normalisation's derivative: linear in the gradient, with the same statistics of the slice
  _softmax_backward_data _log_softmax_backward_data _masked_softmax_backward _sparse_softmax_backward_data
  _sparse_log_softmax_backward_data native_layer_norm_backward native_group_norm_backward native_batch_norm_backward
  batch_norm_backward batch_norm_backward_elemt batch_norm_backward_reduce cudnn_batch_norm_backward
  miopen_batch_norm_backward _batch_norm_impl_index_backward _fused_rms_norm_backward _weight_norm_interface_backward
  _weight_norm_differentiable_backward
[scan]
# a running value over everything up to here
  cumsum cumprod cummax cummin logcumsumexp _logcumsumexp _cummax_helper _cummin_helper cumulative_trapezoid
[sort_select]
# elements put in order, or the ones at given ranks of that order
  sort argsort msort topk kthvalue median nanmedian mode
# values found among others by comparing them
  searchsorted bucketize isin unique_dim unique_consecutive unique_dim_consecutive _unique _unique2
# positions kept because a value there is not zero (or true)
  nonzero nonzero_numpy nonzero_static argwhere masked_select where.default
[scatter_gather]
# read where an index says
  gather index index_select _unsafe_index _unsafe_masked_index take take_along_dim embedding embedding_bag
  _embedding_bag _embedding_bag_forward_only repeat_interleave.self_Tensor
# written or added where an index says
  scatter scatter_add scatter_reduce index_add index_copy index_fill index_put index_reduce _index_put_impl
  _unsafe_index_put _unsafe_masked_index_put_accumulate put masked_scatter one_hot bincount repeat_interleave.Tensor
  max_unpool2d max_unpool3d segment_reduce
# the derivative of a read is a write at the same index, and the other way round
  gather_backward index_select_backward masked_scatter_backward masked_select_backward embedding_backward
  embedding_dense_backward embedding_sparse_backward _embedding_bag_backward _embedding_bag_dense_backward
  _embedding_bag_sparse_backward _embedding_bag_per_sample_weights_backward _segment_reduce_backward
  _gather_sparse_backward cummaxmin_backward value_selecting_reduction_backward max_pool2d_with_indices_backward
  max_pool3d_with_indices_backward adaptive_max_pool2d_backward adaptive_max_pool3d_backward
  fractional_max_pool2d_backward fractional_max_pool3d_backward
[other]
# attention: contraction, normalisation, contraction; random only when dropout is asked for
  scaled_dot_product_attention _scaled_dot_product_attention_math _scaled_dot_product_attention_math_for_mps
  _scaled_dot_product_cudnn_attention _scaled_dot_product_cudnn_attention_backward
  _scaled_dot_product_efficient_attention _scaled_dot_product_efficient_attention_backward
  _scaled_dot_product_flash_attention _scaled_dot_product_flash_attention_for_cpu
  _scaled_dot_product_fused_attention_overrideable _scaled_dot_product_fused_attention_overrideable_backward
  _flash_attention_forward _flash_attention_forward_no_dropout_inplace _efficient_attention_forward
  _cudnn_attention_forward _cudnn_attention_backward _triton_scaled_dot_attention _fused_sdp_choice
  _nested_tensor_softmax_with_shape
# a whole recurrent network, its weights in a list; random only when dropout is asked for
  lstm gru rnn_relu rnn_tanh _cudnn_rnn miopen_rnn _lstm_mps
# a loss's derivative: elementwise, but divided by the number or the weight of the samples when it is a mean
  binary_cross_entropy_backward huber_loss_backward mse_loss_backward multi_margin_loss_backward
  multilabel_margin_loss_backward nll_loss_backward nll_loss2d_backward smooth_l1_loss_backward
  soft_margin_loss_backward
# interpolates between two order statistics
  quantile nanquantile
# a factory whose bounds are tensors: it depends on their values
  linspace.Tensor_Tensor linspace.Tensor_Scalar linspace.Scalar_Tensor logspace.Tensor_Tensor logspace.Tensor_Scalar
  logspace.Scalar_Tensor
# tagged pointwise, but it answers with one Python bool
  equal
# declared a view, but it sums duplicate entries of a sparse tensor
  coalesce
"""
"""Under each class, groups of ops: the reason why its property holds, and their names or overloads (`max.other`)."""


def _classes(text: str) -> dict[str, OpClass]:
    """Return the class of each name in a table: a class in brackets, then reasons behind a # and the names below."""
    classes: dict[str, OpClass] = {}
    for line in text.splitlines():
        if line.startswith("["):
            op_class = OpClass(line.strip("[]"))
        elif not line.startswith("#"):
            for name in line.split():
                if name in classes:
                    raise ValueError(f"the supplement lists {name} twice: as {classes[name].value}, {op_class.value}")
                classes[name] = op_class
    return classes


LISTED_CLASSES = _classes(SUPPLEMENT)
"""The class of each op or overload that is listed."""

# The single-tensor op of a `_foreach_` op, where it is not the op of the same name.
FOREACH_TWINS = {
    "_foreach_norm": torch.ops.aten.linalg_vector_norm.default,
    "_foreach_powsum": torch.ops.aten.linalg_vector_norm.default,  # its power, one step before the root
    "_foreach_max": torch.ops.aten.max.default,
}

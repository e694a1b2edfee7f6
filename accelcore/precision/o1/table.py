"""Table O1: which operator runs in which dtype under autocast, the same on every device.

It is apex's O1 (the lists of `apex.amp`), extended to the operators that torch's autocast handles on any device. Names
are those of torch's dispatcher, without overload: `softmax` is `aten::softmax.int` and its other overloads.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from types import MappingProxyType


class Treatment(Enum):
    """Treatment of an operator's floating-point inputs by autocast. float64 is never cast."""

    LOW = "low precision"
    """They are cast to autocast's dtype."""
    FP32 = "fp32"
    """They are cast to fp32, or the operator accumulates and returns fp32."""
    WIDEST = "widest"
    """They are cast to the widest dtype among them."""
    AS_IS = "as it is"
    """The operator runs in the dtypes of its inputs."""
    REFUSED = "refused"
    """The operator raises if one of them is in low precision."""


_PRODUCTS = """
    _addmm_activation addbmm addmm addmv addr baddbmm bmm chain_matmul einsum linalg_multi_dot linear matmul mm mv
    prelu tensordot
"""
_CONVOLUTIONS = """
    _convolution conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d convolution
"""
_ATTENTION = "_native_multi_head_attention _scaled_dot_product_flash_attention scaled_dot_product_attention"
_RECURRENT = """
    _thnn_fused_gru_cell _thnn_fused_lstm_cell gru_cell lstm_cell rnn_relu_cell rnn_tanh_cell
"""
_POINTWISE = """
    acos acosh asin atanh cosh erfinv exp exp2 expm1 gelu log log10 log1p log2 logaddexp logaddexp2 logit polar pow
    reciprocal rsqrt sinh softplus tan view_as_complex
"""
_REDUCTIONS = """
    cumprod cumsum dist frobenius_norm linalg_matrix_norm linalg_norm linalg_vector_norm logcumsumexp logsumexp
    nanquantile nansum norm nuclear_norm prod quantile renorm std std_mean sum trace var var_mean
    cdist cosine_similarity dot linalg_vecdot pdist vdot
"""
_NORMALIZATIONS = "group_norm layer_norm log_softmax native_layer_norm rms_norm softmax"
_LOSSES = """
    binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy_loss ctc_loss hinge_embedding_loss huber_loss
    kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss multilabel_margin_loss_forward
    nll_loss nll_loss2d nll_loss_nd poisson_nll_loss smooth_l1_loss soft_margin_loss triplet_margin_loss
"""
_SAMPLING = """
    _upsample_bicubic2d_aa _upsample_bilinear2d_aa _upsample_nearest_exact1d _upsample_nearest_exact2d
    _upsample_nearest_exact3d avg_pool3d fake_quantize_per_tensor_affine grid_sampler grid_sampler_2d grid_sampler_3d
    upsample_bicubic2d upsample_bilinear2d upsample_linear1d upsample_nearest1d upsample_nearest2d upsample_nearest3d
    upsample_trilinear3d
"""
_LINEAR_ALGEBRA = """
    _lu_with_info cholesky cholesky_inverse cholesky_solve det geqrf inverse linalg_cholesky linalg_cholesky_ex
    linalg_cond linalg_det linalg_eig linalg_eigh linalg_eigvals linalg_eigvalsh linalg_householder_product
    linalg_inv linalg_inv_ex linalg_ldl_factor linalg_lstsq linalg_lu linalg_lu_factor linalg_lu_solve
    linalg_matrix_exp linalg_matrix_power linalg_matrix_rank linalg_matrix_sqrth linalg_pinv linalg_qr
    linalg_slogdet linalg_solve linalg_solve_triangular linalg_svd linalg_svdvals linalg_tensorinv
    linalg_tensorsolve logdet lu_solve matrix_exp orgqr ormqr pinverse qr slogdet svd triangular_solve
"""
_SPECTRA = """
    fft_fft fft_fft2 fft_fftn fft_hfft fft_ifft fft_ifft2 fft_ifftn fft_ihfft fft_irfft fft_irfft2 fft_irfftn fft_rfft
    fft_rfft2 fft_rfftn istft stft
"""
_OF_SEVERAL = """
    addcdiv addcmul atan2 bilinear cat cross index_add index_copy index_put lerp masked_scatter scatter scatter_add
    stack
"""
# They select values, or their kernels add up in fp32.
_NEUTRAL = """
    adaptive_avg_pool3d adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d max_pool3d max_unpool2d
    max_unpool3d reflection_pad1d reflection_pad2d replication_pad1d replication_pad2d replication_pad3d
"""
# Its gradient, 1 / (p * (1 - p)), leaves the range of low precision however exact the loss itself is.
_BANNED = "binary_cross_entropy"

_LISTS = {
    Treatment.LOW: (_PRODUCTS, _CONVOLUTIONS, _ATTENTION, _RECURRENT),
    Treatment.FP32: (
        _POINTWISE, _REDUCTIONS, _NORMALIZATIONS, _LOSSES, _SAMPLING, _LINEAR_ALGEBRA, _SPECTRA,
    ),
    Treatment.WIDEST: (_OF_SEVERAL,),
    Treatment.AS_IS: (_NEUTRAL,),
    Treatment.REFUSED: (_BANNED,),
}  # fmt: skip

O1: Mapping[str, Treatment] = MappingProxyType(
    {name: treatment for treatment, lists in _LISTS.items() for names in lists for name in names.split()}
)
"""Each operator's treatment. Other operators run as they are; torch's autocast handles them on no device."""

PROMOTES_BY_ITSELF = frozenset({"addcdiv", "addcmul", "atan2", "cat", "stack"})
"""Operators that compute in the widest dtype of their inputs without a cast."""

O1_REPLACES = frozenset(f"{_RECURRENT} {_NEUTRAL} {_BANNED} dot grid_sampler linalg_vecdot tensordot vdot".split())
"""Operators for which torch's autocast has a kernel on some device that differs from the table.

The kernels of recurrent cells do not differ. But they would cast the same weights again in each step of a sequence,
because O1's regions switch torch's cache off.
"""


def torch_treatment(name: str, registered: frozenset[str]) -> Treatment:
    """Return the treatment by torch's own autocast of one of `O1_REPLACES`.

    It stands in for torch's kernel if a torch cannot return it. `registered` are the operators that torch intercepts
    on the device. torch has two lists: a long one with pooling and padding, which are computed in fp32 like all that
    differs, and a short one, in which operators of several tensors take the widest dtype.

    Source: `aten/src/ATen/autocast_mode.h` and `autocast_mode.cpp` of torch 2.7.
    """
    if name in _RECURRENT.split() or name == "linalg_vecdot":
        return Treatment.LOW
    if "aten::max_pool3d" in registered:
        return Treatment.FP32
    return Treatment.REFUSED if name == _BANNED else Treatment.WIDEST

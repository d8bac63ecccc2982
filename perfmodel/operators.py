"""What torch's operations multiply: the ones that count, and the ones that are free."""

from dataclasses import dataclass
from typing import Any

from torch import Tag, Tensor

from fixedpoint_kernels._torch_private.tensors import OpOverload
from perfmodel import madds

__all__ = ["Product", "is_free", "product"]

CONVOLUTIONS = {"convolution", "_convolution", "convolution_overrideable"}
PRODUCTS = {  # which arguments are multiplied
    **dict.fromkeys(("mm", "bmm", "mv", "dot", "vdot", "_int_mm", "_scaled_mm"), (0, 1)),
    **dict.fromkeys(("addmm", "baddbmm", "addbmm", "addmv", "_addmm_activation"), (1, 2)),
}
ATTENTION = "_scaled_dot_product_"
EMBEDDINGS = {"embedding", "embedding_bag", "_embedding_bag", "_embedding_bag_forward_only"}
FREE_NAMES = """
_adaptive_avg_pool2d _adaptive_avg_pool3d adaptive_avg_pool1d adaptive_max_pool2d
adaptive_max_pool3d all amax amin aminmax any arange argmax argmin argsort avg_pool1d avg_pool2d
avg_pool3d bernoulli_ binary_cross_entropy_with_logits bincount bucketize cat channel_shuffle
clone col2im constant_pad_nd copy_ count_nonzero cummax cummin cumprod cumsum detach_ diag_embed
diagonal_copy dist dropout empty empty_like empty_permuted empty_strided expand_copy exponential_
eye fill_ flip floor_divide fractional_max_pool2d full full_like gather glu grid_sampler_2d
grid_sampler_3d hardswish huber_loss im2col index index_add index_copy index_fill index_put
index_put_ index_select isin kthvalue lift_fresh linalg_cross linspace log_softmax _log_softmax
log_sigmoid_forward logcumsumexp logsumexp masked_fill masked_fill_ masked_scatter masked_select
max max_pool2d_with_indices max_pool3d_with_indices mean median min mode mse_loss
native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional
_native_batch_norm_legit_no_training _batch_norm_with_update _batch_norm_no_update native_dropout
native_group_norm native_layer_norm new_empty new_empty_strided new_full new_ones new_zeros
nll_loss_forward nll_loss2d_forward norm normal_ one_hot ones ones_like _fused_rms_norm pad
pixel_shuffle pixel_unshuffle _prelu_kernel polar prod rand rand_like randint randn randn_like
randperm reflection_pad1d reflection_pad2d reflection_pad3d repeat repeat_interleave
replication_pad1d replication_pad2d replication_pad3d reshape resize_ resize_as_ roll rot90
rrelu_with_noise _safe_softmax scalar_tensor scatter scatter_ scatter_add scatter_add_
scatter_reduce searchsorted select_copy set_ slice_copy smooth_l1_loss softmax _softmax sort split
split_with_sizes_copy squeeze_copy stack std std_mean sum _to_copy topk trace transpose_ tril
tril_ triu triu_ unbind_copy unfold_copy uniform_ unsafe_chunk unsafe_split
unsafe_split_with_sizes _unsafe_index _unsafe_view unsqueeze_ upsample_bicubic2d
_upsample_bicubic2d_aa upsample_bilinear2d _upsample_bilinear2d_aa upsample_linear1d
_upsample_nearest_exact1d upsample_nearest1d _upsample_nearest_exact2d upsample_nearest2d
_upsample_nearest_exact3d upsample_nearest3d upsample_trilinear3d var var_mean
_weight_norm_interface zero_ zeros zeros_like linalg_vector_norm
"""
FREE = {*FREE_NAMES.split(), *EMBEDDINGS}
OWN_FREE = "few_bit_", "division_", "forward_save_"  # of our operators: others are products


@dataclass(frozen=True)
class Product:
    """One multiplication of tensors.

    Args:
        kind: As ``Layer.kind``, while neither operand is known to be a weight.
        madds: Multiply-adds.
        left: Activation.
        right: Weight, or the other activation.
    """

    kind: str
    madds: int
    left: Tensor
    right: Tensor


def name_of(op: OpOverload) -> str:
    """Return the operation's name without namespace and overload."""
    return op.name().partition("::")[2].partition(".")[0]


def product(op: OpOverload, arguments: tuple[Any, ...], output: Any) -> Product | None:
    """Return what an operation multiplies; None where it is not known to multiply."""
    name = name_of(op)
    if op.namespace != "aten":
        return None
    if name in CONVOLUTIONS:
        return _convolution(arguments, output)
    if name in PRODUCTS:
        left, right = (arguments[i] for i in PRODUCTS[name])
        return Product("matmul", madds.matmul(left.shape, right.shape), left, right)
    if name.startswith(ATTENTION):
        query, key, value = arguments[:3]
        count = madds.attention(query.shape, key.shape, value.shape)
        return Product("attention", count, query, key)
    if name == "_trilinear":
        left, weight = arguments[:2]
        return Product("bilinear", madds.bilinear(left.shape, weight.shape), left, weight)
    return None


def _convolution(arguments: tuple[Any, ...], output: Tensor) -> Product:
    x, weight, is_transposed = arguments[0], arguments[1], arguments[6]
    if is_transposed:
        count = madds.transposed_convolution(weight.shape, x.shape)
        return Product(f"conv_transpose{x.ndim - 2}d", count, x, weight)
    count = madds.convolution(weight.shape, output.shape)
    return Product(f"conv{x.ndim - 2}d", count, x, weight)


def is_free(op: OpOverload) -> bool:
    """Whether an operation is known to multiply nothing but element with element."""
    if op.namespace == "fixedpoint_kernels":
        return name_of(op).startswith(OWN_FREE)
    if op.namespace == "profiler":  # names of what runs, as DataParallel gives them
        return True
    if op.namespace not in ("aten", "prim", "prims"):
        return False
    return op.is_view or Tag.pointwise in op.tags or name_of(op) in FREE

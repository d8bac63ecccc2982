"""What the numbers of an operation mean: places in a row of int64. Addresses are of elements."""

from fixedpoint_kernels.llvm.passes import BFLOAT16, FLOAT32, FUSED, PLAIN, SCALED
from fixedpoint_kernels.products.shapes import LONGEST_SUM

__all__ = ["BFLOAT16", "FLOAT32", "FUSED", "LONGEST_SUM", "PLAIN", "SCALED"]

NOISE_BLOCK = 512  # elements that are rounded at once

# kinds of operations
(
    COEFFICIENTS,  # once: batch norm's, from the sums of all images
    GRADIENT_COEFFICIENTS,  # once
    VALUE,  # elements of a value, and codes of them
    PRODUCT,  # a layer's sums
    GRADIENT,  # codes of the gradient of what a layer makes
    WEIGHT_PRODUCT,
    INPUT_PRODUCT,
    FINISH,  # the gradient of a value, from what comes back
    POOL,  # the largest elements of a value's windows
    UNPOOL,  # the gradient of a value, from that of what was pooled from it
    WEIGH,  # the gradient of a gate, from that of its product with a value
    WEIGHTS_BY_OUTPUT,  # a weight's gradient, of all images: a thread takes some outputs
    MOMENTS,  # a value as bfloat16 for batch norm, and its sums
    NORM_GRADIENT,  # the gradient of what batch norm took
    JOIN,  # a value among the channels of another, each place repeated
    JOIN_SUMS,  # the same of what batch norm takes
    CUT,  # the gradient of such a value, from that of the other
) = range(17)

(
    KIND, CHANNELS, ELEMENTS, PADDED, PATTERN, POSITIONS, HAS_NORM,
    # of a value: its terms, and what is made of it
    FIRST, Z, A, B, SECOND, Z2, A2, B2, X, RELU, RELU_MASK, Y, CODES, CLIP_MASK, CLIPS, BOTH, CLAMPED,
    # of batch norm
    STATISTICS, MEANS, INVERSES, VARIANCES, NUMBERS, SCALE, SHIFT, RUNNING_MEAN, RUNNING_VARIANCE,
    # of products
    WEIGHTS, BEGIN, POWERS, OUT, CODES_STEP, SCALES, WEIGHT_FL, FACTORS, SEED, STREAM, TOTALS, HELD, ZEROES,
    # of gradients
    G, GA, GB, GC, HAS_PRODUCT, ADD, ADD2, OUTER, OUTER_OUT, SEEN, SUMS, SUMS_STRIDE, WHICH, OF_SCALE, OF_SHIFT,
    # of weights that are laid out
    W_OUTPUTS, W_INPUTS, W_TAPS, W_STEP_O, W_STEP_C, W_STEP_T, W_PART_TAPS, W_NUMBERS, W_OFFSETS,
    W_DEPTH, W_IS_TURNED, W_FLIPS, W_PACKED, W_SPOTS, W_MEETS, W_IS_FLAT, W_GROUPS, W_FIRSTS,
    W_STARTS, W_ROWS, W_SUM_ROWS, W_IS_ALONE, W_SCALES,
    # of pooling: numbers of windows, see ``pooling``, and which of a window's places was the largest; 0: means
    WINDOWS, PLACES,
    # of curves, and of gates: one number a channel and image, so many bytes from image to image
    CURVE, GATE, GATE_STEP, SCALED_GRADIENT,
    # of joining: the other value's channels, the first of these, its elements from image to image, the
    # width of the value that is among them, how many places down and across are made of one, whether
    # a gradient is added, and how many channels of zeros are before and behind those of the value
    J_CHANNELS, J_FIRST, J_PADDED, J_WIDTH, J_DOWN, J_ACROSS, J_ADDS, J_BEFORE, J_BEHIND,
) = range(99)  # fmt: skip
COUNT = 99

(
    # of a program: addresses of its table, (operations, 4) float32 reals, rows of ``jobs``, (regions, 3)
    # int64 of first operation, after the last one and how many images at a time
    C_TABLE, C_REALS, C_DETAILS, C_REGIONS, C_OPERATIONS, C_IMAGES, C_THREADS,
    # of the threads' memory, one after the other: its address, bytes of each, and the address of (6,)
    # int64: where in it which part begins
    C_SCRATCH, C_SCRATCH_BYTES, C_PLACES,
    # of weights that are laid out before: tasks, their float32, which 16 columns of which task, and how
    # many such items; each thread's memory for that, and its bytes
    C_TASKS, C_TASK_REALS, C_ITEMS, C_ITEM_COUNT, C_SPARE, C_SPARE_BYTES,
    # of weights' gradients that are written at the end: the same of layers, see ``weights.collect_share``
    C_COLLECT, C_COLLECT_ITEMS, C_COLLECT_COUNT,
) = range(19)  # fmt: skip
CONTEXT = 19

"""What the numbers of an operation mean: places in a row of int64.

An operand has an address and bytes of a row: 0 where the address counts from a thread's own memory,
which holds the rows of one chunk.
"""

# kinds of operations
(
    LINEAR, LINEAR_BACKWARD, NORM, NORM_BACKWARD, CURVE, CURVE_BACKWARD, RELU, RELU_BACKWARD,
    ADD, PASS_ON, BLANK, ATTENTION, ATTENTION_BACKWARD, DROPOUT, DROPOUT_BACKWARD,
    MULTIPLY, MULTIPLY_BACKWARD, ROTARY, ROTARY_BACKWARD, CUT, CUT_BACKWARD,
) = range(21)  # fmt: skip

(
    KIND, WIDTH, X, X_ROW, OTHER, OTHER_ROW, Y, Y_ROW,
    # of gradients: whether they are added to what is there; where sums over rows begin in a partial
    ADDS, SUMS, SUMS2,
    # of linear layers
    DEPTH, OUTPUTS, CODES, MASK, FLIP, CLAMPED, WEIGHTS, BEGIN, BIAS, GROUP_BYTES, RUNS, STARTS,
    GRAD_CODES, SCALES, WEIGHT_FL, SEED, STREAM, SECOND_STREAM, SUM_POWERS, FACTORS,
    # of norms, activation functions and products
    KEPT, OTHER_KEPT, INVERSE, SCALE, SHIFT, CENTRED, CURVE_NUMBER,
    # of attention: queries, keys and values, and their gradients; of norms, too: heads
    Q, Q_ROW, Q_STEP, K, K_ROW, K_STEP, V, V_ROW, V_STEP, Q_LINE, K_LINE, V_LINE,
    Q_START, K_START, V_START,
    DQ, DQ_ROW, DK, DK_ROW, DV, DV_ROW, DK_ADDS, DV_ADDS, HEADS, SIZE, CAUSAL, GROUPS,
    # of rotary embeddings, whose part is that of queries, as that of a cut is
    COS, SIN, TURNED, BY_SAMPLE, IN_PAIRS,
    # of gradients of weights; how they lie, see ``by_outputs.write_weights``
    OUT, LSB, LIES,
    # what tiles must know of codes, see ``tiles.kind_of_bytes``
    BYTES,
    # below which 16 random bits make a 0; 0: no dropout
    THRESHOLD,
) = range(75)  # fmt: skip
COUNT = 75

# parts of a thread's memory
WORK, ROUNDED, POWERS, HEAD, LOCAL = range(5)

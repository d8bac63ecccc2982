"""Activations that keep 1 to 8 bits an element for backward, with the best table for those bits.

from fixedpoint_kernels import few_bit
activation = few_bit.GELU(bits=3)             # or few_bit.gelu(x, bits=3)
few_bit.Activation(my_function, bits=2)       # any differentiable function
few_bit.solve("gelu", 3).loss                 # the table itself
"""

from typing import Any

from fixedpoint_kernels.few_bit.functional import FUNCTIONS
from fixedpoint_kernels.few_bit.integrals import Function, Weight
from fixedpoint_kernels.few_bit.modules import MODULES, Activation
from fixedpoint_kernels.few_bit.named import NAMES, function_of, resolve
from fixedpoint_kernels.few_bit.solver import Codes, solve_function
from fixedpoint_kernels.few_bit.table import Table

_NAMED = FUNCTIONS | {kind.__name__: ours for kind, ours in MODULES.items()}
globals().update(_NAMED)

__all__ = ["NAMES", "Activation", "Table", "solve"]
__all__ += sorted(_NAMED)  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:  # for type checkers: the names of the table are set above
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def solve(
    f_or_name: Function | str,
    bits: int,
    *,
    weight: Weight = "uniform",
    interval: tuple[float, float] = (-10.0, 10.0),
    codes: Codes = "value",
    grid: int = 8000,
) -> Table:
    """Find the piecewise constant function of ``2**bits`` levels nearest to a derivative.

    The loss is the integral of ``(f' - level)**2 * weight``. A dynamic program over a grid finds
    the cut, Newton's method moves its borders between grid points. Where f' jumps, the grid gets
    the jump; levels that turn out equal are merged, so a table may have fewer than asked for.

    Args:
        f_or_name: A differentiable function of a float64 tensor, element by element, or one of
            ``few_bit.NAMES``, with torch's default parameters.
        bits: 1 to 8.
        weight: ``"uniform"``, ``"normal"`` (mean 0, deviation 1), or a function of a tensor that
            returns densities.
        interval: Outside it the weight is 0; the outer pieces go on.
        codes: ``"value"``: any set of points may share a level, the best that ``bits`` bits can do;
            ``"interval"``: each level has one interval; ``"parity"``: intervals of ``abs(x)``, for
            an even f'. The last two are the paper's, and take ``O(grid**2 * 2**bits)`` time.
        grid: Cells of the grid.

    Returns:
        Borders, codes, levels and loss.

    Raises:
        ValueError: An argument is not as above, or f' is not finite on the interval.

    Source:
        Few-Bit Backward, section 3. Differs: equation 6 lacks the normaliser of y, equation 7 means
        DP(j, k - 1); codes by value are ours.
    """
    function = function_of(*resolve(f_or_name)) if isinstance(f_or_name, str) else f_or_name
    return solve_function(function, bits, weight=weight, interval=interval, codes=codes, grid=grid)

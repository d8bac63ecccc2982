"""What belongs to the channels that a layer makes: powers of two, at addresses that kernels know."""

from collections.abc import Callable, Sequence

import numpy as np

from fixedpoint_kernels.formats import FixedPoint

__all__ = ["Powers"]


class Powers:
    """Powers of two of a layer, float32; those of fractional bits by channel are written at each call.

    Args:
        formats: Of what it takes and of its weight; None: it multiplies nothing, and its powers are 1.
        by_channel: Whether channels have fractional bits of their own: the weight's format is that of those that
            have none.
        channels: That it makes.
        pattern: Elements of a gradient after which channels begin again, as kernels read them.
        array: Makes an array that stays where it is, of so many elements and a type.

    Attributes:
        of_sums: Address of what exact sums are multiplied by, a channel each.
        of_weights: Address of what weights are multiplied by to be codes, so too; 0: by one number.
        of_gradients: Address of what the gradient of the sums is multiplied by, before its product with codes
            of weights, as elements lie; 0: by nothing.
    """

    def __init__(
        self,
        formats: tuple[FixedPoint, FixedPoint] | None,
        by_channel: bool,
        channels: int,
        pattern: int,
        array: Callable[[int, type], np.ndarray],
    ) -> None:
        self._formats, self._shifts = formats, (0,) * channels if by_channel else ()
        size = -(channels // -16) * 16
        self._sums = array(size, np.float32)
        self._sums[:] = 1.0 if formats is None else formats[0].lsb * formats[1].lsb
        self.of_sums, self.of_weights, self.of_gradients = self._sums.ctypes.data, 0, 0
        if by_channel:
            self._weights, self._gradients = array(size, np.float32), array(pattern, np.float32)
            self.of_weights = self._weights.ctypes.data
            self.of_gradients = self._gradients.ctypes.data
            self._write()

    def move(self, shifts: Sequence[int]) -> bool:
        """Write the powers of channels that have so many fractional bits more; empty: they share one length.

        Returns:
            Whether they are others than before.

        Raises:
            ValueError: There are more or fewer shifts than the layer needs.
        """
        if len(shifts) != len(self._shifts):
            raise ValueError(f"the layer needs {len(self._shifts)} shifts, got {len(shifts)}")
        if shifts == self._shifts:
            return False
        self._shifts = tuple(shifts)
        self._write()
        return True

    def _write(self) -> None:
        assert self._formats is not None
        inputs, weight = self._formats
        moved = np.ldexp(np.float32(1), self._shifts)
        self._sums[: len(moved)] = inputs.lsb * weight.lsb / moved
        self._weights[: len(moved)] = weight.scale * moved
        self._gradients[:] = np.resize(1 / moved, len(self._gradients))

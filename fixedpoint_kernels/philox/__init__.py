"""Counter-based noise, private to each call: the same bits on every device.

Element ``i`` of stream ``stream`` under seed ``seed`` is word ``i & 3`` of Philox-4x32-10 with
the 64-bit ``seed`` as key (low half first) and the 128-bit counter ``(i >> 2, stream)``, each half
as two 32-bit words, low first. A word ``w`` becomes the float32 ``(w >> 8) * 2**-24`` in [0, 1).

Source:
    Salmon et al., 2011, Parallel Random Numbers: As Easy as 1, 2, 3.
"""

from fixedpoint_kernels.philox.reference import Key, uniform, words

__all__ = ["Key", "uniform", "words"]

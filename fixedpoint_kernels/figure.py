"""A figure that notebooks show where it stands; importing this loads matplotlib."""

import io

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

__all__ = ["Shown"]


class Shown(Figure):
    """A figure of matplotlib's that a notebook shows without ``%matplotlib inline``.

    Args:
        width: Inches.
        height: Inches.
    """

    def __init__(self, width: float = 8.0, height: float = 3.5) -> None:
        super().__init__(figsize=(width, height), layout="constrained")
        FigureCanvasAgg(self)

    def _repr_png_(self) -> bytes:
        picture = io.BytesIO()
        self.savefig(picture, format="png")
        return picture.getvalue()

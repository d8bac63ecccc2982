"""From a trained model to what is exported: rounded weights, formats, and the network of both."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import Tensor, nn

from marvin import calibration
from marvin.estimators import Estimator, check_estimator
from marvin.export.errors import check_length, check_tensor, fixed_point
from marvin.export.frontend.calibrate import calibrate
from marvin.export.frontend.trace import describe
from marvin.export.graph.formats import activation_formats
from marvin.export.graph.nodes import Network
from marvin.export.passes.round_sums import round_sums
from marvin.export.targets.packed import Packed, pack_state
from marvin.refused import check_model
from marvin.rounding import Format

__all__ = ["Deployed", "Options", "deploy"]

_COMPARED = 32  # samples that go through the model and through what is exported
_BATCH = 64  # samples of which ranges are taken at a time


@dataclass(frozen=True)
class Options:
    """How a model becomes a network.

    Args:
        wl: Word length where a format must be found by calibration, 2 to 32 bits, 31 where values cannot be
            below 0.
        scale_wl: Word length of batch normalisation's scale, 2 to 32 bits.
        sums_wl: Word length of the terms of sums, 2 to 32 bits; None: as exact as they come.
        recalibrate: Take the ranges of what the model rounds again, from the samples, in eval mode;
            word lengths and weights stay. See ``marvin.calibrate``.
        estimator: How ranges are found: see ``marvin.calibrate``.

    Raises:
        ExportError: A word length is out of range.
        TypeError: A word length is no whole number, or ``recalibrate`` neither True nor False.
        ValueError: There is no such estimator.
    """

    wl: int = 8
    scale_wl: int = 16
    sums_wl: int | None = None
    recalibrate: bool = False
    estimator: Estimator = "noise"

    def __post_init__(self) -> None:
        """Refuse what no export can take, before it is needed."""
        check_length("wl", self.wl)
        check_length("scale_wl", self.scale_wl)
        if self.sums_wl is not None:
            check_length("sums_wl", self.sums_wl)
        if not isinstance(self.recalibrate, bool):
            raise TypeError(f"recalibrate must be True or False, got {self.recalibrate!r:.80}")
        check_estimator(self.estimator)


@dataclass(frozen=True)
class Deployed:
    """What is exported.

    Args:
        model: A copy of the trained one, with the weights that are exported.
        formats: Of its parameters.
        network: Its operations.
        exact: ``network`` with exact sums; the same where sums are not rounded.
    """

    model: nn.Module
    formats: Mapping[str, Format]
    network: Network
    exact: Network

    def packed(self) -> Packed:
        """Return the model's state and the network, both as integers, what both have once."""
        return pack_state(self.tensors(), self.formats, self.network.formats(), self.network)

    def tensors(self) -> dict[str, Tensor]:
        """Return the tensors of the model's state: what else ``get_extra_state`` gives is left out."""
        state = self.model.state_dict()
        return {name: x for name, x in state.items() if isinstance(x, Tensor)}


def deploy(
    model: nn.Module, formats: Mapping[str, Format], samples: Tensor, options: Options
) -> Deployed:
    """Return the network of a model.

    Formats of activations are those that the model carries. Where it carries none, what layers take
    gets formats of ``options.wl`` bits by ``options.estimator``, from ``samples``. Terms of sums and means
    get formats of ``options.sums_wl`` bits that hold theirs.

    Args:
        model: Its weights are numbers of ``formats``: from ``nearest_weights``, or frozen.
        formats: Of parameters, by name.
        samples: What the model takes, shape ``(n, ...)``, float32; the more the better.
        options: See there.

    Raises:
        ExportError: Something in the model cannot be exported; says what, and why.
        TypeError: An argument is of another kind.
    """
    check_model(model, "deploy(model, formats, samples, options)")
    check_tensor(samples)
    if not isinstance(formats, Mapping):
        raise TypeError(
            f"formats must be a mapping of names, got {type(formats).__name__}: write weight_formats(model)"
        )
    if not isinstance(options, Options):
        raise TypeError(
            f"options must be an Options, got {type(options).__name__}: write Options()"
        )
    for name, fmt in formats.items():
        fixed_point(name, fmt)
    activations, origin = None, "trained"
    if not activation_formats(model):
        activations = calibrate(model, samples.split(_BATCH), options.wl, options.estimator)
    elif options.recalibrate:
        origin = "calibrated"
        model = calibration.calibrate(model, samples.split(_BATCH), estimator=options.estimator)
    sample = samples[:_COMPARED]
    lengths = {"scale_wl": options.scale_wl, "wl": options.wl}
    exact = describe(model, sample, formats, activations, **lengths, calibration=samples)
    exact = replace(exact, origin=origin) if activations is None else exact
    wl = options.sums_wl
    network = exact if wl is None else round_sums(exact, samples, wl)
    return Deployed(model, formats, network, exact)

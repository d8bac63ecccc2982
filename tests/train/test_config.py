import dataclasses
import inspect
import json

import pytest
import torch

import marvin
from train.alexnet import DEFAULTS as ALEXNET
from train.config import MSGD_KEYWORDS, Config, from_dict, parse, run_folder, to_dict
from train.resnet20 import DEFAULTS as RESNET20


def test_no_flag_gives_the_defaults():
    assert parse(ALEXNET, []) == ALEXNET
    assert parse(RESNET20, []).buffer_bits == 8


def test_every_kind_of_flag():
    words = "--lookback 3 9 --kl-eps noise --no-quantize-activations --symmetric --lr 0.5"
    got = parse(RESNET20, [*words.split(), "--strategy", "mean", "--epochs", "7"])
    assert got == dataclasses.replace(
        RESNET20,
        lookback=(3, 9),
        kl_eps="noise",
        quantize_activations=False,
        symmetric=True,
        lr=0.5,
        strategy="mean",
        epochs=7,
    )
    assert parse(RESNET20, ["--kl-eps", "1e-3"]).kl_eps == 1e-3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--epochs 0", "--epochs must be at least 1, got 0"),
        ("--epochs ten", "argument --epochs: invalid int value: 'ten'"),
        ("--strategy best", "invalid choice: 'best'"),
        ("--kl-eps tiny", "must be a number or 'noise', got 'tiny'"),
        ("--lookback 5", "expected 2 arguments"),
        ("--validation-share 1", "--validation-share must be 0 to below 1, got 1.0"),
        ("--plateau-factor 2", "--plateau-factor must be between 0 and 1, got 2.0"),
        ("--epoch 3", "unrecognized arguments: --epoch 3"),
    ],
)
def test_bad_values_end_with_a_message(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(RESNET20, words.split())
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_every_flag_says_what_it_means(capsys):
    with pytest.raises(SystemExit):
        parse(RESNET20, ["--help"])
    shown = capsys.readouterr().out
    for f in dataclasses.fields(Config):
        if f.name != "model":
            assert "--" + f.name.replace("_", "-") in shown
            assert len(f.metadata["help"]) > 8


def test_configuration_survives_json():
    config = dataclasses.replace(RESNET20, lookback=(3, 9), kl_eps="noise", run="somewhere")
    assert from_dict(json.loads(json.dumps(to_dict(config)))) == config
    with pytest.raises(ValueError, match="known names only, got colour"):
        from_dict({"colour": "red"})


def test_every_argument_of_msgd_is_a_flag_with_the_same_default():
    signature = inspect.signature(marvin.MSGD).parameters
    arguments = {name: p.default for name, p in signature.items() if name != "params"}
    assert set(MSGD_KEYWORDS) == set(arguments)
    defaults = {name: getattr(Config(), name) for name in MSGD_KEYWORDS}
    by_model = {"buffer_bits": arguments["buffer_bits"]}  # each model's script has its own
    assert defaults | by_model == arguments


def test_choices_are_those_of_msgd():
    for f in dataclasses.fields(Config):
        for choice in f.metadata.get("choices", ()):
            if f.name in MSGD_KEYWORDS:
                marvin.MSGD([torch.zeros(2, 2, requires_grad=True)], **{f.name: choice})


def test_the_run_folder_is_named_after_the_run():
    config = dataclasses.replace(RESNET20, dataset="digits", seed=3)
    assert str(run_folder(config)) == "runs/resnet20-digits-msgd-seed3"
    assert str(run_folder(dataclasses.replace(config, run="a/b"))) == "a/b"

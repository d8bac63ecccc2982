import dataclasses
import json
import math

import pytest
import torch

import marvin
from train.alexnet import DEFAULTS as ALEXNET
from train.arguments import READ_BY, parse
from train.checks import MAY_BE_INFINITE
from train.config import MSGD_KEYWORDS, Config, from_dict, run_folder, to_dict
from train.resnet20 import DEFAULTS as RESNET20


def _first(value):
    return value[0] if isinstance(value, tuple) else value


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
        ("--optimizer sgd --policy loss-budget", "write --policy loss-budget alone, or"),
        ("--optimizer sgd --policy fixed:8,4", "write --policy fixed:8,4 alone, or"),
        ("--optimizer sgd --policy marvin", "leave one of them out"),
        ("--optimizer msgd --policy none", "leave one of them out"),
        ("--batch-size 99999999999999999999", "--batch-size must be at most 1000000000, got 99999"),
        ("--seed 9223372036854775808", "--seed must be at most 9223372036854775807, got 922337203"),
        ("--init-wl 99", "--init-wl must be at most 32, got 99"),
        ("--policy static --lookback 0 9", "--lookback must be at least 1, got 0"),
        ("--policy fixed:8", "--policy must be marvin, muppet, "),
        (
            "--forward-save division --bits 4",
            "--bits must be with --forward-save few-bit or --forward-save few-bit+division, "
            "got --forward-save division; for word lengths write --policy-bits, --target-bits or",
        ),
        ("--division-bits 4", "--division-bits must be with --forward-save division or"),
        (
            "--gradient-bits 0 --optimizer sgd",
            "--gradient-bits must be with --execution int8, got --execution float32",
        ),
        ("--kappa 0.1", "--kappa must be with --policy loss-budget, got --policy marvin"),
        (
            "--ends-bits 8",
            "must be with --policy loss-budget or --policy static, got --policy marvin",
        ),
        (
            "--policy loss-budget --max-wl 8",
            "--max-wl must be with --policy marvin, got --policy loss",
        ),
        (
            "--policy loss-budget --policy-bits 8 4",
            "--policy-bits must be the shortest word length, then the longest: 2 to 16 bits, 0 for "
            "the default, got (8, 4)",
        ),
        ("--policy loss-budget --policy-bits 9 0", "--policy-bits must be the shortest"),
        (
            "--policy muppet --no-quantize-gradients",
            "--no-quantize-gradients must be without --policy muppet, which rounds gradients",
        ),
        (
            "--policy static --symmetric",
            "--symmetric must be with --policy marvin or --policy fixed:WL,FL, got --policy static",
        ),
        ("--policy loss-budget --symmetric", "--symmetric must be with --policy marvin or"),
        ("--policy muppet --symmetric", "--symmetric must be with --policy marvin or"),
        (
            "--policy loss-budget --one-dim float",
            "--one-dim must be with --policy marvin or --policy muppet or --policy fixed:WL,FL, got",
        ),
        ("--policy static --one-dim previous", "--one-dim must be with --policy marvin or"),
        ("--policy static --policy-bits 6 17", "--policy-bits must be weights, then inputs: 2 to"),
        ("--policy static --ends-bits 1", "--ends-bits must be 2 to 16, or 0, got 1"),
        ("--policy loss-budget --kappa 0", "--kappa must be above 0, got 0.0"),
        ("--policy loss-budget --max-noise 0 1", "--max-noise must be above 0, twice, got"),
        (
            "--policy loss-budget --target-bits 3",
            "--target-bits must be 4 to 8, the lengths of --policy-bits, got 3.0",
        ),
    ],
)
def test_bad_values_end_with_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as caught:
        parse(RESNET20, words.split())
    assert caught.value.code == 2
    shown = capsys.readouterr().err
    assert message in shown
    assert shown.startswith("python -m train.resnet20: error: ")
    assert shown.count("\n") == 1


@pytest.mark.parametrize(
    "words",
    [
        "--policy static --policy-bits 8 4",
        "--policy loss-budget --policy-bits 2 4 --target-bits 3",
        "--policy loss-budget --policy-bits 0 5 --ends-bits 8",
        "--policy none --policy-bits 8 4",
        "--policy fixed:8,4 --symmetric --one-dim float",
        "--policy muppet --one-dim float --quantize-gradients",
        "--policy fixed:8,4 --no-quantize-gradients",
        "--policy none --symmetric --no-quantize-gradients",
    ],
)
def test_lengths_that_a_policy_takes_are_taken(words):
    assert parse(RESNET20, words.split())


def test_zeros_before_a_length_say_nothing():
    assert parse(RESNET20, ["--policy", "fixed:008,03"]).policy == "fixed:8,3"
    assert from_dict({"policy": "fixed:08,-01"}).policy == "fixed:8,-1"


def test_flags_of_marvin_are_those_of_its_policy():
    fields = {f.name for f in dataclasses.fields(marvin.MarvinPolicy)}
    (names,) = [names for names, readers in READ_BY.items() if readers == ("marvin",)]
    assert set(names) == fields - {"symmetric"}  # which FixedPolicy takes, too
    assert parse(RESNET20, ["--optimizer", "sgd", "--lookback", "3", "9"]).lookback == (3, 9)


def test_float32_may_still_be_asked_for():
    assert parse(RESNET20, ["--optimizer", "sgd"]).method == "sgd"
    assert parse(RESNET20, ["--policy", "none"]).method == "sgd"
    assert parse(RESNET20, ["--optimizer", "sgd", "--policy", "none"]).method == "sgd"


NUMBERS = [f for f in dataclasses.fields(Config) if type(_first(f.default)) in (int, float)]


@pytest.mark.parametrize("field", NUMBERS, ids=lambda f: f.name)
def test_no_number_may_be_nonsense(field, capsys):
    """Flags and stored values alike: what is no number of the flag's kind ends with one line."""
    flag, size = "--" + field.name.replace("_", "-"), 2 if isinstance(field.default, tuple) else 1
    large = () if field.name in MAY_BE_INFINITE else ("1" * 40, "1" * 5000, "inf")
    for text in ("nan", "-inf", "-1e30", "x", "", *large):
        with pytest.raises(SystemExit) as caught:
            parse(RESNET20, [flag, *([text] * size)])
        assert caught.value.code == 2
        shown = capsys.readouterr().err
        assert flag in shown
        assert shown.count("\n") == 1
        assert len(shown) < 6000
    for value in (math.nan, -math.inf, None, "3", [1], {}, True, 10**400):
        stored = to_dict(RESNET20) | {field.name: [value] * size if size > 1 else value}
        with pytest.raises(ValueError, match=flag):
            from_dict(stored)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("model", "../demo"),
        ("model", "__main__"),
        ("model", 3),
        ("dataset", "auto\n"),
        ("activation", "os"),
        ("policy", "fixed:" + "9" * 5000 + ",1"),
        ("policy", None),
        ("optimizer", "adam"),
        ("resume", 1),
        ("data_dir", "a\0b"),
        ("ste", "none"),
        ("lookback", 3),
        ("lookback", [3]),
    ],
)
def test_stored_words_are_checked(name, value):
    with pytest.raises(ValueError, match=f"^--{name.replace('_', '-')} must be .*, got "):
        from_dict(to_dict(RESNET20) | {name: value})


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


def test_choices_are_those_of_msgd():
    for f in dataclasses.fields(Config):
        for choice in f.metadata.get("choices", ()):
            if f.name in MSGD_KEYWORDS:
                marvin.MSGD([torch.zeros(2, 2, requires_grad=True)], **{f.name: choice})


def test_the_run_folder_is_named_after_the_run():
    config = dataclasses.replace(RESNET20, dataset="digits", seed=3)
    assert str(run_folder(config)) == "runs/resnet20-digits-msgd-seed3"
    assert str(run_folder(dataclasses.replace(config, run="a/b"))) == "a/b"

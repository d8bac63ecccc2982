import json
from fractions import Fraction
from random import Random

import numpy as np
import pytest

from benchmarks import soak
from benchmarks.fuzz import draw, oracle
from benchmarks.fuzz.cases import CHECKS, run_one
from benchmarks.fuzz.oracle import Failure, Format
from benchmarks.fuzz.shares import SHARES, counts_of

QUICK = {
    "export": 40,
    "integer": 60,
    "hostile": 400,
    "push_down": 80,
    "expected": 80,
    "few_bit": 80,
    "few_bit_codes": 80,
    "division": 80,
}


@pytest.mark.parametrize("target", list(CHECKS))
def test_made_up_inputs(target):
    for index in range(QUICK.get(target, 200)):
        try:
            run_one(target, 0, index)
        except Exception as error:
            error.add_note(f"python -m benchmarks.soak --fuzz-one {target} 0 {index}")
            raise


def test_an_input_is_a_function_of_its_name():
    drawn = [draw.values(Random("quantize 0 7"), 50, Format(8, 4)).tobytes() for _ in range(2)]
    assert drawn[0] == drawn[1]
    assert drawn[0] != draw.values(Random("quantize 0 8"), 50, Format(8, 4)).tobytes()


def test_inputs_are_shared_out():
    assert set(SHARES) == set(CHECKS)
    counts = counts_of(1_000_000, None, "cpu")
    assert 999_000 <= sum(counts.values()) <= 1_000_000
    assert min(counts_of(1, None, "cpu").values()) == 1
    assert list(counts_of(10, ["pack"], "interpreter")) == ["pack"]
    with pytest.raises(ValueError, match="got export"):
        counts_of(10, ["export"], "interpreter")


# Random123, kat_vectors: counter, key, result
KNOWN = [
    ("00000000 00000000 00000000 00000000", "00000000 00000000"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0"),
]
ANSWERS = [
    "6627e8d5 e169c58d bc57ac4c 9b00dbd8",
    "408f276d 41c83b0e a20bc7c6 6d5451fd",
    "d16cfe09 94fdcceb 5001e420 24126ea1",
]


@pytest.mark.parametrize(("given", "answer"), list(zip(KNOWN, ANSWERS, strict=True)))
def test_the_oracles_philox_has_the_published_answers(given, answer):
    counter, key = ([int(word, 16) for word in text.split()] for text in given)
    assert [int(word[0]) for word in oracle.philox(counter, key)] == [
        int(word, 16) for word in answer.split()
    ]


@pytest.mark.parametrize("is_stochastic", [True, False])
def test_the_oracles_rounding_is_that_of_fractions(is_stochastic):
    chance = Random(0)
    for _ in range(150):
        fmt = draw.format_of(chance, 24)
        x = draw.finite(draw.values(chance, 20, fmt))
        x = x[(np.abs(x) < 2.0**60) & ((np.abs(x) > 2.0**-80) | (x == 0))]  # no under- or overflow
        drawn = oracle.noise(len(x), *draw.key(chance)) if is_stochastic else None
        codes = oracle.encode(x, fmt, drawn)
        for i, value in enumerate(x.tolist()):
            scaled = Fraction(value) * Fraction(2) ** fmt.fl
            if drawn is None:
                want = round(scaled)  # Python's is half to even
            else:  # the fraction as float32 has it
                rest = np.float32(float(scaled - scaled.__floor__()))
                want = scaled.__floor__() + (Fraction(int(drawn[i]), 2**24) < Fraction(float(rest)))
            assert codes[i] == min(max(want, fmt.low), fmt.high)


def test_the_oracle_packs_one_long_integer():
    codes = [-1, 0, 5, -8, 7]
    whole = sum((code % 16) << 4 * i for i, code in enumerate(codes))
    assert oracle.pack(codes, 4) == whole.to_bytes(3, "little")
    assert oracle.unpack(oracle.pack(codes, 4), 4, 5, signed=True) == codes


@pytest.mark.parametrize(
    ("got", "want"),
    [
        ([1.0, 2.0], [1.0, 3.0]),
        ([0.0], [-0.0]),
        ([np.nan], [0.0]),
        ([1.0], [1.0, 1.0]),
    ],
)
def test_a_difference_is_seen(got, want):
    oracle.same(np.array(got), np.array(got), "numbers")
    with pytest.raises(Failure, match="numbers"):
        oracle.same(np.array(got), np.array(want), "numbers")


@pytest.mark.slow
def test_the_command_counts_and_repeats(capfd):
    soak.main(["--fuzz", "100", "--seed", "3", "--targets", "quantize", "pack"])
    found = json.loads(capfd.readouterr().out)
    assert found["inputs"] == counts_of(100, ["quantize", "pack"], "cpu")
    soak.main(["--fuzz-one", "quantize", "3", "5"])
    with pytest.raises(SystemExit, match="2"):
        soak.main(["--fuzz-one", "nothing", "3", "5"])
    assert "targets must be of quantize" in capfd.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize("flag", ["--interpreter", "--pytorch"])
def test_other_executions_have_the_same_bits(flag, capfd):
    soak.main(["--fuzz", "120", flag])
    assert "quantize" in json.loads(capfd.readouterr().out)["inputs"]


@pytest.mark.slow
def test_a_killed_process_names_its_input(monkeypatch, tmp_path):
    package = tmp_path / "sitecustomize.py"
    package.write_text(
        "import os, sys\n"
        "if any('fuzz' in argument for argument in sys.orig_argv):\n"
        "    import random\n"
        "    random.Random.choices = lambda *_a, **_k: os.kill(os.getpid(), 11)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(SystemExit, match="--fuzz-one quantize 3 0: killed by SIGSEGV"):
        soak.main(["--fuzz", "10", "--seed", "3", "--targets", "quantize"])

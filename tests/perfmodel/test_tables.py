import pytest

from perfmodel import papers
from perfmodel.__main__ import main
from perfmodel.forward_save import Division
from perfmodel.tables import few_bit_sizes, follows, kept_by, printed_batches, released_division

GIB = 2**30


@pytest.mark.parametrize(
    ("name", "kept", "nonlinear"),
    [
        ("ResNet-18", 39.02, 11.50),
        ("ResNet-50", 154.48, 47.88),
        ("VGG-16", 158.81, 67.53),
        ("RoBERTa-large", 482.11, 96.00),
    ],
)
def test_appendix_b_of_few_bit(name, kept, nonlinear):
    _, all_, activations = few_bit_sizes(name)
    # Batch statistics and dropout of probability 0 may count or not: 0.11 MiB at most.
    assert all_ == pytest.approx(kept, abs=0.12)
    assert activations == pytest.approx(nonlinear, abs=0.006)


@pytest.mark.parametrize("name", [n for n in papers.FEW_BIT if not n.endswith(("201", "B7"))])
def test_the_zoo_is_near_all_of_appendix_b(name):
    printed = papers.FEW_BIT[name]
    model, all_, nonlinear = few_bit_sizes(name)
    assert model == pytest.approx(printed.model, rel=0.035)
    assert all_ == pytest.approx(printed.kept, rel=0.04)
    assert nonlinear == pytest.approx(printed.nonlinear, rel=0.055)


@pytest.mark.parametrize("name", papers.FEW_BIT)
def test_all_batches_follow_from_the_printed_sizes(name):
    printed = papers.FEW_BIT[name]
    assert all(follows(printed, i) for i in range(5))
    exact = printed_batches(printed.model, printed.kept, printed.nonlinear)
    assert exact == printed.batches or name in ("ResNet-18", "VGG-19")


def test_a_wrong_cell_does_not_follow():
    printed = papers.Printed(44.6, 40.0, 11.5, (820, 1127, 1113, 1100, 1086))
    assert not follows(printed, 0)


@pytest.mark.parametrize(
    ("name", "batch", "size_gib"),
    [
        ("ResNet-50", 64, 5.12),
        ("ResNet-50", 256, 20.48),
        ("WRN-50-2", 64, 6.69),
        ("WRN-50-2", 256, 26.75),
    ],
)
def test_table_1a_of_division(name, batch, size_gib):
    saved = kept_by(name, batch, "in-place", 224)
    assert saved.total_bytes / GIB == pytest.approx(size_gib, abs=0.005)


@pytest.mark.parametrize(("name", "ratio"), [("ResNet-50", 10.47), ("WRN-50-2", 10.70)])
def test_ratios_of_division(name, ratio):
    saved = kept_by(name, 4, "in-place", 224)  # batch statistics weigh more in small batches
    got = saved.total_bytes / released_division(saved, Division(is_cut=False))
    assert got == pytest.approx(ratio, abs=0.02)


@pytest.mark.parametrize(
    ("block", "bits", "ratio"),
    [(18, 2, 10.31), (12, 2, 10.21), (8, 2, 9.69), (8, 4, 5.84), (8, 8, 3.25)],
)
def test_table_2b_of_division(block, bits, ratio):
    saved = kept_by("ResNet-18/CIFAR", 128, "in-place", 32)
    got = saved.total_bytes / released_division(saved, Division(block, bits, is_cut=False))
    assert got == pytest.approx(ratio, rel=0.006)  # they shift so much with the batch


@pytest.mark.slow
def test_command(capsys):
    main(["tables"])
    text = capsys.readouterr().out
    assert "79 of 85 cells are equal, and 85 are within the rounding" in text
    assert all(name in text for name in papers.FEW_BIT)
    assert "nothing here is measured" in text

import dataclasses

import numpy as np
import pytest

from train import plot
from train.config import Config
from train.errors import UserError
from train.records import RunFolder


def test_a_switch_shows_from_the_next_step_on():
    trace = [
        {"step": "2", "layer": "b", "wl": "14"},
        {"step": "3", "layer": "a", "wl": "20"},
        {"step": "4", "layer": "b", "wl": "12"},
        {"step": "5", "layer": "a", "wl": "32"},
    ]
    got = plot.word_lengths(["a", "b"], trace, steps=5, init_wl=8)
    np.testing.assert_array_equal(got, [[8, 8, 8, 20, 20], [8, 8, 14, 14, 12]])


def test_the_figure_is_drawn_from_the_run_folder(run, tiny, tmp_path, capsys):
    run(tiny)
    file = tmp_path / "run" / "word_lengths.png"
    file.unlink()
    plot.main([str(tmp_path / "run")])
    assert capsys.readouterr().out.splitlines()[-1] == str(file)
    assert file.read_bytes().startswith(b"\x89PNG")
    history = plot.read(tmp_path / "run")
    assert history.title == "ResNet20 on digits"
    assert history.word_lengths.shape == (22, 15)
    assert history.layers[0] == "conv  4x1x3x3"
    assert history.epoch_steps == [5, 10, 15]
    assert history.accuracy_of == "validation"
    figure = plot.draw(history)
    heat, curves, *_ = figure.axes
    low, high = heat.images[0].get_clim()
    assert low == 0
    assert history.word_lengths.max() <= high <= 32
    assert curves.get_ylim() == (0, high)


def test_a_run_of_one_step_is_drawn_on_its_own_scale():
    history = plot.History("", ["a"], np.array([[16]]), [1], [0.5], "validation")
    heat, curves, *_ = plot.draw(history).axes
    assert heat.images[0].get_clim() == (0, 16)
    assert curves.get_ylim() == (0, 16)


def test_a_run_whose_folder_takes_no_file_is_drawn_elsewhere(run, tiny, tmp_path, capsys):
    run(dataclasses.replace(tiny, epochs=1))
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    out = tmp_path / "pictures" / "a.png"
    plot.main([str(tmp_path / "run"), "--out", str(out)])
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert out.read_bytes().startswith(b"\x89PNG")
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")} == before


def test_a_picture_of_another_kind_is_refused(tmp_path):
    out = tmp_path / "x.svg"
    with pytest.raises(SystemExit, match=r"error: --out must be .* ending in \.png, got .*x\.svg"):
        plot.main([str(tmp_path), "--out", str(out)])
    assert not out.exists()


def test_formats_of_inputs_have_a_map_of_their_own(run, tiny, tmp_path):
    run(dataclasses.replace(tiny, policy="static", policy_bits=(6, 5), epochs=1))
    history = plot.read(tmp_path / "run")
    assert history.input_lengths is not None
    # the first step is in float32
    np.testing.assert_array_equal(history.word_lengths, [[32, 6, 6, 6, 6]] * 22)
    np.testing.assert_array_equal(history.input_lengths, [[32, 5, 5, 5, 5]] * 22)
    weights, _, _, inputs, *_ = plot.draw(history).axes
    assert weights.images[0].get_clim() == inputs.images[0].get_clim() == (0, 8)
    np.testing.assert_array_equal(inputs.images[0].get_array(), history.input_lengths)


def test_without_validation_the_accuracy_is_that_of_training(run, tiny, tmp_path):
    run(dataclasses.replace(tiny, validation_share=0.0, epochs=1))
    assert plot.read(tmp_path / "run").accuracy_of == "train"


def test_what_cannot_be_drawn_is_named(tmp_path, capsys):
    with pytest.raises(SystemExit) as caught:
        plot.main([str(tmp_path)])
    assert "must be the folder of a run" in str(caught.value.code)
    float_run = RunFolder(tmp_path / "float")
    float_run.prepare(Config(optimizer="sgd"))
    with pytest.raises(UserError, match="must be a run of msgd to have word lengths, got sgd"):
        plot.save(float_run.path)
    begun = RunFolder(tmp_path / "begun")
    begun.prepare(Config())
    with pytest.raises(UserError, match=r"looked for .*metrics.csv"):
        plot.save(begun.path)
    begun.save_rows("metrics.csv", [], ["epoch"])
    with pytest.raises(UserError, match="must have one whole epoch to draw, got none"):
        plot.save(begun.path)

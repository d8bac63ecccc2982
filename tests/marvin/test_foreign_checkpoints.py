"""Sharded checkpoints that are damaged or foreign: one error that names the folder, no code run."""

import copy
import errno
import io
import os
import pathlib
import pickle
import random
import shutil

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint import metadata

import marvin
from tests.same import assert_same

RECORDS = "torch.distributed.checkpoint.metadata"
ENCODING = f"{RECORDS}\n_MEM_FORMAT_ENCODING"


def is_class(value):
    return isinstance(value, type)


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (str(self.path),)


def made(width=3):
    model = nn.Linear(width, 2)
    return model, marvin.MSGD(model.named_parameters())


def trained():
    model, optimizer = made()
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step(loss=1.0)
    return model, optimizer


@pytest.fixture
def saved(tmp_path):
    model, optimizer = trained()
    marvin.save_sharded(tmp_path / "whole", model, optimizer, {"epoch": 3})
    return tmp_path / "whole"


def test_what_is_whole_loads(saved):
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}


def test_metadata_run_no_code(saved, tmp_path):
    (saved / ".metadata").write_bytes(pickle.dumps(Evil(tmp_path / "made")))
    with pytest.raises(ValueError, match=r"whole must hold .*it names \w+\.mkdir"):
        marvin.load_sharded(saved, *made())
    assert not (tmp_path / "made").exists()


def test_metadata_import_nothing(saved, tmp_path, monkeypatch):
    """A module runs when it is imported, whatever is asked of it then."""
    (tmp_path / "ours_to_import.py").write_text("raise KeyboardInterrupt")
    monkeypatch.syspath_prepend(tmp_path)
    for named in (b"ours_to_import\nx", b"torch.utils.tensorboard\nx", b"torch\nonnx"):
        (saved / ".metadata").write_bytes(b"c" + named + b"\n.")
        with pytest.raises(ValueError, match="which no checkpoint does"):
            marvin.load_sharded(saved, *made())


@pytest.mark.parametrize(
    "named", [f"{RECORDS}\nTensorStorageMetadata", "pathlib\nPosixPath", f"{ENCODING}\nK\0\x85R#"]
)
def test_metadata_change_no_class(saved, named):
    """The whole process has it."""
    before = {name: dict(vars(kind)) for name, kind in vars(metadata).items() if is_class(kind)}
    change = "}X\x05\0\0\0stateNs"
    for state in (f"N{change}\x86b.", f"{change}b."):
        (saved / ".metadata").write_bytes(
            f"\x80\x02c{named}\n{state}".replace("#\n", "").encode("latin1")
        )
        with pytest.raises(ValueError, match="whole must hold a whole checkpoint"):
            marvin.load_sharded(saved, *made())
    after = {name: dict(vars(kind)) for name, kind in vars(metadata).items() if is_class(kind)}
    assert after == before
    assert not hasattr(pathlib.PosixPath, "state")
    assert not hasattr(metadata._MEM_FORMAT_ENCODING(0), "state")


def test_what_is_said_to_be_no_tensor_runs_no_code(saved, tmp_path, monkeypatch):
    """torch would unpickle it, whatever stands in its place in the model."""
    real = torch.distributed.checkpoint.save

    def save(state, **where):
        changed = {**state["model"], "weight": Evil(tmp_path / "made")}
        real({**state, "model": changed}, **where)

    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", save)
        marvin.save_sharded(saved, *made())
    with pytest.raises(ValueError, match=r"folder must hold tensors alone, .*: model\.weight"):
        marvin.load_sharded(saved, *made())
    assert not (tmp_path / "made").exists()


def test_a_model_with_other_values_is_named(saved):
    kind = type("Own", (nn.Linear,), {"get_extra_state": lambda _: {"a": 1}})
    model = kind(3, 2)
    optimizer = marvin.MSGD(model.named_parameters())
    with pytest.raises(TypeError, match=r"model's state must hold tensors alone, .*_extra_state"):
        marvin.save_sharded(saved, model, optimizer)
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}  # which is still there


def test_another_model_is_named(saved):
    with pytest.raises(
        ValueError, match=r"whole must hold a whole checkpoint .* of this model"
    ) as found:
        marvin.load_sharded(saved, *made(width=4))
    assert str(found.value).endswith("others: weight of shape (2, 3) in the place of (2, 4)")


def test_what_is_refused_leaves_the_model_as_it_is(saved):
    model = nn.Linear(3, 2)
    adam = torch.optim.Adam(model.named_parameters())
    optimizer = marvin.Quantized(adam, marvin.MarvinPolicy())  # the checkpoint is of SGD
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        ValueError, match=r"of this model and optimizer: .*must be of Adam .*got SGD"
    ):
        marvin.load_sharded(saved, model, optimizer)
    assert all(map(torch.equal, before.values(), model.state_dict().values()))


def test_a_bit_of_a_value_is_missed(saved):
    path = saved / "__0_0.distcp"
    whole = path.read_bytes()
    model, optimizer = made()
    marvin.load_sharded(saved, model, optimizer)
    values = optimizer.state[model.weight]["master"].numpy().tobytes()
    for bit in range(32):
        changed = bytearray(whole)
        changed[whole.index(values) + bit // 8] ^= 1 << bit % 8
        path.write_bytes(bytes(changed))
        with pytest.raises(ValueError, match=r"BadZipFile: wrong checksum of \w+/data/0"):
            marvin.load_sharded(saved, model, optimizer)
    path.write_bytes(whole)
    assert marvin.load_sharded(saved, model, optimizer) == {"epoch": 3}


def test_checksums_are_written_whatever_is_set(tmp_path):
    """``torch.save`` may be told to leave them out."""
    computes = torch.serialization.get_crc32_options()
    try:
        torch.serialization.set_crc32_options(False)
        marvin.save_sharded(tmp_path, *made(), {"epoch": 3})
        assert not torch.serialization.get_crc32_options()
    finally:
        torch.serialization.set_crc32_options(computes)
    assert marvin.load_sharded(tmp_path, *made()) == {"epoch": 3}


def test_a_bit_of_the_metadata_is_missed(saved):
    """But in those of earlier versions, which have no checksum of their own."""
    path = saved / ".metadata"
    whole = path.read_bytes()
    size = whole.index(b"K\x02K\x03\x86")  # of the weight
    path.write_bytes(whole[: size + 1] + b"\1" + whole[size + 2 :])
    with pytest.raises(ValueError, match=r"wrong checksum of \.metadata"):
        marvin.load_sharded(saved, *made())
    path.write_bytes(whole[:-32])
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: set_size(m, "plain", 3 << 30), "plain must be there whole"),
        (lambda m: set_chunk(m, "plain", 3 << 30), "plain must have 3221225472 values"),
        (lambda m: set_length(m, 3 << 30), r"__0_0\.distcp must have \d+ bytes"),
        (lambda m: set_record(m, "../whole/__0_0.distcp"), r"a record in \.\./whole"),
    ],
    ids=["size", "chunk", "record", "place"],
)
def test_no_memory_is_taken_that_the_files_do_not_fill(saved, change, message):
    found = pickle.loads((saved / ".metadata").read_bytes())
    change(found)
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=message):
        marvin.load_sharded(saved, *made())


def test_no_record_takes_memory_that_it_does_not_fill(saved):
    """What torch loads a record with knows ``bytearray``, of as many bytes as a file tells."""
    record = io.BytesIO()
    torch.save(bytearray(1 << 15), record)
    found, file = pickle.loads((saved / ".metadata").read_bytes()), saved / "__0_0.distcp"
    for info in found.storage_data.values():
        info.offset, info.length = file.stat().st_size, len(record.getvalue())
    file.write_bytes(file.read_bytes() + record.getvalue() * len(found.storage_data))
    (saved / ".metadata").write_bytes(pickle.dumps(found))
    with pytest.raises(ValueError, match=r"it calls builtins\.bytearray"):
        marvin.load_sharded(saved, *made())


def test_no_list_is_made_that_the_metadata_do_not_fill(saved):
    (saved / ".metadata").write_bytes(b"\x80\x02Nr" + (1 << 23).to_bytes(4, "little") + b".")
    with pytest.raises(ValueError, match="its 9 bytes tell of 8388608 values"):
        marvin.load_sharded(saved, *made())


def set_size(found, name, size):
    found.state_dict_metadata[name].size = torch.Size([size])


def set_chunk(found, name, size):
    set_size(found, name, size)
    found.state_dict_metadata[name].chunks[0].sizes = torch.Size([size])


def set_length(found, length):
    next(iter(found.storage_data.values())).length = length


def set_record(found, path):
    next(iter(found.storage_data.values())).relative_path = path


def with_formats():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 2))
    optimizer = marvin.MSGD(model.named_parameters())
    return model, optimizer, marvin.quantize_activations(model, optimizer)


def test_what_the_model_lacks_is_named(tmp_path):
    """As ``load_state_dict`` does: it would compute something else."""
    marvin.save_sharded(tmp_path, *with_formats()[:2])
    model, optimizer, handle = with_formats()
    handle.remove()
    call = r"marvin\.quantize_activations\(model, optimizer\) before load_sharded"
    with pytest.raises(ValueError, match=f"must round what its layers take, .*: write {call}"):
        marvin.load_sharded(tmp_path, model, optimizer)
    model, optimizer, _ = with_formats()
    model[1] = nn.Identity()
    with pytest.raises(ValueError, match=r"got too many: .*1\.running_mean, 1\.running_var"):
        marvin.load_sharded(tmp_path, model, optimizer)
    model, optimizer, _ = with_formats()
    model[1] = nn.BatchNorm1d(4)
    with pytest.raises(ValueError, match=r"too many: 1\.fixed_point; too few: 1\.weight, 1\.bias$"):
        marvin.load_sharded(tmp_path, model, optimizer)
    model, optimizer, handle = with_formats()
    handle.remove()
    marvin.save_sharded(tmp_path / "float", model, optimizer)
    assert marvin.load_sharded(tmp_path / "float", *with_formats()[:2]) == {}


@pytest.mark.parametrize("function", [marvin.save_sharded, marvin.load_sharded])
def test_a_model_and_an_optimizer_that_do_not_belong_together_are_named(function, saved):
    model, optimizer = made()
    call = rf"write marvin\.{function.__name__}\(folder, model, optimizer\)"
    with pytest.raises(TypeError, match=f"optimizer second, got MSGD and Linear: {call}"):
        function(saved, optimizer, model)
    with pytest.raises(TypeError, match=f"must be the MSGD, .* got the SGD that it wraps: {call}"):
        function(saved, model, optimizer.optimizer)
    with pytest.raises(ValueError, match="must have parameters of the model, got a MSGD of others"):
        function(saved, nn.Linear(3, 2), optimizer)
    assert marvin.load_sharded(saved, model, optimizer) == {"epoch": 3}  # nothing was overwritten


@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp"])
def test_damage_is_named(saved, tmp_path, name):
    chance, content = random.Random(name), (saved / name).read_bytes()
    folder, refused = tmp_path / "damaged", []
    for number in range(30):
        changed = bytearray(content)
        if number % 2:
            changed = changed[: chance.randrange(len(content))]
        else:
            for _ in range(20):
                changed[chance.randrange(len(content))] ^= 1 << chance.randrange(8)
        shutil.copytree(saved, folder, dirs_exist_ok=True)
        (folder / name).write_bytes(bytes(changed))
        try:
            marvin.load_sharded(folder, *made())
        except ValueError as error:
            refused.append(str(error))
    assert len(refused) >= 15
    assert all(line.startswith(f"{folder} must hold a whole checkpoint") for line in refused)
    (folder / name).unlink()
    (folder / name).mkdir()
    with pytest.raises(ValueError, match="damaged must hold a whole checkpoint"):
        marvin.load_sharded(folder, *made())


def test_a_checkpoint_that_was_half_overwritten_is_none(saved, monkeypatch):
    """Its files may be of two checkpoints, each whole, with the older one's metadata."""

    def stop(*_, **__):
        raise KeyboardInterrupt

    with pytest.raises(TypeError, match="plain values"):
        marvin.save_sharded(saved, *made(), {"a": {1}})
    assert marvin.load_sharded(saved, *made()) == {"epoch": 3}
    with monkeypatch.context() as patch:
        patch.setattr(torch.distributed.checkpoint, "save", stop)
        with pytest.raises(KeyboardInterrupt):
            marvin.save_sharded(saved, *made(), {"epoch": 4})
    with pytest.raises(ValueError, match="whole must hold a whole checkpoint of save_sharded"):
        marvin.load_sharded(saved, *made())
    marvin.save_sharded(saved, *made(), {"epoch": 4})
    assert marvin.load_sharded(saved, *made()) == {"epoch": 4}


@pytest.mark.parametrize("place", ["prepare_local_plan", "write_data", "finish"])
def test_a_disk_that_takes_no_checkpoint_is_named_in_a_line(place, tmp_path, monkeypatch):
    def refuse(*_, **__):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemWriter, place, refuse)
    with pytest.raises(
        OSError, match=r"new must be a folder that takes files, got OSError: .*Read-only"
    ) as error:
        marvin.save_sharded(tmp_path / "new", *made())
    assert "\n" not in str(error.value)
    assert error.value.__suppress_context__


def test_an_interrupt_of_save_sharded_is_none_of_the_disk(tmp_path, monkeypatch):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(torch.distributed.checkpoint.FileSystemWriter, "write_data", stop)
    with pytest.raises(KeyboardInterrupt):
        marvin.save_sharded(tmp_path / "new", *made())


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_a_state_that_torch_loads_in_place_is_refused(tmp_path):
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    model, optimizer = trained()
    dcp.save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
    with pytest.raises(ValueError, match=r"got '0', '1'.* use marvin\.save_sharded"):
        dcp.load({"optimizer": trained()[1]}, checkpoint_id=tmp_path)


def test_keys_of_text_are_refused_and_change_nothing():
    (_, optimizer), (_, other) = trained(), trained()
    state = optimizer.state_dict()
    state["state"] = {str(key): own for key, own in state["state"].items()}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match="must be the integers that its groups have"):
        other.load_state_dict(state)
    assert_same(other.state_dict(), before)

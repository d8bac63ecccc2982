import dataclasses
import errno
import gzip
import hashlib
import http.client
import io
import struct
import tarfile
import urllib.error
import urllib.request
from pathlib import Path

import numpy as np
import pytest
import torch

from train import cifar, data, fashion_mnist
from train.cifar import RELEASES
from train.dataset import Images, make_dataset
from train.errors import UserError

RNG = np.random.default_rng(0)


@pytest.fixture(autouse=True)
def _only_what_a_test_writes(monkeypatch, tmp_path):
    """No system folder, no network, and files of 4 or 2 records instead of 10,000."""
    monkeypatch.setattr(fashion_mnist, "DEBIAN", tmp_path / "debian")
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    for name, release in RELEASES.items():
        few = {"train": dict.fromkeys(release.train, 4), "test": dict.fromkeys(release.test, 2)}
        monkeypatch.setitem(RELEASES, name, dataclasses.replace(release, **few))


def refuse(url: str, timeout: float):
    raise urllib.error.URLError("no network here")


def cifar_files(name: str) -> dict[str, bytes]:
    release = RELEASES[name]
    files = {}
    for file, records in release.files.items():
        content = RNG.integers(256, size=(records, release.record_bytes), dtype=np.uint8)
        content[:, : release.label_bytes] = RNG.integers(release.classes, size=(records, 1))
        files[file] = content.tobytes()
    return files


def write_cifar(name: str, data_dir: Path) -> dict[str, bytes]:
    folder, files = data_dir / RELEASES[name].folder, cifar_files(name)
    folder.mkdir(parents=True)
    for file, content in files.items():
        (folder / file).write_bytes(content)
    return files


def squeezed(content):
    """Return the same gzip file at any time: the bytes are names of tests."""
    return gzip.compress(content, mtime=0)


def idx(array: np.ndarray, magic: int) -> bytes:
    header = struct.pack(f">{1 + array.ndim}I", magic, *array.shape)
    return squeezed(header + array.tobytes())


def write_fashion(folder: Path) -> dict[str, np.ndarray]:
    folder.mkdir(parents=True)
    arrays = {}
    for part, count in (("train", 6), ("test", 3)):
        images, labels = fashion_mnist.FILES[part]
        arrays[images] = RNG.integers(256, size=(count, 28, 28), dtype=np.uint8)
        arrays[labels] = RNG.integers(10, size=count, dtype=np.uint8)
        (folder / images).write_bytes(idx(arrays[images], 2051))
        (folder / labels).write_bytes(idx(arrays[labels], 2049))
    return arrays


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_cifar_is_read_as_it_is_written(name, tmp_path):
    files = write_cifar(name, tmp_path)
    got = data.load(name, tmp_path)
    release = RELEASES[name]
    raw = np.frombuffer(b"".join(files[f] for f in release.train), np.uint8)
    raw = raw.reshape(-1, release.record_bytes)
    assert got.train.images.dtype == torch.uint8
    assert got.train.labels.dtype == torch.int64
    assert got.train.images.shape == (4 * len(release.train), 3, 32, 32)
    assert got.test.images.shape == (2, 3, 32, 32)
    assert got.train.images.flatten(1).numpy().tobytes() == raw[:, -3072:].tobytes()
    assert got.train.labels.tolist() == raw[:, release.label_bytes - 1].tolist()
    assert got.classes == release.classes


def test_cifar100_takes_the_fine_label(tmp_path):
    folder = tmp_path / RELEASES["cifar100"].folder
    write_cifar("cifar100", tmp_path)
    content = np.fromfile(folder / "test.bin", np.uint8).reshape(2, -1)
    content[:, 0], content[:, 1] = 3, (97, 98)
    content.tofile(folder / "test.bin")
    assert data.load("cifar100", tmp_path).test.labels.tolist() == [97, 98]


def test_a_truncated_cifar_file_is_named(tmp_path):
    write_cifar("cifar10", tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "data_batch_3.bin"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UserError, match=r"data_batch_3.bin must hold 12,292 bytes, got 12,291"):
        data.load("cifar10", tmp_path)


def test_a_wrong_cifar_label_is_named(tmp_path):
    write_cifar("cifar10", tmp_path)
    path = tmp_path / "cifar-10-batches-bin" / "test_batch.bin"
    path.write_bytes(b"\x0a" + path.read_bytes()[1:])
    with pytest.raises(UserError, match=r"test_batch.bin must hold labels 0 to 9, got label 10"):
        data.load("cifar10", tmp_path)


def test_absent_cifar_without_network_says_what_where_and_how(tmp_path):
    with pytest.raises(UserError) as caught:
        data.load("cifar10", tmp_path)
    for word in ("data_batch_1.bin", str(tmp_path), "cifar-10-binary.tar.gz", "https://", "digits"):
        assert word in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def archive(name: str, files: dict[str, bytes], extra: str = "") -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w:gz") as tar:
        for file, content in files.items():
            info = tarfile.TarInfo(f"{RELEASES[name].folder}/{file}")
            info.size = len(content)
            tar.addfile(info, io.BytesIO(content))
        if extra:
            tar.addfile(tarfile.TarInfo(extra), io.BytesIO())
    return buffer.getvalue()


def serve(monkeypatch, name: str, content: bytes, md5: str = "") -> None:
    """Let the official address answer ``content``."""
    md5 = md5 or hashlib.md5(content).hexdigest()
    monkeypatch.setitem(RELEASES, name, dataclasses.replace(RELEASES[name], md5=md5))
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: io.BytesIO(content))


@pytest.mark.parametrize("name", ["cifar10", "cifar100"])
def test_download_unpacks_the_expected_files_only(name, tmp_path, monkeypatch):
    files = cifar_files(name)
    serve(monkeypatch, name, archive(name, files, extra="../escaped"))
    data_dir = tmp_path / "new" / "data"
    got = data.load(name, data_dir)
    assert len(got.test) == 2
    folder = data_dir / RELEASES[name].folder
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == files
    assert not list(tmp_path.rglob("escaped"))
    assert {p.name for p in data_dir.iterdir()} == {RELEASES[name].archive, folder.name}


def test_nothing_is_unpacked_when_the_checksum_is_wrong(tmp_path, monkeypatch):
    serve(monkeypatch, "cifar10", archive("cifar10", cifar_files("cifar10")), md5="0" * 32)
    with pytest.raises(UserError, match="must have MD5 0000"):
        data.load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_an_archive_put_there_by_hand_is_checked_and_used(tmp_path, monkeypatch):
    content = archive("cifar10", cifar_files("cifar10"))
    serve(monkeypatch, "cifar10", content)
    monkeypatch.setattr(urllib.request, "urlopen", refuse)
    path = tmp_path / "cifar-10-binary.tar.gz"
    path.write_bytes(content[:-1])
    with pytest.raises(UserError, match="must have MD5"):
        data.load("cifar10", tmp_path)
    path.write_bytes(content)
    assert data.load("cifar10", tmp_path).name == "cifar10"


@pytest.mark.parametrize("wrong", ["missing", "short", "link"])
def test_an_archive_with_other_members_is_refused(wrong, tmp_path, monkeypatch):
    files = cifar_files("cifar10")
    content = files.pop("test_batch.bin")
    if wrong == "short":
        files["test_batch.bin"] = content[:-1]
    raw = archive("cifar10", files)
    if wrong == "link":
        raw = with_link(raw, "cifar-10-batches-bin/test_batch.bin")
    serve(monkeypatch, "cifar10", raw)
    with pytest.raises(UserError, match="must be the official archive"):
        data.load("cifar10", tmp_path)


def with_link(raw: bytes, name: str) -> bytes:
    plain = gzip.decompress(raw)
    buffer = io.BytesIO(plain)
    with tarfile.open(fileobj=buffer, mode="a:") as tar:
        info = tarfile.TarInfo(name)
        info.type, info.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(info)
    return squeezed(buffer.getvalue())


@pytest.mark.parametrize("place", ["data/fashion-mnist", "data", "debian"])
def test_fashion_mnist_is_found_and_read(place, tmp_path):
    arrays = write_fashion(tmp_path / place)
    got = data.load("fashion-mnist", tmp_path / "data")
    assert got.train.images.shape == (6, 1, 28, 28)
    assert got.train.images.numpy().tobytes() == arrays["train-images-idx3-ubyte.gz"].tobytes()
    assert got.test.labels.tolist() == arrays["t10k-labels-idx1-ubyte.gz"].tolist()
    assert str(tmp_path / place) in got.source


def test_absent_fashion_mnist_says_what_where_and_how(tmp_path):
    with pytest.raises(UserError) as caught:
        data.load("fashion-mnist", tmp_path)
    for word in ("train-images-idx3-ubyte.gz", str(tmp_path), "dataset-fashion-mnist"):
        assert word in str(caught.value)


GOOD_IMAGES = np.zeros((6, 28, 28), np.uint8)
GOOD_LABELS = np.zeros(6, np.uint8)


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        (0, idx(GOOD_IMAGES, 2052), "magic 2051"),
        (0, idx(GOOD_IMAGES[:, :27].copy(), 2051), r"shape \(28, 28\), got"),
        (0, idx(GOOD_IMAGES[:0], 2051), "at least one"),
        (0, squeezed(gzip.decompress(idx(GOOD_IMAGES, 2051))[:-1]), "got 4,719 bytes"),
        (0, squeezed(gzip.decompress(idx(GOOD_IMAGES, 2051)) + b"x"), "got 4,721 bytes"),
        (0, squeezed(b"\0\0\x08"), "bytes of header"),
        (0, idx(GOOD_IMAGES, 2051)[:-9], "a whole gzip file"),
        (0, b"no gzip at all", "a whole gzip file"),
        (1, idx(GOOD_LABELS, 2051), "magic 2049"),
        (1, idx(GOOD_LABELS[:5], 2049), "a label for each of the 6 images, got 5"),
        (1, idx(GOOD_LABELS + 10, 2049), "labels 0 to 9, got label 10"),
    ],
)
def test_damaged_fashion_mnist_says_what_is_wrong(file, content, message, tmp_path):
    write_fashion(tmp_path / "fashion-mnist")
    path = tmp_path / "fashion-mnist" / fashion_mnist.FILES["train"][file]
    path.write_bytes(content)
    with pytest.raises(UserError, match=message) as caught:
        data.load("fashion-mnist", tmp_path)
    assert str(path) in str(caught.value)
    assert "dataset-fashion-mnist" in str(caught.value)


def test_auto_takes_the_first_that_is_present_and_never_downloads(tmp_path, monkeypatch):
    def fail(url, timeout):
        raise AssertionError("auto must not use the network")

    monkeypatch.setattr(urllib.request, "urlopen", fail)
    assert data.load("auto", tmp_path).name == "digits"
    write_fashion(tmp_path / "fashion-mnist")
    assert data.load("auto", tmp_path).name == "fashion-mnist"
    write_cifar("cifar100", tmp_path)
    assert data.load("auto", tmp_path).name == "cifar100"
    write_cifar("cifar10", tmp_path)
    assert data.load("auto", tmp_path).name == "cifar10"
    (tmp_path / "cifar-10-batches-bin" / "test_batch.bin").unlink()
    assert data.load("auto", tmp_path).name == "cifar100"


def test_an_unknown_name_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"must be one of auto, cifar10, .*got 'mnist'"):
        data.load("mnist", tmp_path)


def test_digits_are_in_the_package(tmp_path):
    got = data.load("digits", tmp_path)
    assert got.train.images.shape == (1438, 1, 8, 8)
    assert got.test.images.shape == (359, 1, 8, 8)
    labels = torch.cat([got.train.labels, got.test.labels])
    assert labels.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert int(got.train.images.max()) == 255
    assert len(got.train.images.unique()) == 17
    assert "CC BY 4.0" in got.source


def test_statistics_are_those_of_the_training_images():
    images = torch.randint(256, (50, 3, 8, 8), dtype=torch.uint8)
    images[:, 2] = 7
    labels = torch.zeros(50, dtype=torch.int64)
    got = make_dataset("x", Images(images, labels), Images(images[:1], labels[:1]), 1, "")
    pixels = images.double().transpose(0, 1).flatten(1)
    want = pixels.std(dim=1, correction=0)
    want[2] = 1.0  # a constant channel is not blown up
    torch.testing.assert_close(
        torch.tensor(got.mean).double(), pixels.mean(dim=1), rtol=1e-6, atol=0
    )
    torch.testing.assert_close(torch.tensor(got.std).double(), want, rtol=1e-6, atol=0)


def test_the_fingerprint_sees_one_pixel_and_one_label(tmp_path):
    digits = data.load("digits", tmp_path)
    before = digits.fingerprint()
    assert data.load("digits", tmp_path).fingerprint() == before
    digits.test.images[-1, 0, 7, 7] += 1
    pixel = digits.fingerprint()
    digits.train.labels[0] += 1
    assert len({before, pixel, digits.fingerprint()}) == 3


def test_digits_are_enlarged_by_repetition(tmp_path):
    digits = data.load("digits", tmp_path)
    got = data.enlarge(digits, 32)
    assert got.side == 32
    torch.testing.assert_close(got.train.images[:, :, 3::4, ::4], digits.train.images)
    torch.testing.assert_close(got.mean, digits.mean)
    assert data.enlarge(digits, 8) is digits


def test_fashion_mnist_is_enlarged_by_zeros(tmp_path):
    write_fashion(tmp_path / "fashion-mnist")
    before = data.load("fashion-mnist", tmp_path)
    got = data.enlarge(before, 32)
    assert got.side == 32
    torch.testing.assert_close(got.test.images[:, :, 2:-2, 2:-2], before.test.images)
    border = got.train.images.clone()
    border[:, :, 2:-2, 2:-2] = 0
    assert not border.any()


def test_the_last_training_images_are_held_out(tmp_path):
    digits = data.load("digits", tmp_path)
    parts = data.split(digits, 0.1)
    assert (len(parts.train), len(parts.validation), len(parts.test)) == (1294, 144, 359)
    together = torch.cat([parts.train.images, parts.validation.images])
    torch.testing.assert_close(together, digits.train.images)
    few = data.split(digits, 0.25, limit=100)
    assert (len(few.train), len(few.validation), len(few.test)) == (75, 25, 100)
    assert len(data.split(digits, 0.0).validation) == 0
    with pytest.raises(UserError, match="at least one training image"):
        data.split(digits, 0.9, limit=1)


def test_a_download_that_breaks_off_leaves_nothing(tmp_path, monkeypatch):
    class Breaks(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise ConnectionResetError("reset")

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Breaks())
    with pytest.raises(UserError, match="could not download"):
        cifar.load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


class Response(io.BytesIO):
    """What a server sends, and the length that it says."""

    def __init__(self, content: bytes, length: str):
        super().__init__(content)
        self.headers = {"Content-Length": length}


def test_a_download_that_is_cut_off_says_so(tmp_path, monkeypatch):
    answer = Response(b"half", "1008")
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: answer)
    with pytest.raises(UserError, match=r"cut off after 4 of 1,008 bytes\); run again, or"):
        cifar.load("cifar10", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("length", ["abc", "-1", "", "\u0663"])
def test_a_length_that_is_none_is_left_to_the_checksum(length, tmp_path, monkeypatch):
    content = archive("cifar10", cifar_files("cifar10"))
    serve(monkeypatch, "cifar10", content)
    answer = Response(content, length)
    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: answer)
    assert cifar.load("cifar10", tmp_path).name == "cifar10"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (http.client.BadStatusLine("hello"), "(BadStatusLine: hello)"),
        (http.client.IncompleteRead(b"abc", 7), "(IncompleteRead: IncompleteRead(3 bytes read"),
    ],
    ids=["no HTTP", "chunked"],
)
def test_a_server_that_speaks_no_http_is_one_message(error, said, tmp_path, monkeypatch):
    def answers(url: str, timeout: float):
        raise error

    monkeypatch.setattr(urllib.request, "urlopen", answers)
    with pytest.raises(UserError) as got:
        cifar.load("cifar10", tmp_path)
    assert f"could not download {cifar.SERVER}cifar-10-binary.tar.gz {said}" in str(got.value)


def test_a_second_download_at_once_is_not_disturbed(tmp_path, monkeypatch):
    content = archive("cifar10", cifar_files("cifar10"))
    serve(monkeypatch, "cifar10", content)
    first = urllib.request.urlopen

    class Late(io.BytesIO):
        """Another process comes, downloads and unpacks all before the first byte."""

        def read(self, size: int | None = -1) -> bytes:
            if not self.tell():
                monkeypatch.setattr(urllib.request, "urlopen", first)
                assert cifar.load("cifar10", tmp_path).name == "cifar10"
            return super().read(size)

    monkeypatch.setattr(urllib.request, "urlopen", lambda url, timeout: Late(content))
    assert cifar.load("cifar10", tmp_path).name == "cifar10"
    release = RELEASES["cifar10"]
    assert {path.name for path in tmp_path.iterdir()} == {release.archive, release.folder}


def test_a_full_disk_is_not_called_a_wrong_archive(tmp_path, monkeypatch):
    serve(monkeypatch, "cifar10", archive("cifar10", cifar_files("cifar10")))

    def full(path: Path, content: bytes):
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(cifar, "write_atomic", full)
    with pytest.raises(OSError, match=r"No space left on device: .*data_batch_1"):
        cifar.load("cifar10", tmp_path)

import dataclasses

import pytest
import torch
import torch.nn.functional as F

from train import augment, data
from train.augment import Augmentation, private_generator
from train.dataset import Images, make_dataset


def images(n: int = 64, channels: int = 3, side: int = 8) -> torch.Tensor:
    return torch.randint(1, 256, (n, channels, side, side), dtype=torch.uint8)


@pytest.mark.parametrize("flip", [False, True])
def test_every_image_is_a_crop_and_all_crops_occur(flip):
    x, how = images(400, 2, 5), Augmentation(padding=1, flip=flip)
    got = augment.augment(x, how, private_generator(0))
    assert got.shape == x.shape
    assert got.dtype == torch.uint8
    padded = F.pad(x, (1,) * 4)
    seen = set()
    for i in range(len(x)):
        crops = {
            (row, column, mirrored): padded[i, :, row : row + 5, column : column + 5]
            for row in range(3)
            for column in range(3)
            for mirrored in ({False, True} if flip else {False})
        }
        found = [
            where
            for where, crop in crops.items()
            if torch.equal(got[i], crop.flip(-1) if where[2] else crop)
        ]
        assert len(found) == 1
        seen |= set(found)
    assert len(seen) == (18 if flip else 9)


def test_no_padding_and_no_flip_changes_nothing():
    x = images()
    got = augment.augment(x, Augmentation(0, False), private_generator(1))
    torch.testing.assert_close(got, x)


def test_the_same_place_has_the_same_bits_and_another_place_others():
    x, how = images(), Augmentation(4, True)
    first = augment.augment(x, how, private_generator(0, "batch", 3, 7, 0))
    again = augment.augment(x, how, private_generator(0, "batch", 3, 7, 0))
    torch.testing.assert_close(first, again)
    for place in ((1, "batch", 3, 7, 0), (0, "batch", 7, 3, 0), (0, "batch", 3, 7, 1)):
        assert not torch.equal(first, augment.augment(x, how, private_generator(*place)))


def test_a_batch_in_parts_is_the_whole_batch():
    labels = torch.arange(64) % 3
    dataset = make_dataset("cifar10", Images(images(), labels), Images(images(), labels), 3, "")
    chosen = torch.randperm(64)[:20]

    def batch(share):
        generator = private_generator(0, "batch", 1, 2, 3)
        return augment.batch(dataset.train, chosen, dataset, generator, share)

    whole = batch(slice(None))
    parts = [batch(share) for share in (slice(0, 7), slice(7, 20))]
    for i in (0, 1):
        assert torch.equal(torch.cat([part[i] for part in parts]), whole[i])


def test_the_global_generator_is_left_alone():
    x, before = images(), torch.get_rng_state()
    augment.epoch_order(10, 0, 0)
    augment.augment(x, Augmentation(1, True), private_generator(0))
    torch.testing.assert_close(torch.get_rng_state(), before)


def test_an_epoch_visits_every_image_in_an_order_of_its_own():
    orders = [augment.epoch_order(50, 0, 0), augment.epoch_order(50, 0, 1)]
    orders.append(augment.epoch_order(50, 1, 0))
    for order in orders:
        assert sorted(order.tolist()) == list(range(50))
    assert len({tuple(order.tolist()) for order in orders}) == 3


def test_steps_are_whole_and_share_no_image():
    assert augment.steps_per_epoch(100, 16, 2) == 3
    assert augment.steps_per_epoch(10, 16, 2) == 1
    order = augment.epoch_order(100, 0, 0)
    steps = [augment.step_indices(order, step, 16, 2) for step in range(3)]
    assert [[len(i) for i in step] for step in steps] == [[16, 16]] * 3
    assert len(torch.cat([i for step in steps for i in step]).unique()) == 96
    assert [len(i) for i in augment.step_indices(order[:20], 0, 16, 2)] == [16, 4]


def test_normalised_training_images_have_mean_0_and_deviation_1():
    x = images(200, 3, 8)
    part = Images(x, torch.zeros(200, dtype=torch.int64))
    dataset = make_dataset("x", part, part, 1, "")
    got, _ = augment.batch(part, torch.arange(200), dataset)
    assert got.dtype == torch.float32
    assert got.is_contiguous()
    channels = got.transpose(0, 1).flatten(1)
    # float32 sums of 12,800 values
    torch.testing.assert_close(channels.mean(1), torch.zeros(3), rtol=0, atol=1e-5)
    torch.testing.assert_close(channels.std(1, correction=0), torch.ones(3), rtol=1e-5, atol=0)


def test_images_lie_as_the_dataset_says():
    x = images(20, 3, 8)
    part = Images(x, torch.zeros(20, dtype=torch.int64))
    dataset = make_dataset("x", part, part, 1, "")
    last = dataclasses.replace(dataset, memory_format=torch.channels_last)
    for generator in None, torch.Generator():
        want, _ = augment.batch(
            part, torch.arange(20), dataset, generator and generator.manual_seed(0)
        )
        got, _ = augment.batch(part, torch.arange(20), last, generator and generator.manual_seed(0))
        assert want.is_contiguous()
        assert got.is_contiguous(memory_format=torch.channels_last)
        assert torch.equal(got, want)


def test_digits_move_by_one_pixel_and_are_not_mirrored(tmp_path):
    digits = data.load("digits", tmp_path)
    assert augment.augmentation(digits) == Augmentation(padding=1, flip=False)
    assert augment.augmentation(data.enlarge(digits, 32)) == Augmentation(padding=4, flip=False)
    part = Images(images(4, 3, 32), torch.zeros(4, dtype=torch.int64))
    other = make_dataset("cifar10", part, part, 1, "")
    assert augment.augmentation(other) == Augmentation(padding=4, flip=True)

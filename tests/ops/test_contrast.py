"""T38 and T39 of specs/value.md, crops against plain indexing, and properties."""

import math

import numpy as np
import pytest
import torch

from shoal.ops import contrast


def t(rows):
    return torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize(("logits", "want"), [
    ([[2, 0], [0, 2]], 0.12692801),
    (np.ones((4, 4)), 1.38629436),
    (np.ones((32, 32)), 3.46573590),
    (np.ones((128, 128)), 4.85203026),
])
def test_T38_info_nce(logits, want):
    assert contrast.info_nce(t(logits)).mean().item() == pytest.approx(want, abs=1e-8)


Q, K, W = t([[1, 0], [0, 1], [1, 1]]), t([[1, 0.5], [-0.5, 1], [0.5, 1]]), t([[2, 0], [1, 1]])


def test_T39_bilinear_logits():
    want = t([[2, -1, 1], [1.5, 0.5, 1.5], [3.5, -0.5, 2.5]])
    logits = contrast.bilinear_logits(Q, W, K)
    torch.testing.assert_close(logits, want - want.amax(1, keepdim=True))
    torch.testing.assert_close(contrast.info_nce(logits), t([0.34901222, 1.86199480, 1.32656264]), rtol=0, atol=1e-8)
    assert contrast.info_nce(logits).mean().item() == pytest.approx(1.17918989, abs=1e-8)
    assert contrast.retrieved(logits).tolist() == [1, 0, 0]
    turned = contrast.info_nce(contrast.bilinear_logits(Q, W.T, K))
    assert turned.mean().item() == pytest.approx(0.74685094, abs=1e-8), "W transposed is another loss"


def test_shifted_and_large_logits():
    """A constant of a row changes nothing and large logits stay finite."""
    logits = t([[3, 1], [2, 5]])
    moved = logits + t([[100.0], [-7.0]])
    torch.testing.assert_close(contrast.info_nce(moved), contrast.info_nce(logits))
    huge = contrast.bilinear_logits(1e4 * Q.float(), W.float(), 1e4 * K.float())
    assert torch.isfinite(contrast.info_nce(huge)).all() and (huge.amax(1) == 0).all()


@pytest.mark.parametrize("channels_last", [False, True])
def test_crop_moves_frames_alike(channels_last):
    rng = np.random.default_rng(0)
    stack = rng.integers(0, 256, (5, 3, 9, 11), np.uint8)
    stack[:, 1], stack[:, 2] = stack[:, 0], 255 - stack[:, 0]  # frames that are functions of each other stay so
    offsets = contrast.random_offsets(rng, 5, 9, 11, 6)
    got = contrast.crop(np.moveaxis(stack, 1, -1) if channels_last else stack, offsets, 6, channels_last)
    got = np.moveaxis(got, -1, 1) if channels_last else got
    for image, (top, left), cut in zip(stack, offsets, got, strict=True):
        assert np.array_equal(cut, image[:, top : top + 6, left : left + 6])
    assert np.array_equal(got[:, 0], got[:, 1]) and np.array_equal(got[:, 2], 255 - got[:, 0])


def test_every_offset_is_drawn():
    offsets = contrast.random_offsets(np.random.default_rng(1), 20_000, 28, 28, 24)
    assert offsets.min() == 0 and offsets.max() == 4
    counts = np.bincount(offsets[:, 0] * 5 + offsets[:, 1], minlength=25)
    assert np.abs(counts - 800).max() < 5 * math.sqrt(800), "rows and columns are drawn apart, each place alike"


def test_centre_crops():
    """The centre of pixel catch is offset two and a whole image is left alone."""
    images = np.random.default_rng(2).integers(0, 256, (4, 1, 28, 28), np.uint8)
    centre = contrast.centre_crop(torch.from_numpy(images), 24).numpy()
    assert np.array_equal(centre, contrast.crop(images, np.full((4, 2), 2), 24))
    assert np.array_equal(contrast.centre_crop(torch.from_numpy(centre), 24).numpy(), centre)
    whole = contrast.crop(images, contrast.random_offsets(np.random.default_rng(3), 4, 28, 28, 28), 28)
    assert np.array_equal(whole, images)

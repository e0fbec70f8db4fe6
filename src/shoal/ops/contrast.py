"""Contrastive learning: crops of images, and how well one view of an image is found again among others (CURL, 2004.04136).

    logits[i, j] = q_i^T W k_j          q: views of B images; k: other views of K images, encoded apart: the same and perhaps more
    loss[i]      = -log softmax(logits[i])[first + i]

Images are arrays ``[B, C, H, W]``, or with their channels last ``[B, H, W, C]``. The frames of a stack are channels, so one offset
moves all of them alike.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["bilinear_logits", "centre_crop", "crop", "info_nce", "random_offsets", "retrieved"]


def random_offsets(rng: np.random.Generator, count: int, height: int, width: int, size: int) -> np.ndarray:
    """Where to cut, ``[count, 2]``: row and column of the upper left corner, each of all that there are equally likely."""
    return rng.integers(0, (height - size + 1, width - size + 1), (count, 2))


def crop(images: np.ndarray, offsets: np.ndarray, size: int, channels_last: bool = False) -> np.ndarray:
    """A square of ``size`` pixels out of each image, at ``offsets [B, 2]``."""
    axes = (1, 2) if channels_last else (2, 3)
    windows = np.lib.stride_tricks.sliding_window_view(images, (size, size), axis=axes)
    cut: np.ndarray
    if channels_last:  # [B, rows, columns, C, size, size]
        cut = np.moveaxis(windows[np.arange(len(images)), offsets[:, 0], offsets[:, 1]], 1, -1)
    else:  # [B, C, rows, columns, size, size]
        cut = windows[np.arange(len(images)), :, offsets[:, 0], offsets[:, 1]]
    return np.ascontiguousarray(cut)


def centre_crop(images: Tensor, size: int) -> Tensor:
    """The middle of ``[N, C, H, W]``, a view; images of that size already stay as they are."""
    height, width = images.shape[-2:]
    top, left = (height - size) // 2, (width - size) // 2
    return images[..., top : top + size, left : left + size]


def bilinear_logits(queries: Tensor, weight: Tensor, keys: Tensor) -> Tensor:
    """``[B, Z]``, ``[Z, Z]`` and ``[K, Z]`` -> ``[B, K]``, less the largest of each row: the softmax does not notice."""
    logits = queries @ (weight @ keys.T)
    return logits - logits.detach().amax(1, keepdim=True)


def info_nce(logits: Tensor, first: int = 0) -> Tensor:
    """Loss of each row [B]; row i belongs to column first + i."""
    return -logits.log_softmax(1).diagonal(first)[: len(logits)]


def retrieved(logits: Tensor, first: int = 0) -> Tensor:
    """Whether each row's own column is the largest, [B] of 0 and 1."""
    return (logits.argmax(1) == torch.arange(first, first + len(logits), device=logits.device)).float()

"""A batch that lies in one block of memory travels as one copy. (tests/gpu has the copies.)"""

import numpy as np
import torch

from shoal.device.transfer import one_block, views_of
from shoal.slots import leaves


def batch():
    """As a table lays one out: fields side by side in the memory of a reply."""
    memory = np.frombuffer(np.random.default_rng(0).integers(0, 255, 4096, np.uint8).tobytes(), np.uint8)
    return {"observation": {"image": memory[:512].reshape(8, 64), "vector": memory[512:1024].view(np.float32).reshape(8, 16)},
            "reward": memory[1024:1088].view(np.float64), "done": (memory[1088:1096] & 1).view(bool)}


def test_fields_are_views_of_one_copy():
    """Fields of one block are views of its copy."""
    tree = batch()
    tree.pop("done")  # elsewhere: it was computed
    block = one_block([array for _, array in leaves(tree)])
    assert block is not None and block.nbytes == 1088
    copied = views_of(torch.from_numpy(block.copy()), block, tree)
    assert copied["observation"]["vector"].dtype == torch.float32
    for (path, array), (_, tensor) in zip(leaves(tree), leaves(copied), strict=True):
        np.testing.assert_array_equal(array.tobytes(), tensor.numpy().tobytes(), err_msg=str(path))


def test_fields_apart_are_not_one_block():
    tree = batch()
    assert one_block([array for _, array in leaves(tree)]) is None
    assert one_block([np.zeros(3), torch.zeros(3)]) is None
    wide = np.zeros(1000)
    assert one_block([wide[:10], wide[-10:]]) is None
    assert one_block([wide[:100:2], wide[:10]]) is None
    odd = np.zeros(64, np.uint8)
    assert one_block([odd[:1], odd[1:9].view(np.float64)]) is None  # no tensor may begin there

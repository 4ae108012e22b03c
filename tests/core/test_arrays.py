from __future__ import annotations

import numpy as np
import pytest
import torch

from recurl.core.arrays import as_tensor
from recurl.core.errors import ArgumentTypeError


class Exporting:
    """Array of another library that is exported through one protocol."""

    def __init__(self, array, protocol):
        self.array, self._protocol = array, protocol

    def __getattr__(self, name):
        if name in self._protocol:
            return getattr(self.array, name)
        raise AttributeError(name)


class Dlpack(Exporting):
    def __init__(self, array):
        super().__init__(array, ())

    def __dlpack__(self, **options):
        return self.array.__dlpack__(**options)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.int64, np.uint8, np.bool_])
def test_memory_is_shared(dtype):
    array = np.zeros((2, 3), dtype)
    for given in (array, Dlpack(array), Exporting(array, ("__array_interface__",))):
        tensor = as_tensor(given, "it")
        assert tensor.shape == (2, 3)
        array[0, 1] = 1
        assert tensor[0, 1] == 1
        array[0, 1] = 0
    tensor = torch.zeros(2)
    assert as_tensor(tensor, "it") is tensor


def test_read_only_arrays_are_copied():
    array = np.arange(3.0)
    array.flags.writeable = False
    tensor = as_tensor(array, "it")
    tensor += 1
    assert array.tolist() == [0, 1, 2]


@pytest.mark.parametrize("value", ["a", None, [1.0], 2.0])
def test_other_values_are_refused(value):
    with pytest.raises(ArgumentTypeError, match=r"the reward must be a tensor, or an array of NumPy, .* got "):
        as_tensor(value, "the reward")


def test_dtypes_without_a_tensor_are_refused():
    with pytest.raises(ArgumentTypeError, match="the reward can't become a tensor: TypeError: "):
        as_tensor(np.array(["a"]), "the reward")

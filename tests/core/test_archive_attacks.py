"""Hostile files must not make the reader run code, or take much time or memory."""

import numpy as np
import pytest
import torch

from archive_attacks import FOREIGN, archive, saved, tensor
from recurl.core.archive import load_archive, save_archive
from recurl.core.errors import ArgumentError, ArgumentTypeError
from tests.bounds import within


def refused(path, data, said):
    """Check that a file is rejected within seconds (in practice 0.3), in one line, with less than 200 MB of memory."""
    path.write_bytes(data)
    with within(seconds=3, megabytes=200), pytest.raises(ArgumentError, match=said) as caught:
        load_archive(path)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("name", FOREIGN)
def test_foreign_pickles(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    code, storages, said = FOREIGN[name]
    refused(tmp_path / "a.pt", archive(code, **storages), said)
    assert not (tmp_path / "attacked").exists()


def test_tensors_that_share_their_memory_too_often(tmp_path):
    one = tensor((1000,), (1,), count=1000)
    data = {"data0": bytes(4000)}
    (tmp_path / "a.pt").write_bytes(archive(b"(" + one * 3 + b"t", **data))
    assert [part.shape for part in load_archive(tmp_path / "a.pt")] == [(1000,)] * 3
    refused(tmp_path / "b.pt", archive(b"(" + one * 2000 + b"t", **data), "share memory too often")


@pytest.mark.parametrize(
    "value",
    [
        torch.zeros(3).to_sparse(),
        torch.zeros(3, device="meta"),
        np.float64(1.0),
        np.zeros(3),
        {1: [torch.zeros(3).to_sparse()]},
        range(3),
    ],
)
def test_other_values_are_refused_when_saved_and_when_read(tmp_path, value):
    refused(tmp_path / "a.pt", saved(value), "is damaged|must hold tensors and plain values")
    with pytest.raises(ArgumentTypeError, match=r"can be saved|no values to save"):
        save_archive({"a": [value]}, tmp_path / "b.pt")
    assert not (tmp_path / "b.pt").exists()


def test_deep_nesting_is_refused_when_saved(tmp_path):
    cyclic = []
    cyclic.append(cyclic)
    with pytest.raises(ArgumentError, match="at most 100 nested containers"):
        save_archive(cyclic, tmp_path / "a.pt")
    with pytest.raises(ArgumentError, match="at most 255 bytes, but the one at a/0 has more"):
        save_archive({"a": [1 << 3000]}, tmp_path / "a.pt")
    with pytest.raises(ArgumentTypeError, match="A key must be"):
        save_archive({frozenset([1]): 1}, tmp_path / "a.pt")
    deep = 0
    for _ in range(100):
        deep = [deep]
    save_archive(deep, tmp_path / "a.pt")
    assert load_archive(tmp_path / "a.pt") == deep


VALUES = {
    "numbers": [0, 1, -1, 255, 256, -256, 65535, 65536, 2**31, -(2**31) - 1, 2**2000, -(2**2000), True, 1.5, 2j],
    "text": ["", "ä€𝄞\ud800", b"", b"bytes\xff", bytearray(b""), bytearray(b"ab\xff"), None],
    ("nested", "key"): {1: {}, 1.5: (), None: [], b"x": set(), False: {1, "a"}, (1, ("b",)): frozenset([None])},
    "torch": [torch.float32, torch.device("cpu"), torch.device("cuda", 1), torch.Size([2, 3]), torch.Size([])],
    "tuples": [(1,), (1, 2), (1, 2, 3), (1, 2, 3, 4)],
}
TENSORS = {
    "scalar": torch.tensor(1.5),
    "empty": torch.zeros(0, 4),
    "view": torch.arange(24.0).view(2, 3, 4)[:, 1:, ::2],
    "transposed": torch.arange(6).view(2, 3).T,
    "expanded": torch.arange(3.0).expand(5, 3),
    "conjugated": torch.tensor([1 + 2j]).conj(),
    "imaginary": torch.tensor([1 + 2j]).conj().imag,
    **{
        str(dtype): torch.arange(3).to(dtype)
        for dtype in (
            *(torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.uint16, torch.uint32),
            *(torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64, torch.complex128),
            torch.float8_e4m3fn,
        )
    },
}


def test_plain_values_are_read_as_they_were(tmp_path):
    save_archive(VALUES, tmp_path / "a.pt")
    found = load_archive(tmp_path / "a.pt")
    assert found == VALUES
    assert repr(found) == repr(VALUES)


def test_tensors_are_read_as_they_were(tmp_path):
    save_archive(TENSORS, tmp_path / "a.pt")
    found = load_archive(tmp_path / "a.pt")
    assert found.keys() == TENSORS.keys()
    for name, value in found.items():
        assert value.dtype == TENSORS[name].dtype
        assert torch.equal(
            value.double() if "float8" in name else value, TENSORS[name].double() if "float8" in name else TENSORS[name]
        )


def test_shared_memory_parameters_and_module_states_are_kept(tmp_path):
    net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    base = torch.arange(6.0)
    value = {
        "net": net.state_dict(),
        "parameter": net[0].weight,
        "views": [base, base[2:]],
        "grad": torch.ones(1).requires_grad_(),
    }
    save_archive(value, tmp_path / "a.pt")
    found = load_archive(tmp_path / "a.pt")
    other = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.BatchNorm1d(3))
    other.load_state_dict(found["net"])
    assert all(torch.equal(a, b) for a, b in zip(other.state_dict().values(), net.state_dict().values(), strict=True))
    assert found["net"]._metadata == net.state_dict()._metadata
    assert isinstance(found["parameter"], torch.nn.Parameter)
    assert found["grad"].requires_grad
    found["views"][0].zero_()
    assert found["views"][1].tolist() == [0.0] * 4
    assert found["views"][1].data_ptr() % 8 == 0


def test_the_value_is_that_of_torch(tmp_path):
    save_archive({"a": [TENSORS["view"], 1.5, ("b", None)]}, tmp_path / "a.pt")
    found, expected = load_archive(tmp_path / "a.pt"), torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found["a"][0], expected["a"][0])
    assert found["a"][1:] == expected["a"][1:]

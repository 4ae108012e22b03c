import torch

from recurl.envs.transfers import Upload
from recurl.envs.workers_memory import Entry, SharedTensors


def test_entries_in_a_copy_of_the_memory():
    """Emulate a GPU, where all entries are copied at once."""
    entries = [
        Entry("a", (2, 3), torch.float32),
        Entry(("next", "b"), (2, 3, 5), torch.uint8),
        Entry("flag", (2, 1), torch.bool),
        Entry("c", (2, 3, 2), torch.int64),
        Entry("none", (2, 0), torch.float32),
        Entry("half", (2,), torch.bfloat16),
    ]
    shared = SharedTensors(entries)
    shared.block.copy_(torch.randint(0, 2, shared.block.shape, dtype=torch.uint8))
    shapes = {key: torch.Size([tensor.shape[0] // 2, 2, *tensor.shape[1:]]) for key, tensor in shared.tensors.items()}
    upload = Upload(shared, shapes, None)
    found = upload._tensors_in(shared.block.clone(), shapes)
    plain = upload(shapes)
    shared.block.zero_()
    for key, shape in shapes.items():
        assert found[key].shape == plain[key].shape == shape
        assert torch.equal(found[key], plain[key])
    assert found["c"].any()
    shared.close()

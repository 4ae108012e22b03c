import pytest
import torch

from recurl import specs
from recurl.trainers.networks.trunk import FlatObservation


def test_flat_observation_joins_a_dict_in_the_order_of_its_keys():
    spec = specs.Composite(
        {
            "b": specs.Bounded(0, 255, (4, 2, 2, 1), dtype=torch.uint8),
            "a": {"x": specs.Unbounded(4), "y": specs.Unbounded(4, 3)},
        },
        shape=(4,),
    )
    flat = FlatObservation(spec)
    assert flat.features == 4 + 1 + 3
    parts = {
        "b": torch.full((4, 2, 2, 1), 51, dtype=torch.uint8),
        ("a", "x"): torch.ones(4),
        ("a", "y"): torch.zeros(4, 3),
    }
    out = flat(*(parts[key] for key in flat.keys))
    assert out.shape == (4, 8)
    assert sorted(out[0].tolist()) == pytest.approx([0, 0, 0, 0.2, 0.2, 0.2, 0.2, 1])

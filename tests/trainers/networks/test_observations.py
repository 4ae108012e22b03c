import pytest
import torch
from tensordict import TensorDict

from recurl.core import specs
from recurl.core.errors import ArgumentError, UnsupportedError
from recurl.trainers import PPOConfig
from recurl.trainers.networks.observations import IntegerEncoder, Observations

IMAGE = specs.Bounded(0, 255, (4, 24, 20, 3), dtype=torch.uint8)


def observe(entries, **options):
    return Observations(PPOConfig(env="none", **options), specs.Composite(entries, shape=(4,)))


def flatten(observations, td):
    return observations.flat(*(td[key] for key in observations.flat.keys))


def test_vectors_join_with_the_numbers_first():
    observations = observe(
        {
            "bits": specs.Binary((4, 2), dtype=torch.int8),
            "choice": specs.OneHot(3, (4, 3), dtype=torch.float32),
            "far": {"x": specs.Unbounded(4), "y": specs.Bounded(-9, 9, (4, 3), dtype=torch.int64)},
            "ram": specs.Bounded(0, 50, (4, 2), dtype=torch.uint8),
        }
    )
    assert observations.images == []
    assert observations.keys == [("far", "x"), ("far", "y"), "bits", "choice", "ram"]
    assert observations.norm.shape == (4,)
    flat = observations.flat
    assert (flat.numbers, flat.features) == (4, 11)
    td = TensorDict(
        {
            "bits": torch.tensor([[1, 0]] * 4, dtype=torch.int8),
            "choice": torch.eye(3)[[2] * 4],
            "far": {"x": torch.ones(4), "y": torch.full((4, 3), 7)},
            "ram": torch.tensor([[25, 50]] * 4, dtype=torch.uint8),
        },
        [4],
    )
    found = flatten(observations, td)
    assert found.dtype == torch.float32
    assert found[0].tolist() == [1, 7, 7, 7, 1, 0, 0, 0, 1, 0.5, 1]
    observations.update(td)
    assert observations.norm.moments.mean.tolist() == [1, 7, 7, 7]


def test_statistics_are_of_numbers_alone():
    bits = {"bits": specs.Binary((4, 2)), "image": IMAGE, "choice": specs.OneHot(3, (4, 3), dtype=torch.float32)}
    assert observe(bits).norm is None
    assert observe({"x": specs.Unbounded(4, 2)}).norm.shape == (2,)
    assert observe({"x": specs.Unbounded(4, 2)}, normalize_observations=False).norm is None


def test_masks_and_marks_are_no_observations():
    mask, mark = specs.Binary((4, 3)), specs.Binary((4, 1))
    assert observe({"x": specs.Unbounded(4, 2), "action_mask": mask, "is_init": mark}).keys == ["x"]


@pytest.mark.parametrize("drop", [("parts.b", "text"), ("parts", "text")])
def test_dropped_entries(drop):
    entries = {"x": specs.Unbounded(4, 2), "parts": {"b": specs.Unbounded(4, 1)}, "text": Words((4,), None, None)}
    assert observe(entries, drop_observations=drop).keys == ["x"]


class Words(specs.TensorSpec):
    """A spec of values that are not tensors."""

    def rand(self):
        return "a"

    def is_in(self, value):
        return value == "a"


def test_unsupported_observations_are_refused():
    entries = {"x": specs.Unbounded(4, 2), "parts": {"words": Words((4,), None, None)}}
    with pytest.raises(
        UnsupportedError, match=r"parts.words \(None \[\]\) has no encoder.*--drop-observations parts.words"
    ):
        observe(entries)
    with pytest.raises(UnsupportedError, match=r"The observation x \(complex64 \[2\]\) has no encoder"):
        observe({"x": specs.Unbounded(4, 2, dtype=torch.complex64)})
    with pytest.raises(ArgumentError, match=r"must be left to learn from: the environment has x, and --drop-.* is x\."):
        observe({"x": specs.Unbounded(4, 2)}, drop_observations=("x",))


def test_images_are_uint8_of_two_or_three_dimensions():
    entries = {
        "rgb": IMAGE,
        "grey": specs.Bounded(0, 255, (4, 9, 9), dtype=torch.uint8),
        "ram": specs.Bounded(0, 255, (4, 9), dtype=torch.uint8),
        "floats": specs.Bounded(0, 1, (4, 9, 9, 3)),
        "empty": specs.Unbounded(4, 0, 9, dtype=torch.uint8),
    }
    found = observe(entries)
    assert [(image.entry.key, image.layout) for image in found.images] == [("grey", "hw"), ("rgb", "hwc")]
    assert found.flat.keys == ["floats", "empty", "ram"]
    flat = observe(entries, encoder="mlp")
    assert flat.images == []
    assert flat.flat.features == 24 * 20 * 3 + 81 + 9 + 243
    assert [image.layout for image in observe(entries, image_layout="chw").images] == ["hw", "chw"]


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"encoder": "nature"}, r"--encoder nature needs an image.* observes x \(float32 \[2\]\): use auto or mlp"),
        ({"encoder": "impala"}, "--encoder impala needs an image"),
        ({"image_layout": "hw"}, "--image-layout hw needs an image of 2 dimensions"),
    ],
)
def test_options_of_images_without_images_are_refused(options, match):
    with pytest.raises(ArgumentError, match=match):
        observe({"x": specs.Unbounded(4, 2)}, **options)


def test_the_scale_of_images_follows_the_observed_range():
    observations = observe({"image": IMAGE, "low": specs.Bounded(0, 4, (4, 5, 5), dtype=torch.uint8)})
    image, low = (part.scale for part in observations.images)
    assert (image.factor, low.factor) == (torch.tensor(1 / 255), torch.tensor(1 / 4))
    zeros = {"image": torch.zeros(4, 24, 20, 3, dtype=torch.uint8), "low": torch.zeros(4, 5, 5, dtype=torch.uint8)}
    batch = TensorDict(zeros, [4])
    observations.update(batch)
    assert image.factor == torch.tensor(1 / 255)
    batch["image"][1, 2, 3] = 10
    observations.update(batch)
    assert image.factor == torch.tensor(1 / 10)
    batch["image"].zero_()
    observations.update(batch)
    assert (image.factor, low.factor) == (torch.tensor(1 / 10), torch.tensor(1 / 4))
    fixed = observe({"image": IMAGE}, normalize_observations=False)
    fixed.update(batch.fill_("image", 9))
    assert fixed.images[0].scale.factor == torch.tensor(1 / 255)


@pytest.mark.parametrize("lead", [(), (2,), (2, 5)])
def test_codes(lead):
    values = torch.stack([torch.randint(0, n, lead) for n in (2, 5, 3)], -1)
    found = IntegerEncoder([2, 5, 3], 1)(values)
    hot = [torch.nn.functional.one_hot(values[..., i], n) for i, n in enumerate((2, 5, 3))]
    assert torch.equal(found, torch.cat(hot, -1).float())
    single = IntegerEncoder([5], 0)(values[..., 1])
    assert torch.equal(single, hot[1].float())
    large = IntegerEncoder([2, 1000], 1)
    assert large.features == 64
    wide = torch.stack([values[..., 0], 999 - values[..., 1]], -1)
    table = large.table.weight
    expected = torch.cat([table[wide[..., 0]], table[wide[..., 1] + 2]], -1)
    assert torch.equal(large(wide), expected)
    assert large.state_dict().keys() == {"table.weight"}


def test_choices_by_spec():
    entries = {"one": specs.Categorical(4, (4,)), "many": specs.MultiCategorical([2, 3], (4, 2))}
    square = specs.MultiCategorical([[1, 2], [2, 1]], (4, 2, 2))
    assert observe({"square": square}).flat.features == 6
    observations = observe({**entries, "large": specs.Categorical(10_000, (4,))})
    assert observations.keys == ["large", "many", "one"]
    assert observations.flat.features == 32 + 5 + 4
    assert len(list(observations.flat.parameters())) == 1

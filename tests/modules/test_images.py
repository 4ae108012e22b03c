import pytest
import torch
from torch.nn import functional

from recurl.core.errors import ArgumentError
from recurl.modules import ImageEncoder, ImageScale
from recurl.modules.images import image_layout


@pytest.mark.parametrize(
    ("shape", "layout"),
    [((210, 160, 3), "hwc"), ((4, 84, 84), "chw"), ((84, 84), "hw"), ((3, 9, 3), "hwc"), ((7, 7, 20), "chw")],
)
def test_layouts_follow_from_the_smaller_end(shape, layout):
    assert image_layout(shape) == layout


@pytest.mark.parametrize(
    ("shape", "layout", "match"),
    [
        ((5,), "auto", r"must have 2 or 3 dimensions, none of size 0, got shape \[5\]"),
        ((5, 0), "auto", "none of size 0"),
        ((5, 5), "hwc", "must have 3 dimensions for the layout hwc"),
        ((5, 5, 3), "hw", "must have 2 dimensions for the layout hw"),
        ((5, 5), "wh", "layout must be one of auto, hwc, chw, hw, got 'wh'"),
    ],
)
def test_other_layouts_are_refused(shape, layout, match):
    with pytest.raises(ArgumentError, match=match):
        image_layout(shape, layout)


def test_the_architecture_follows_the_size():
    chosen = {side: ImageEncoder((side, side + 9, 3), width=4).architecture for side in (1, 7, 35, 36)}
    assert chosen == {1: "small", 7: "small", 35: "small", 36: "nature"}


@pytest.mark.parametrize(
    ("architecture", "match"),
    [
        ("nature", "nature needs images of at least 36x36, got 24x40: use auto"),
        ("resnet", "must be one of auto, small, nature, impala, got 'resnet'"),
    ],
)
def test_architectures_that_dont_fit_are_refused(architecture, match):
    with pytest.raises(ArgumentError, match=match):
        ImageEncoder((24, 40, 3), architecture=architecture)


def test_impala_needs_eight_pixels():
    with pytest.raises(ArgumentError, match="impala needs images of at least 8x8, got 7x7"):
        ImageEncoder((7, 7, 3), architecture="impala")


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(2, 7, 7, 3), r"must be torch.uint8 of shape \[..., 7, 7, 3\], got torch.float32"),
        (torch.zeros(2, 3, 7, 7, dtype=torch.uint8), r"got torch.uint8 of shape \[2, 3, 7, 7\]"),
    ],
)
def test_other_images_are_refused(images, match):
    with pytest.raises(ArgumentError, match=match):
        ImageEncoder((7, 7, 3))(images)


def nature(encoder, images):
    """Features equal an explicit computation: NCHW floats from 0 to 1, convolutions, one linear layer."""
    x = images / 255
    x = functional.relu(functional.conv2d(x, encoder.first.weight, encoder.first.bias, 4))
    x = functional.relu(functional.conv2d(x, encoder.rest[1].weight, encoder.rest[1].bias, 2))
    x = functional.relu(functional.conv2d(x, encoder.rest[3].weight, encoder.rest[3].bias, 1))
    return functional.relu(functional.linear(x.flatten(1), encoder.dense[0].weight, encoder.dense[0].bias))


@pytest.mark.parametrize("layout", ["hwc", "chw", "hw"])
def test_nature_is_that_network_in_every_layout_and_batch_shape(layout):
    torch.manual_seed(0)
    images = torch.randint(0, 256, (3, 2, 1 if layout == "hw" else 3, 40, 44), dtype=torch.uint8)
    given = {"chw": images, "hwc": images.movedim(2, -1), "hw": images[:, :, 0]}[layout]
    encoder = ImageEncoder(given.shape[2:], layout=layout, architecture="nature", width=16)
    expected = nature(encoder, images.flatten(0, 1)).reshape(3, 2, 16)
    found = encoder(given)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(encoder(given[1, 0]), expected[1, 0])
    grads = [torch.autograd.grad(out.square().sum(), list(encoder.parameters())) for out in (found, expected)]
    for own, reference in zip(*grads, strict=True):
        torch.testing.assert_close(own, reference)


@pytest.mark.parametrize("architecture", ["small", "nature", "impala"])
def test_without_gradients_parts_are_encoded_one_after_another(architecture):
    encoder = ImageEncoder((36, 36), architecture=architecture, width=4, layers=2)
    images = torch.randint(0, 256, (300, 36, 36), dtype=torch.uint8)
    with torch.no_grad():
        found = encoder(images)
        assert encoder(images[:0]).shape == (0, 4)
    torch.testing.assert_close(found, encoder(images))
    assert sum(layer.out_features == 4 for layer in encoder.dense if hasattr(layer, "out_features")) == 2
    found = torch.autograd.grad(encoder(images[:2]).sum(), list(encoder.parameters()))
    assert all(grad.isfinite().all() for grad in found)


def test_one_scale_serves_several_encoders():
    scale = ImageScale(10)
    encoders = [ImageEncoder((5, 5), width=3, scale=scale) for _ in range(2)]
    images = torch.full((2, 5, 5), 20, dtype=torch.uint8)
    before = [encoder(images) for encoder in encoders]
    scale.update(images)
    for encoder, old in zip(encoders, before, strict=True):
        assert not torch.equal(encoder(images), old)
        assert encoder.state_dict()["scale.factor"] == torch.tensor(1 / 20)
    scale.update(images[:0])


@pytest.mark.parametrize("side", [1, 2, 8, 9, 24, 35])
def test_small_images_of_every_size_become_features(side):
    encoder = ImageEncoder((side, side, 3), width=4, layout="hwc")
    assert encoder(torch.zeros(2, side, side, 3, dtype=torch.uint8)).shape == (2, 4)
    assert encoder.dense[0].in_features <= 64 * 64

"""Each private name of tensordict that recurl uses still behaves as recurl expects."""

from tensordict.nn import (
    NormalParamExtractor,
    ProbabilisticTensorDictModule,
    ProbabilisticTensorDictSequential,
    TensorDictModule,
    TensorDictSequential,
)
from torch import nn

from recurl.modules import Categorical
from recurl.sequences.tensordict_compat import is_biased_softplus, passes_keywords, returns_other_entries, samples


def test_samples():
    net = TensorDictModule(nn.Linear(1, 2), in_keys=["x"], out_keys=["logits"])
    draw = ProbabilisticTensorDictModule(in_keys=["logits"], out_keys=["action"], distribution_class=Categorical)
    assert samples(ProbabilisticTensorDictSequential(net, draw))


def test_passes_keywords():
    def module(**options):
        return TensorDictModule(lambda x, y=None: x, out_keys=["z"], **options)

    assert not passes_keywords(module(in_keys=["x"]))
    assert passes_keywords(module(in_keys={"x": "a"}))
    assert passes_keywords(module(in_keys=["x"], method_kwargs={"y": 1}))


def test_returns_other_entries():
    def sequence():
        return TensorDictSequential(
            TensorDictModule(nn.Linear(1, 1), in_keys=["x"], out_keys=["y"]),
            TensorDictModule(nn.Linear(1, 1), in_keys=["y"], out_keys=["z"]),
        )

    assert not returns_other_entries(sequence())
    assert returns_other_entries(sequence().select_out_keys("z"))


def test_is_biased_softplus():
    assert is_biased_softplus(NormalParamExtractor().scale_mapping)
    assert not is_biased_softplus(nn.Softplus())


def test_renamed_attributes_keep_modules_from_being_lowered():
    class Renamed:
        method_kwargs = None

    assert passes_keywords(Renamed())
    assert not samples(Renamed())

import recurl.core.specs
import recurl.modules
from recurl.data import Categorical


def test_a_name_means_one_thing_whatever_the_order_of_star_imports():
    for order in (("data", "modules"), ("modules", "data")):
        names = {}
        for package in order:
            exec(f"from recurl.{package} import *", names)
        assert names["Categorical"] is recurl.modules.Categorical
    assert Categorical is recurl.core.specs.Categorical


def test_packages_share_no_other_names():
    packages = [recurl.modules, recurl.data]
    shared = set(packages[0].__all__) & set(packages[1].__all__)
    assert not shared

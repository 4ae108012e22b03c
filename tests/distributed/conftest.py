import pytest

from tests.distributed.ranks import Ranks


@pytest.fixture(scope="session")
def ranks(tmp_path_factory):
    """Three processes."""
    pool = Ranks(3, tmp_path_factory.mktemp("ranks"))
    yield pool
    pool.close()

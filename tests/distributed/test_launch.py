import time
from datetime import timedelta

import pytest
import torch
from torch import distributed

from recurl.core.errors import ArgumentError, MissingDependencyError, RankError
from recurl.distributed import is_launched, is_local_main_process, joined, launch, restarted, world_size
from tests.distributed.test_faults import free_port

VARIABLES = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}


@pytest.fixture
def launched(monkeypatch):
    for name, value in VARIABLES.items():
        monkeypatch.setenv(name, value)
    return monkeypatch


def test_without_torchrun():
    assert not is_launched()
    assert not restarted()
    assert is_local_main_process()
    with joined("cuda"):
        assert world_size() == 1


def test_a_run_of_one_rank(launched):
    launched.setenv("MASTER_PORT", str(free_port()))
    assert is_launched()
    with joined():
        assert distributed.is_initialized()
        assert world_size() == 1
    assert not distributed.is_initialized()


def test_no_answer_from_other_ranks(launched):
    launched.setattr(launch, "_CONNECT_TIMEOUT", timedelta(seconds=1))
    launched.setenv("MASTER_PORT", str(free_port()))
    launched.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    began = time.monotonic()
    with pytest.raises(RankError, match=r"^No answer at 127\.0\.0\.1:\d+ within 1 s .*start all ranks with"), joined():
        pass
    assert time.monotonic() - began < 4
    assert not distributed.is_initialized()


def test_restarts_are_counted(launched):
    assert not restarted()
    launched.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    assert restarted()


def test_nccl_is_missing(launched):
    launched.setattr(distributed, "is_nccl_available", lambda: False)
    with pytest.raises(MissingDependencyError, match="need NCCL, which this build of torch lacks"), joined("cuda"):
        pass


def test_gpus(launched):
    launched.setattr(distributed, "is_nccl_available", lambda: True)
    launched.setattr(torch.cuda, "device_count", lambda: 0)
    with pytest.raises(ArgumentError, match="this machine has 0 for its local rank 0"), joined("cuda"):
        pass
    launched.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(ArgumentError, match="all got cuda:1: write --device cuda"), joined("cuda:1"):
        pass


@pytest.mark.parametrize(("name", "text"), [("RANK", "1"), ("RANK", "first"), ("WORLD_SIZE", "-1"), ("LOCAL_RANK", "")])
def test_numbers_that_make_no_sense(launched, name, text):
    launched.setenv(name, text)
    with pytest.raises(ArgumentError, match=f"from 0 to WORLD_SIZE - 1, got .*{name}={text}"), joined():
        pass


def test_one_rank_of_a_machine_reports_an_error_of_all(launched):
    launched.setattr(distributed, "is_nccl_available", lambda: False)
    launched.setenv("LOCAL_RANK", "1")
    with pytest.raises(SystemExit), joined("cuda"):
        pass

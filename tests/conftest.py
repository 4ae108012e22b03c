from __future__ import annotations

import pytest
import torch


@pytest.fixture(autouse=True)
def _seed():
    """Every test draws the same numbers, alone or in company."""
    torch.manual_seed(0)

"""Tests of other folders that are imported here run on the GPU."""

import pytest


@pytest.fixture
def device():
    return "cuda"

"""Gradients of masters that kernels add to a sum."""

import pytest

from tests.kernels.test_grad_sum import test_a_sum_of_no_rows, test_experts, test_linear  # noqa: F401

pytestmark = pytest.mark.gpu

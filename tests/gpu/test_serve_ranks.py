"""`torchrun -m fp8moe serve` on two or four GPUs."""

import pytest

from tests.serving.test_ranks import (  # noqa: F401
    directory,
    test_answers_are_those_of_one_process,
    test_what_several_processes_cannot_serve,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")]

"""Where the kernel tests run: on the GPU if there is one, else on the CPU, interpreted."""

from importlib.util import find_spec

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Tests change what plans are made of."""
    if find_spec("triton") is not None:
        from ndlightnet_kernels import launch

        launch._plans.clear()

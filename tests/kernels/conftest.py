"""Where the kernel tests run: on the GPU if there is one, else on the CPU, interpreted."""

import pytest
import torch


@pytest.fixture(autouse=True)
def needs_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")

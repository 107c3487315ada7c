"""Where the kernel tests run: on the GPU if there is one, else on the CPU, interpreted."""

from importlib.util import find_spec

import pytest
import torch

from .yardstick import Poison


@pytest.fixture(autouse=True)
def needs_gpu(request):
    if request.node.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


def pytest_collection_modifyitems(items):
    """Where numpy warns (of masked lanes, of exp(6e4) = inf), the interpreter does what a GPU does."""
    for item in items:
        if "tests/kernels/" in item.path.as_posix():
            item.add_marker(pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"))


@pytest.fixture
def poison():
    """Memory that torch hands out unwritten is NaN."""
    with Poison():
        yield


@pytest.fixture(autouse=True)
def no_plans_of_other_tests():
    """Tests change what plans are made of."""
    if find_spec("triton") is not None:
        from ndlightnet_kernels import launch

        launch._plans.clear()

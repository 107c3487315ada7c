"""Functions from CUDA graphs; streams from them have a file of their own."""

import gc

import pytest
import torch

from ndlightnet import Replay


def test_a_replay_takes_shorter_inputs():
    replay = Replay(lambda x: 2 * x, torch.zeros(4, 2))
    assert torch.equal(replay(torch.ones(3, 2))[:3], torch.full((3, 2), 2.0))


@pytest.mark.parametrize("shape", [(), (3,), (4, 1), (5, 2), (4, 2, 1)])
def test_inputs_of_a_replay_have_the_shapes_of_the_first(shape):
    replay = Replay(lambda x, rate: rate * x, torch.zeros(4, 2), torch.tensor(1.0))
    assert replay(torch.ones(3, 2), torch.tensor(2.0))[:3].eq(2).all()
    with pytest.raises(ValueError, match=r"inputs\[0\] .*expected \(4, 2\), or fewer samples"):
        replay(torch.zeros(shape), torch.tensor(2.0))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_an_old_graph_is_not_freed_during_a_capture():
    """A graph in a cycle lives until the garbage collector runs, which may be at any time."""
    gc.disable()  # nothing but the calls below
    try:
        old = Replay(lambda x: 2 * x, torch.zeros(4, device="cuda"))
        old.cycle = old
        del old

        def function(x):
            if torch.cuda.is_current_stream_capturing():
                gc.collect()
            return 3 * x

        replay = Replay(function, torch.zeros(4, device="cuda"))
        assert torch.equal(replay(torch.ones(4, device="cuda")).cpu(), torch.full((4,), 3.0))
    finally:
        gc.enable()

"""Numbers that follow from a layer's arguments: no state dict holds them, and they stay."""

import copy
import io
import pickle
from functools import partial

import pytest
import torch

from ndlightnet.nn.mixers import LightNetAttention

make = partial(LightNetAttention, 8, 2, forget=[0.1, 0.7])


@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_made_on_meta_is_the_layer_that_was_saved(assign):
    layer, x = make(), torch.randn(2, 9, 8)
    with torch.device("meta"):  # a caller who makes modules there all the while
        loaded = make()
        if not assign:
            loaded.to_empty(device="cpu")
    assert "forget" not in layer.state_dict()
    loaded.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(loaded(x, causal=True), layer(x, causal=True))
    assert torch.equal(loaded.forget, layer.forget)


def test_numbers_go_where_the_layer_goes():
    layer, rates = make(), torch.tensor([0.1, 0.7])
    assert torch.equal(layer.to_empty(device="cpu").forget, rates)
    assert torch.equal(layer.double().forget, rates.double())
    layer.forget.fill_(0.5)
    assert (layer.float().forget == 0.5).all()
    assert layer.to("meta").forget.is_meta


def test_such_a_layer_can_be_copied_and_saved_at_once():
    layer, x, file = make(), torch.randn(2, 9, 8), io.BytesIO()
    pickle.dump(layer, file)
    file.seek(0)
    for copied in (copy.deepcopy(layer), pickle.load(file)):
        assert torch.equal(copied(x, causal=True), layer(x, causal=True))

"""Numbers that follow from a layer's arguments: no state dict holds them, and they stay."""

import copy
import io
import pickle

import pytest
import torch

from ndlightnet.nn.mixers import LightNetAttention

LAYERS = {"forget": lambda: LightNetAttention(8, 2, forget=[0.1, 0.7])}
layers = pytest.mark.parametrize("name", LAYERS)


@layers
@pytest.mark.parametrize("assign", [False, True])
def test_a_layer_made_on_meta_is_the_layer_that_was_saved(name, assign):
    layer, x = LAYERS[name](), torch.randn(2, 9, 8)
    with torch.device("meta"):
        other = LAYERS[name]()
    if not assign:
        other.to_empty(device="cpu")
    assert name not in layer.state_dict()
    other.load_state_dict(layer.state_dict(), assign=assign)
    assert torch.equal(other(x, causal=True), layer(x, causal=True))
    assert torch.equal(getattr(other, name), getattr(layer, name))


@layers
def test_new_memory_gets_the_numbers_again(name):
    """Of a layer that had them, too; and they go where the layer goes."""
    layer = LAYERS[name]()
    value = getattr(layer, name).clone()
    assert torch.equal(getattr(layer.to_empty(device="cpu"), name), value)
    with torch.device("meta"):
        other = LAYERS[name]()
    with torch.device("meta"):  # a caller who makes modules there all the while
        assert torch.equal(getattr(other.to_empty(device="cpu"), name), value)
    assert getattr(other.to("meta"), name).is_meta
    assert torch.equal(getattr(layer.double(), name), value.double())
    getattr(layer, name).fill_(0.5)
    assert (getattr(layer.float(), name) == 0.5).all()


@layers
def test_such_a_layer_can_be_copied_and_saved_whole(name):
    layer, x, file = LAYERS[name](), torch.randn(2, 9, 8), io.BytesIO()
    pickle.dump(layer, file)
    file.seek(0)
    for other in (copy.deepcopy(layer), pickle.load(file)):
        assert torch.equal(other(x, causal=True), layer(x, causal=True))

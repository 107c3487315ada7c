"""Which parameters weight decay leaves alone."""

import copy

import pytest

from ndlightnet import NDLightNet
from ndlightnet.nn import mixers
from ndlightnet.nn.block import undecayed_names
from ndlightnet.training.core.optim import decayed_groups

# what is neither a matrix, a filter, a norm nor a bias
UNDECAYED = {
    "GatedDeltaNet": {"A_log"},
    "HGRN": {"theta"},
    "KimiDeltaAttention": {"A_log"},
    "LAVO": {"basis"},
    "LightNetAttention": {"lrpe.log_factor"},
    "LrpeAttention": {"lrpe.log_factor"},
    "Mamba": {"A_log"},
    "S4": {"A_log", "A_imag"},
    "S5": {"A_log", "A_imag"},
    "SoftmaxAttention": {"lrpe.log_factor"},
    "UnsharedLightNet": {"lrpe.log_factor"},
}


def network(name: str) -> NDLightNet:
    kind = getattr(mixers, name)
    return NDLightNet(1, 1, 2, patch_size=1, embed_dim=8, depth=1, tpe_states=2, mixer=kind)


@pytest.mark.parametrize("name", mixers.__all__)
def test_a_mixer_says_which_of_its_parameters_do_not_decay(name):
    net = network(name)
    expected = {f"blocks.0.mixer.{key}" for key in UNDECAYED.get(name, ())}
    expected |= {"tpe.coef", "tpe.logit"}
    assert net.no_weight_decay() == expected == undecayed_names(net)
    assert expected <= {key for key, _ in net.named_parameters()}
    plain = {id(p) for p in decayed_groups(net, 0.1)[1]["params"]}
    assert all(id(p) in plain for key, p in net.named_parameters() if key in expected)


def test_copies_and_loaded_networks_still_say_so():
    def groups(net: NDLightNet) -> list[list[str]]:
        names = {id(p): key for key, p in net.named_parameters()}
        return [[names[id(p)] for p in group["params"]] for group in decayed_groups(net, 0.1)]

    net = network("S4")
    loaded = copy.deepcopy(net).to("meta")
    loaded.load_state_dict(net.state_dict(), assign=True)
    for other in (copy.deepcopy(net), copy.deepcopy(net).to("meta"), loaded):
        assert groups(other) == groups(net)

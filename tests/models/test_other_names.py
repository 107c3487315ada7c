"""Names of timm and of MONAI for the same arguments, on both networks."""

import inspect
from functools import partial

import pytest
import torch

from ndlightnet import NDLightNet, NDLightUNet

small = partial(NDLightNet, embed_dim=32, depth=1, tpe_states=4, patch_size=4)
unet = partial(NDLightUNet, widths=(8, 16), depths=(0, 1))
MONAI = {"spatial_dims": 2, "in_channels": 2, "out_channels": 3}
TIMM = {"dims": 2, "in_chans": 2, "num_classes": 3}


@pytest.mark.parametrize("make", [small, unet])
@pytest.mark.parametrize("names", [MONAI, TIMM, {"dims": 2, "in_channels": 2, "num_classes": 3}], ids=str)
def test_each_name_is_the_other(make, names):
    torch.manual_seed(0)
    net = make(**names).eval()
    torch.manual_seed(0)
    expected = make(2, 2, 3).eval()
    x = torch.randn(1, 2, 9, 8)
    assert torch.equal(net(x), expected(x))


@pytest.mark.parametrize("make", [small, unet])
def test_both_names_are_an_error(make):
    with pytest.raises(ValueError, match="spatial_dims=3 beside dims: expected one"):
        make(dims=2, spatial_dims=3)
    with pytest.raises(ValueError, match="spatial_dims=2 beside dims"):
        make(2, spatial_dims=2)
    with pytest.raises(ValueError, match=r"in_chan\w+=1 beside in_chan\w+"):
        make(2, in_chans=1, in_channels=1)
    with pytest.raises(TypeError, match="in_channel'"):
        make(2, in_channel=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dims'"):
        make(in_channels=1)


@pytest.mark.parametrize("cls", [NDLightNet, NDLightUNet])
def test_the_signature_knows_one_name(cls):
    names = set(inspect.signature(cls).parameters)
    assert "dims" in names and "spatial_dims" not in names and "options" not in names


def test_yaml_of_the_command_line_and_of_monai():
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(NDLightUNet, "net")
    config = parser.parse_args(["--net.dims=2", "--net.widths=[8,16]"])
    assert parser.instantiate_classes(config).net.widths == (8, 16)
    assert not any("spatial_dims" in str(action.dest) for action in parser._actions)
    parse = pytest.importorskip("monai.bundle").ConfigParser
    found = parse({"net": {"_target_": "ndlightnet.NDLightUNet", **MONAI}})
    assert found.get_parsed_content("net").out_channels == 3

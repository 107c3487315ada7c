"""NDLightNet made by timm: its names, arguments, features and weights. Layer decay, the optimiser and the average of
weights are the door `timm` of tests/doors, segmentation_models_pytorch the door `smp`."""

from copy import deepcopy

import pytest
import torch

timm = pytest.importorskip("timm")
from timm.models._features import FeatureGetterNet  # noqa: E402
from timm.models._hub import save_for_hf  # noqa: E402

import ndlightnet.integrations.timm  # noqa: E402
from ndlightnet import NDLightNet  # noqa: E402

NAMES = [f"ndlightnet_{size}{kind}" for size in ("base", "small", "tiny") for kind in ("", "_local")]
SMALL = {"depth": 2, "embed_dim": 32, "tpe_states": 8, "num_classes": 5, "patch_size": 4}


def make(name="ndlightnet_tiny_local", **options):
    return timm.create_model(name, **SMALL | options).eval()


def test_all_names_are_listed_without_weights():
    assert timm.list_models("*ndlightnet*") == NAMES
    assert not timm.list_models("*ndlightnet*", pretrained=True)


@pytest.mark.parametrize("name", NAMES)
def test_one_name_is_one_network_everywhere(name):
    width = {"tiny": 192, "small": 384, "base": 768}[name.split("_")[1]]
    with torch.device("meta"):
        net = timm.create_model(name)
        if name.endswith("_local"):
            twin = NDLightNet(2, embed_dim=width)
        else:
            twin = getattr(ndlightnet, name)(2, patch_size=16)
    assert isinstance(net, NDLightNet) and net.embed.patch == (16, 16)
    shapes = [{n: w.shape for n, w in x.state_dict().items()} for x in (net, twin)]
    assert shapes[0] == shapes[1]
    has_local = any(".local" in n for n, _ in net.named_modules())
    assert has_local == name.endswith("_local")


def test_arguments_of_create_model():
    rates = {"drop_rate": 0.25, "drop_path_rate": 0.2}
    net = make(in_chans=4, img_size=(64, 80), global_pool="avg", dynamic_img_size=True, **rates)
    assert net.head_drop.p == 0.25 and net.blocks[1].drop_path.p == pytest.approx(0.2)
    assert net(torch.randn(1, 4, 30, 41)).shape == (1, 5)
    assert timm.models.get_model_input_config(net)["input_size"] == (4, 64, 80)
    tokens = make(global_pool="")
    assert tokens(torch.randn(1, 3, 30, 41)).shape == (1, 8, 11, 5) and tokens.global_pool == ""
    assert timm.create_model("ndlightnet_tiny", depth=1, num_classes=0).num_classes == 0
    for options, match in (
        ({"global_pool": "max"}, "global_pool='max'"),
        ({"img_size": (2, 3, 4)}, "img_size="),
        ({"dynamic_img_size": False}, "dynamic_img_size=False"),
    ):
        with pytest.raises(ValueError, match=match):
            make(**options)
    with pytest.raises(TypeError, match="no_such"):
        make(no_such=1)
    with pytest.raises(RuntimeError, match="No pretrained weights exist for ndlightnet_tiny_local"):
        make(pretrained=True)


def test_data_config_and_preprocessing():
    net = make()
    config = timm.data.resolve_model_data_config(net)
    assert config["input_size"] == (3, 224, 224) and config["mean"] == (0.485, 0.456, 0.406)
    assert config["interpolation"] == "bicubic" and config["std"] == (0.229, 0.224, 0.225)
    assert net.get_submodule(net.pretrained_cfg["first_conv"]) is net.embed.proj
    assert getattr(net, net.pretrained_cfg["classifier"]) is net.get_classifier()
    image = pytest.importorskip("PIL.Image").new("RGB", (300, 260))
    assert net(timm.data.create_transform(**config)(image)[None]).shape == (1, 5)


def test_features_only_are_those_of_the_blocks():
    """What the door `timm` has not: the text of the features, one axis of tokens, and the norm."""
    net, x = make(depth=4), torch.randn(2, 3, 30, 41)
    expected = net.forward_intermediates(x, [0, 2], output_fmt="NLC", intermediates_only=True)
    maps = FeatureGetterNet(deepcopy(net), out_indices=(0, -2), output_fmt="NLC")
    for info in (maps.feature_info, make(features_only=True, out_indices=(0, -2), depth=4).feature_info):
        assert info.channels() == [32, 32] and info.reduction() == [4, 4]
        assert info.module_name() == ["blocks.0", "blocks.2"]
    assert len(maps.model.blocks) == 3 and all(map(torch.equal, maps(x), expected))
    (last,) = FeatureGetterNet(net, out_indices=1, norm=True)(x)
    assert torch.equal(last.movedim(1, -1), net.forward_features(x))


@pytest.mark.parametrize("channels", [1, 3, 5])
@pytest.mark.parametrize("classes", [5, 7])
def test_own_weights_load_into_other_channels_and_classes(tmp_path, channels, classes):
    net = make()
    torch.save(net.state_dict(), tmp_path / "w.pt")
    overlay = {"file": str(tmp_path / "w.pt"), "num_classes": 5}
    new = make(pretrained=True, pretrained_cfg_overlay=overlay, in_chans=channels, num_classes=classes)
    assert torch.equal(new.blocks[1].norm1.weight, net.blocks[1].norm1.weight)
    assert torch.equal(new.head.weight, net.head.weight) == (classes == 5)
    x = torch.randn(1, 1, 30, 41)
    if channels == 1 and classes == 5:
        assert torch.allclose(new(x), net(x.expand(-1, 3, -1, -1)), atol=1e-4)


def test_saved_for_the_hub_and_made_from_its_folder(tmp_path):
    net, x = make("ndlightnet_small", in_chans=2, global_pool=""), torch.randn(2, 2, 30, 41)
    net.set_input_size(48, patch_size=(6, 4))
    save_for_hf(net, tmp_path, safe_serialization=True)
    twin = timm.create_model(f"local-dir:{tmp_path}", pretrained=True).eval()
    assert twin.embed.patch == (6, 4) and timm.models.get_model_input_config(twin)["input_size"] == (2, 48, 48)
    assert torch.equal(twin(x), net(x))


def test_what_timm_made_is_saved_and_loaded_without_timm(tmp_path):
    pytest.importorskip("safetensors")
    net, x = make(mixer="GLA"), torch.randn(2, 3, 30, 41)
    net.save_pretrained(tmp_path)
    twin = NDLightNet.from_pretrained(tmp_path).eval()
    assert type(net) is type(twin) is NDLightNet and torch.equal(twin(x), net(x))
    torch.save(net.state_dict(), tmp_path / "w.pt")
    assert torch.equal(make(mixer="GLA", checkpoint_path=tmp_path / "w.pt")(x), net(x))

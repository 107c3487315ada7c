"""Networks know their arguments: JSON, mixers by name, through copies, pickles and changes."""

import copy
import inspect
import io
import json
import pickle
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet, mixers, ndlightnet_tiny
from ndlightnet.models import Forecaster

SMALL = {"embed_dim": 16, "depth": 2, "tpe_states": 4, "num_classes": 3}
rotary = partial(mixers.LightNetAttention, lrpe="rotary", local="both", heads=1)
MIXERS = {  # forms of one mixer
    "class": (mixers.GLA, "GLA", "ndlightnet.nn.mixers.GLA", {"GLA": {}}, {"GLA": None}, ["GLA", mixers.GLA]),
    "partial": (rotary, {"LightNetAttention": {"lrpe": "rotary", "local": "both", "heads": 1}}),
    "list": ([mixers.TNL, {"LAVO": {"window": 2}}], ["TNL", {"class_path": "LAVO", "init_args": {"window": 2}}]),
    "with a local branch": (
        partial(mixers.WithLocal, mixer=partial(mixers.TNL, heads=2), radius=2),
        {"WithLocal": {"radius": 2, "mixer": {"TNL": {"heads": 2}}}},
    ),
    "published": (mixers.published_mixer, "published_mixer"),
}


def same(net: nn.Module, copied: nn.Module, *inputs: torch.Tensor) -> None:
    copied.load_state_dict(net.state_dict())
    assert type(copied) is type(net)
    assert torch.equal(net.eval()(*inputs), copied.eval()(*inputs))


def through_json(config: dict) -> dict:
    return json.loads(json.dumps(config, allow_nan=False))


@pytest.mark.parametrize("name", MIXERS)
def test_config_makes_the_same_network(name):
    first, *forms = MIXERS[name]
    net = NDLightNet(2, 1, patch_size=(2, 3), mixer=first, **SMALL)
    assert net.config["patch_size"] == [2, 3] and net.config["tpe_states"] == 4
    x = torch.randn(2, 1, 7, 8)
    config = through_json(net.config)
    for mixer in (config["mixer"], *forms):
        again = NDLightNet(**{**config, "mixer": mixer})
        same(net, again, x)
        one = isinstance(again.config["mixer"], list) and name == "class"  # a list of the same mixer
        assert one or again.config == net.config


def test_all_arguments_are_there_under_their_own_names():
    for net in (
        NDLightNet(spatial_dims=2, in_channels=1, out_channels=3, embed_dim=8, depth=1),
        ndlightnet_tiny(2),
        NDLightUNet(2, num_classes=3, widths=(4, 8), depths=(0, 1)),
        NDLightDiT(2, num_classes=3, embed_dim=8, depth=1),
        Forecaster(embed_dim=8),
    ):
        assert list(net.config) == list(inspect.signature(type(net)).parameters)
    assert ndlightnet_tiny(2).config["mixer"] == "published_mixer"
    written = Forecaster(embed_dim=8, cross=mixers.SoftmaxAttention).config
    assert written["mixer"]["LightNetAttention"]["radius"] == 1  # a mixer's defaults, too
    assert written["cross"]["SoftmaxAttention"]["rotary"] is True


def apply(activation, mixer, dim):
    return nn.Sequential(mixer(dim), activation)


def test_a_mixer_of_ones_own_is_noted_and_never_imported():
    class Mine(mixers.Identity):
        pass

    net = NDLightNet(2, mixer=[Mine, lambda dim: nn.Identity()], **SMALL)
    first, second = net.config["mixer"]
    assert first["custom"].endswith("Mine") and second["custom"].endswith("<lambda>")
    with pytest.raises(ValueError, match=r"mixer\[0\]: .*Mine, which is not a mixer of ndlightnet"):
        NDLightNet(**net.config)
    net = NDLightNet(2, mixer=partial(apply, nn.Tanh(), mixers.GLA), **SMALL)
    assert net.config["mixer"] == {"custom": f"{__name__}.apply"}
    for evil in ("os.system", "ndlightnet.nn.mixers.os", "ndlightnet.nn.mixers.base.Mixer"):
        with pytest.raises(ValueError, match="expected one of ABCAttention"):
            NDLightNet(2, mixer={"class_path": evil, "init_args": {"command": "true"}}, **SMALL)


def test_copies_pickles_and_compiled_networks_know_them():
    net, file = NDLightNet(2, mixer="TNL", **SMALL), io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for copied in (
        copy.deepcopy(net),
        pickle.loads(pickle.dumps(net)),
        torch.load(file, weights_only=False),
        torch.compile(net),
        net.double(),
    ):
        assert copied.config == net.config
    net.config["depth"] = 7  # of a copy
    assert net.config["depth"] == 2


def test_subclasses_know_their_own():
    class Wide(NDLightNet):
        def __init__(self, dims: int, width: int = 2, **options) -> None:
            super().__init__(dims, embed_dim=8 * width, **options)

    class Plain(NDLightNet):
        pass

    class PassesOn(NDLightNet):
        def __init__(self, *args, scale: float = 1.0, **options) -> None:
            super().__init__(*args, **options)

    wide = Wide(2, 4, depth=1, mixer="TNL", num_classes=3)
    assert list(wide.config) == ["dims", "width", "depth", "mixer", "num_classes"]
    same(wide, Wide(**through_json(wide.config)), torch.randn(1, 3, 16, 16))
    wide.set_input_size(patch_size=4)
    assert wide.config["patch_size"] == [4, 4]
    passed = PassesOn(2, 1, scale=2.0, **SMALL)
    assert passed.config == {"dims": 2, "in_chans": 1, "scale": 2.0, **SMALL}
    same(passed, PassesOn(**through_json(passed.config)), torch.randn(1, 1, 16, 16))
    assert Plain(2, **SMALL).config == NDLightNet(2, **SMALL).config


def test_changes_are_noted():
    net = NDLightNet(2, mixer=["TNL", "GLA"], patch_size=2, **SMALL)
    net.reset_classifier(5)
    assert net.config["num_classes"] == 5
    net.set_input_size(patch_size=4)
    assert net.config["patch_size"] == [4, 4]
    same(net, NDLightNet(**net.config), torch.randn(1, 3, 8, 8))
    net.prune_intermediate_layers([0])
    assert net.config["depth"] == 1 and net.config["num_classes"] == 0
    same(net, NDLightNet(**net.config), torch.randn(1, 3, 8, 8))
    custom = NDLightNet(2, mixer=[mixers.TNL, lambda dim: mixers.TNL(dim)], **SMALL)
    custom.prune_intermediate_layers([0, 1])
    assert "custom" in custom.config["mixer"][1]
    net.prune_intermediate_layers([0], prune_norm=True)
    with pytest.raises(ValueError, match=r"NDLightNet was changed to \{'norm': False\}, which no"):
        net.description()


def test_device_and_dtype():
    net = NDLightNet(2, device="meta", dtype=torch.float64, **SMALL)
    assert {(p.device.type, p.dtype) for p in net.parameters()} == {("meta", torch.float64)}
    for empty in (NDLightUNet(2, widths=(4, 8), depths=(0, 1), device="meta"), Forecaster(embed_dim=8, device="meta")):
        assert {x.device.type for x in empty.state_dict().values()} == {"meta"}
    assert torch.get_default_dtype() == torch.float32 and torch.empty(0).device.type == "cpu"
    assert "device" not in inspect.signature(NDLightNet).parameters  # no option of YAML
    assert "device" not in net.config and "dtype" not in net.config
    with pytest.raises(TypeError, match=r"^NDLightNet has no argument devise; did you mean device\?$"):
        NDLightNet(2, devise="meta")


@pytest.mark.slow
def test_the_trainer_of_transformers_takes_such_a_network(tmp_path):
    """It and its loggers take the `config` of a network for one of theirs."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")

    class WithLoss(NDLightNet):
        def forward(self, pixels, labels=None):
            logits = super().forward(pixels)
            return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}

    net = WithLoss(2, patch_size=4, **SMALL)
    before = net.config
    data = [{"pixels": torch.randn(3, 8, 8), "labels": i % 3} for i in range(4)]
    arguments = transformers.TrainingArguments(
        str(tmp_path), max_steps=1, report_to=["tensorboard"], use_cpu=True, disable_tqdm=True
    )
    trainer = transformers.Trainer(net, arguments, train_dataset=data, eval_dataset=data)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] > 0
    assert json.loads(net.config.to_json_string()) == net.config.to_dict() == net.config == before


def test_device_and_dtype_are_no_options_of_yaml(tmp_path):
    jsonargparse = pytest.importorskip("jsonargparse")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_class_arguments(NDLightNet, "net")
    config = parser.parse_object({"net": {"dims": 2, "depth": 1, "mixer": "GLA"}})
    names = {key.split(".")[0] for key in config.net.keys()}  # noqa: SIM118
    assert names == set(inspect.signature(NDLightNet).parameters)
    assert "dims" in names and not {"spatial_dims", "in_channels", "options"} & names
    net = parser.instantiate_classes(config).net
    assert net.config == NDLightNet(2, depth=1, mixer="GLA").config
    with pytest.raises(jsonargparse.ArgumentError, match="device"):
        parser.parse_object({"net": {"dims": 2, "device": "cpu"}})


def test_numbers_of_numpy_are_numbers():
    two = np.int64(2)
    net = NDLightNet(two, patch_size=two, embed_dim=np.int64(16), depth=two, num_classes=two)
    x = torch.randn(1, 3, 4, 4)
    assert net.embed.patch == (2, 2) and net(x).shape == (1, 2)
    assert len(net.forward_intermediates(x, np.int64(1), intermediates_only=True)) == 1
    json.dumps(net.config)


MONAI = {"spatial_dims": 2, "in_channels": 2, "out_channels": 3}
TIMM = {"dims": 2, "in_chans": 2, "num_classes": 3}
small = partial(NDLightNet, embed_dim=32, depth=1, tpe_states=4, patch_size=4)
both_networks = pytest.mark.parametrize("make", [small, partial(NDLightUNet, widths=(8, 16), depths=(0, 1))])


@both_networks
def test_names_of_timm_and_of_monai(make):
    expected = make(2, 2, 3).config
    for names in (MONAI, TIMM, {"dims": 2, "in_channels": 2, "num_classes": 3}):
        assert make(**names).config == expected


@both_networks
def test_both_names_are_an_error(make):
    for args, options, message in (
        ((), {"dims": 2, "spatial_dims": 3}, "spatial_dims=3 beside dims: expected one"),
        ((2,), {"spatial_dims": 2}, "spatial_dims=2 beside dims"),
        ((2,), {"in_chans": 1, "in_channels": 1}, r"in_chan\w+=1 beside in_chan\w+"),
    ):
        with pytest.raises(ValueError, match=message):
            make(*args, **options)
    with pytest.raises(TypeError, match=r"^NDLight\w+ has no argument in_channel; did you mean in_chan\w+\?$"):
        make(2, in_channel=1)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'dims'"):
        make(in_channels=1)


@pytest.mark.parametrize(
    "make, name, message",
    [
        (NDLightNet, "num_class", "; did you mean num_classes?"),
        (NDLightUNet, "nhead", "; expected one of causal, convs, "),
        (NDLightDiT, "num_layers", "; did you mean depth?"),
        (Forecaster, "decoder_dept", "; did you mean decoder_depth?"),
    ],
)
def test_a_misspelt_argument_is_named(make, name, message):
    class Derived(make):
        pass

    for kind in (make, Derived):
        with pytest.raises(TypeError) as caught:
            kind(2, **{name: 3})
        assert str(caught.value).startswith(f"{make.__name__} has no argument {name}{message}")


def test_a_bundle_of_monai_has_its_names():
    parse = pytest.importorskip("monai.bundle").ConfigParser
    parsed = parse({"net": {"_target_": "ndlightnet.NDLightUNet", **MONAI}})
    assert parsed.get_parsed_content("net").out_channels == 3

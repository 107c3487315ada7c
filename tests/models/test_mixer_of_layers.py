"""A mixer for all layers, or one for each: what factories are called with, what networks of
mixed layers promise, and the same from YAML."""

import json
import re
import sys
from functools import partial

import pytest
import torch
import yaml
from torch import nn

from ndlightnet import LightNetAttention, NDLightNet, NDLightUNet
from ndlightnet.data.errors import DataError
from ndlightnet.models import Forecaster
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.base import build_mixer
from ndlightnet.nn.mixers.names import CATALOGUE, description
from ndlightnet.training import TaskCLI, TextData, TextTask
from ndlightnet.training.core.costs import state_size


class Recorded(mixers.Identity):
    """A mixer that records what it was built with."""

    def __init__(self, dim: int, heads: int = 1, *, dims: int | None = None, layer: int | None = None) -> None:
        super().__init__(dim)
        self.built = dim, dims, layer, heads


class OfLayer(mixers.Identity):
    def __init__(self, dim: int, layer: int | None = None) -> None:
        super().__init__(dim)
        self.built = dim, layer


def of_layer(dim: int, layer: int) -> nn.Module:
    return LightNetAttention(dim) if layer % 2 else mixers.TNL(dim)


def built(net: nn.Module) -> list:
    return [module.built for module in net.modules() if hasattr(module, "built")]


def test_factories_get_what_their_signatures_name():
    assert build_mixer(Recorded, 8, dims=3, layer=5).built == (8, 3, 5, 1)
    assert build_mixer(OfLayer, 8, dims=3, layer=5).built == (8, 5)
    assert build_mixer(partial(Recorded, heads=2, dims=7), 8, dims=3, layer=5).built == (8, 7, 5, 2)
    assert build_mixer(partial(Recorded, layer=None), 8, dims=3, layer=5).built == (8, 3, 5, 1)
    assert build_mixer(partial(OfLayer, layer=0), 8, dims=3, layer=5).built == (8, 0)
    assert isinstance(build_mixer(lambda dim: nn.Identity(), 8, dims=3, layer=5), nn.Identity)
    sharp = (build_mixer(LightNetAttention, 8, dims=3, layer=5, causal=c) for c in (False, True))
    assert [layer.key_scale for layer in sharp] == [4, 1]
    anything = partial(lambda dim, **more: Recorded(dim, **more), heads=4)
    assert build_mixer(anything, 8, dims=3, layer=5).built == (8, None, None, 4)


def test_layers_are_counted_through_a_network():
    net = NDLightNet(2, 1, 2, embed_dim=8, depth=3, mixer=Recorded)
    assert built(net) == [(8, 2, i, 1) for i in range(3)]
    unet = NDLightUNet(3, widths=(4, 8, 12), depths=(1, 0, 2), mixer=Recorded)
    assert built(unet) == [(4, 3, 0, 1), (12, 3, 1, 1), (12, 3, 2, 1)]
    cast = Forecaster(depth=2, decoder_depth=2, embed_dim=8, mixer=Recorded, cross=OfLayer)
    assert [block.mixer.built for block in (*cast.encoder, *cast.decoder)] == [(8, 1, i, 1) for i in range(4)]
    assert [block.cross.built for block in cast.decoder] == [(8, 2), (8, 3)]


def test_a_mixer_for_each_layer():
    each = [LightNetAttention, partial(mixers.TNL, heads=2), mixers.Identity]
    kinds = [LightNetAttention, mixers.TNL, mixers.Identity]
    for mixer in (each, tuple(each)):
        net = NDLightNet(2, 1, 2, embed_dim=16, depth=3, mixer=mixer)
        assert [type(block.mixer) for block in net.blocks] == kinds
    unet = NDLightUNet(2, widths=(8, 16), depths=(1, 2), mixer=each)
    assert [type(b.mixer) for stage in unet.stages for b in stage.blocks] == kinds
    cast = Forecaster(depth=1, decoder_depth=2, embed_dim=16, mixer=each, cross=each[:2])
    assert [type(block.mixer) for block in (*cast.encoder, *cast.decoder)] == kinds
    assert [type(block.cross) for block in cast.decoder] == kinds[:2]
    # by default a layer's own cross form, LightNet's where it has none
    cast = Forecaster(depth=1, decoder_depth=2, embed_dim=16, mixer=each)
    assert [type(b.cross) for b in cast.decoder] == [mixers.TNL, LightNetAttention]
    assert cast(torch.randn(1, 336, 7), torch.rand(1, 340, 4)).shape == (1, 4, 7)


@pytest.mark.parametrize(
    ("mixer", "message"),
    [
        ([LightNetAttention] * 3, r"mixer: a list of 3, expected one for each of 2 layers"),
        ([], r"mixer: a list of 0, expected one for each of 2 layers"),
        ([mixers.TNL, LightNetAttention(16)], r"mixer\[1\]=LightNetAttention\(\.\.\.\)"),
        ([mixers.TNL, "TLN"], r"mixer\[1\]='TLN': did you mean 'TNL'\? expected one of .*TNL, Un"),
        ("Nothing", r"mixer='Nothing': expected one of ABCAttention, .*WithLocal$"),
        ("gla", r"mixer='gla': did you mean 'GLA'\?"),
        ("torch.nn.GLA", r"mixer='torch.nn.GLA': did you mean 'GLA'\?"),
        (partial(mixers.GLA, num_heads=4), r"mixer: GLA has no 'num_heads', did you mean 'heads'"),
        ({"GLA": {"scn": "both"}}, r"mixer: GLA has no 'scn', did you mean 'scan'\? .*heads, scan"),
        ({"GLA": 3}, r"mixer=\{'GLA': 3\}: expected arguments by name"),
        ({"GLA": {}, "TNL": {}}, r"expected a name, or \{name: arguments\}"),
        ({"custom": "my.Mixer"}, r"mixer: my.Mixer, which is not a mixer of ndlightnet; pass it"),
        (None, r"mixer=None: expected a name such as 'GLA'.* a function of the width.*or a list"),
    ],
)
def test_errors_name_the_layer(mixer, message):
    with pytest.raises(ValueError, match=message):
        NDLightNet(2, 1, 2, embed_dim=16, depth=2, mixer=mixer)
    with pytest.raises(ValueError, match=message):
        NDLightUNet(2, widths=(8, 16), depths=(1, 1), mixer=mixer)


def test_mixed_layers_stream_and_export(close):
    each = [partial(LightNetAttention, heads=2), mixers.TNL, mixers.Identity]
    net = NDLightNet(1, vocab_size=50, embed_dim=16, tpe_states=4, causal=True, depth=3, mixer=each).double().eval()
    words = torch.randint(50, (2, 12))
    expected = net(words).detach()
    stream = net.stream(2)
    close(torch.cat([stream(piece) for piece in words.split([5, 1, 6], 1)], 1), expected, 1e-10)
    sizes = [block.mixer.state_size for block in net.blocks]
    assert state_size(net) == round(sum(sizes) / 3)
    exported = torch.export.export(net, (words,), strict=False)
    close(exported.module()(words), expected, 1e-10)


FORMS = {
    "a short name": ("mixer: TNL", [("TNL", {})] * 3),
    "a short name with options": ("mixer: {class_path: LAVO, init_args: {window: 8}}", [("LAVO", {"window": 8})] * 3),
    "short names within": (
        "mixer: {class_path: WithLocal, init_args: {local: both, mixer: LAVO}}",
        [("WithLocal", {})] * 3,
    ),
    "a list": (
        "mixer: [ndlightnet.nn.mixers.LightNetAttention, {class_path: ndlightnet.nn.mixers.LAVO, "
        "init_args: {window: 8}}, ndlightnet.nn.mixers.GLA]",
        [("LightNetAttention", {}), ("LAVO", {"window": 8}), ("GLA", {})],
    ),
    "a class that names its layer": (
        "mixer: {class_path: HERE.Recorded, init_args: {heads: 3}}",
        [("Recorded", {"built": (16, 1, i, 3)}) for i in range(3)],
    ),
    "a class that wants its layer": ("mixer: HERE.OfLayer", [("OfLayer", {"built": (16, i)}) for i in range(3)]),
    "a function of the layer": ("mixer: HERE.of_layer", [("TNL", {}), ("LightNetAttention", {}), ("TNL", {})]),
}


def from_yaml(line: str, folder, *arguments: str) -> TaskCLI:
    config = folder / "config.yaml"
    config.write_text(
        "model:\n  net:\n    class_path: ndlightnet.NDLightNet\n    init_args:\n"
        "      dims: 1\n      vocab_size: 256\n      causal: true\n      embed_dim: 16\n"
        f"      depth: 3\n      {line.replace('HERE', __name__)}\n"
        f"data: {{class_path: ndlightnet.training.TextData, init_args: {{root: {folder}}}}}\n"
        "trainer: {accelerator: cpu, logger: false}\n"
    )
    args = ["--config", str(config), f"--trainer.default_root_dir={folder / 'out'}", *arguments]
    return TaskCLI(TextTask, TextData, subclass_mode_data=True, run=False, args=args)


@pytest.mark.parametrize("form", FORMS)
def test_a_line_of_yaml(form, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["task.py"])
    line, expected = FORMS[form]
    cli = from_yaml(line, tmp_path)
    saved = yaml.safe_load(cli.parser.dump(cli.config))["model"]["net"]["init_args"]["mixer"]
    again = from_yaml(f"mixer: {json.dumps(saved)}", tmp_path)  # what a run writes to its folder
    for blocks in (cli.model.net.blocks, again.model.net.blocks):
        assert [type(block.mixer).__name__ for block in blocks] == [kind for kind, _ in expected]
        for block, (_, attributes) in zip(blocks, expected, strict=True):
            assert all(getattr(block.mixer, key) == value for key, value in attributes.items())


def test_an_argument_replaces_the_mixer_of_a_config(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["task.py"])
    line = FORMS["a list"][0]
    argument = "--model.net.init_args.mixer="
    for value in ("ndlightnet.nn.mixers.HGRN2", '["ndlightnet.nn.mixers.HGRN2"]'):
        more = [f"{argument}{value}"]
        more += ["--model.net.init_args.depth=1"] if value.startswith("[") else []
        blocks = from_yaml(line, tmp_path, *more).model.net.blocks
        assert {type(block.mixer).__name__ for block in blocks} == {"HGRN2"}
    one = FORMS["a short name with options"][0]
    blocks = from_yaml(one, tmp_path, f"{argument[:-1]}.window=4").model.net.blocks
    assert {block.mixer.window for block in blocks} == {4}
    with pytest.raises(DataError, match="mixer: a list of 1, expected one for each of 3 layers"):
        from_yaml(line, tmp_path, f'{argument}["ndlightnet.nn.mixers.HGRN2"]')


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("mixer: {LAVO: {window: 8}}", "in YAML expected a name, or {class_path: LAVO, init_args"),
        ("mixer: LAVA", "did you mean 'LAVO'?"),
        ("mixer: [TNL, TNL, ndlightnet.nn.mixers.LAVA]", "did you mean 'LAVO'?"),
    ],
)
def test_a_wrong_line_of_yaml(line, message, tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["task.py"])
    with pytest.raises(DataError, match=re.escape(message)):
        from_yaml(line, tmp_path)


def test_what_a_mixer_is_called_in_json():
    assert description(mixers.Identity) == "Identity"
    assert description(partial(mixers.GLA, scan="axes")) == {"GLA": {"heads": None, "scan": "axes", "impl": "auto"}}
    assert description(partial(mixers.text_mixer, window=7)) == {"text_mixer": {"window": 7}}
    inner = partial(mixers.WithLocal, mixer=partial(mixers.TNL, heads=2), local="both")
    inner = description(inner)["WithLocal"]["mixer"]
    assert inner == {"TNL": {"heads": 2, "scan": "both", "impl": "auto"}}
    custom = {"custom": f"{__name__}.OfLayer"}
    assert description(OfLayer) == description(partial(OfLayer, layer=3)) == custom
    assert "lambda" in description(lambda dim: nn.Identity())["custom"]
    assert set(mixers.__all__) <= set(CATALOGUE) and len(CATALOGUE) == len(mixers.__all__) + 3
    for kind in CATALOGUE.values():
        form = json.loads(json.dumps(description(kind)))
        assert CATALOGUE[form if isinstance(form, str) else next(iter(form))] is kind

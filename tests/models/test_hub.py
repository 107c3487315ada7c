"""Networks are saved to folders and repositories, and loaded again; what does not fit is named."""

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from ndlightnet import NDLightDiT, NDLightNet, NDLightUNet
from ndlightnet.models import Forecaster
from ndlightnet.models.weights import load_weights
from ndlightnet.nn import mixers

safetensors = pytest.importorskip("safetensors.torch")
SMALL = {"embed_dim": 16, "depth": 2, "tpe_states": 4, "patch_size": 2}


def image(**options) -> NDLightNet:
    return NDLightNet(2, **{"in_chans": 1, "num_classes": 3, "mixer": "TNL", **SMALL, **options})


def words(**options) -> NDLightNet:
    return NDLightNet(1, vocab_size=9, causal=True, **{"embed_dim": 16, "depth": 1, **options})


text = partial(words, embed_dim=64, depth=3, mixer=partial(mixers.text_mixer, window=3))
dit = partial(NDLightDiT, 3, 1, 4, patch_size=(1, 2, 2), embed_dim=16, depth=1, tpe_states=4)
unet = partial(NDLightUNet, 2, 3, 2, widths=(4, 8), depths=(0, 1), strides=[(1, 2)], mixer="TNL")
NETS = {
    "image": (image, lambda: (torch.randn(2, 1, 7, 6),)),
    "words": (words, lambda: (torch.randint(9, (2, 11)),)),
    "text": (text, lambda: (torch.randint(9, (2, 11)),)),
    "unet": (unet, lambda: (torch.randn(1, 3, 7, 6),)),
    "diffusion": (dit, lambda: (torch.randn(2, 1, 2, 5, 4), torch.rand(2), torch.tensor([1, 3]))),
    "forecaster": (
        partial(Forecaster, 2, 4, embed_dim=8, depth=1, cross=mixers.SoftmaxAttention),
        lambda: (torch.randn(1, 6, 2), torch.randn(1, 8, 4)),
    ),
}


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_a_folder_is_the_network(name, dtype, tmp_path):
    make, inputs = NETS[name]
    net = make().to(dtype).eval()
    assert net.save_pretrained(tmp_path / "folder") == tmp_path / "folder"
    assert {p.name for p in (tmp_path / "folder").iterdir()} == {"config.json", "model.safetensors", "README.md"}
    loaded = type(net).from_pretrained(tmp_path / "folder")
    assert not loaded.training and loaded.config == net.config
    for (key, x), (_, y) in zip(net.state_dict().items(), loaded.state_dict().items(), strict=True):
        assert torch.equal(x, y), key
    if dtype != torch.bfloat16:
        xs = [x.to(dtype) if x.is_floating_point() else x for x in inputs()]
        assert torch.equal(net(*xs), loaded(*xs))
    assert len({id(p) for p in loaded.parameters()}) == len(list(net.parameters()))  # tied ones
    half = type(net).from_pretrained(tmp_path / "folder", dtype=torch.float16)
    assert {x.dtype for x in half.parameters()} == {torch.float16}


def test_tied_weights_are_saved_once_and_stay_tied(tmp_path):
    net = words()
    net.save_pretrained(tmp_path)
    saved = safetensors.load_file(tmp_path / "model.safetensors")
    assert "embed.weight" in saved and "head.weight" not in saved
    assert not safetensors.load_model(words(), tmp_path / "model.safetensors")[0]  # by itself, too
    loaded = NDLightNet.from_pretrained(tmp_path)
    assert loaded.head.weight is loaded.embed.weight
    empty = words(device="meta").to_empty(device="cpu")
    assert empty.head.weight is empty.embed.weight


def test_arguments_may_be_given(tmp_path):
    image().save_pretrained(tmp_path)
    with pytest.warns(UserWarning, match=r"num_classes=7, saved with 3: the head is new and untra"):
        net = NDLightNet.from_pretrained(tmp_path, num_classes=7, drop_path_rate=0.5)
    assert net.head.weight.shape == (7, 16) and net.blocks[1].drop_path.p == 0.5
    with pytest.warns(UserWarning, match=r"num_classes=0, saved with 3: the head is left out"):
        NDLightNet.from_pretrained(tmp_path, num_classes=0)
    dit().save_pretrained(tmp_path / "dit")
    with pytest.warns(UserWarning, match="num_classes=2, saved with 4: the head is new"):
        assert NDLightDiT.from_pretrained(tmp_path / "dit", num_classes=2).class_embed.num_embeddings == 3
    with pytest.raises(ValueError, match=r"other shapes: embed\.proj\.weight"):
        NDLightDiT.from_pretrained(tmp_path / "dit", in_chans=2)
    with pytest.raises(ValueError, match="NDLightNet has no argument dropouts; did you mean dropout"):
        NDLightNet.from_pretrained(tmp_path, dropouts=0.5)
    with pytest.raises(ValueError) as caught:
        NDLightNet.from_pretrained(tmp_path, patch_size=(2, 4), depth=1)
    message = str(caught.value)
    assert "\n" not in message and "missing" not in message and len(message) < 600
    assert "other shapes: embed.proj.weight (found (16, 4), expected (16, 8))" in message
    assert "unexpected: blocks.1." in message and " and " in message


def test_a_head_of_the_same_shape_is_kept(tmp_path):
    """1000 classes, by default and as an argument."""
    net = image(num_classes=None)
    net.save_pretrained(tmp_path)
    assert torch.equal(NDLightNet.from_pretrained(tmp_path, num_classes=1000).head.weight, net.head.weight)


def test_other_input_channels(tmp_path):
    """By either name of the argument, as timm adapts them."""
    image(in_chans=3).eval().save_pretrained(tmp_path)
    net = NDLightNet.from_pretrained(tmp_path)
    x = torch.randn(1, 1, 6, 6)
    for name in ("in_chans", "in_channels"):
        one = NDLightNet.from_pretrained(tmp_path, **{name: 1})
        torch.testing.assert_close(one(x), net(x.expand(1, 3, 6, 6)))
    three = unet().eval()
    three.save_pretrained(tmp_path / "unet")
    one = NDLightUNet.from_pretrained(tmp_path / "unet", in_chans=1)
    torch.testing.assert_close(one(x), three(x.expand(1, 3, 6, 6)))


def test_what_does_not_fit_is_named():
    net = image()
    state = net.state_dict()
    state["more"] = state.pop("norm.weight")
    with pytest.raises(ValueError, match=r"^here: .*; missing: norm.weight; unexpected: more$"):
        load_weights(net, state, "here")
    load_weights(net, net.state_dict(), "here")


def test_files_that_are_not_ours(tmp_path):
    with pytest.raises(FileNotFoundError, match="a/b/c: no such folder, and no name of a repo"):
        NDLightNet.from_pretrained("a/b/c")
    with pytest.raises(FileNotFoundError, match=r"has no config\.json"):
        NDLightNet.from_pretrained(tmp_path)
    image().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="holds a NDLightNet, expected a NDLightUNet"):
        NDLightUNet.from_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    for mixer in ("os.system", {"os.system": {}}, {"class_path": "os.system"}):
        (tmp_path / "config.json").write_text(json.dumps({**config, "mixer": mixer}))
        with pytest.raises(ValueError, match=r"mixer='os.system': .*expected one of"):
            NDLightNet.from_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8-sig")
    NDLightNet.from_pretrained(tmp_path)  # as an editor may have saved it, with a byte order mark
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config.json: not JSON"):
        NDLightNet.from_pretrained(tmp_path)


class Mine(mixers.Identity):
    """A mixer that ndlightnet does not know."""


def test_a_mixer_of_ones_own_has_to_be_given(tmp_path):
    net = image(mixer=[Mine, "TNL"])
    net.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"mixer was .*Mine, which is not of ndlightnet; expected"):
        NDLightNet.from_pretrained(tmp_path)
    loaded = NDLightNet.from_pretrained(tmp_path, mixer=[Mine, "TNL"])
    x = torch.randn(1, 1, 6, 6)
    assert torch.equal(net.eval()(x), loaded(x))


def test_the_card_says_what_was_given_and_stays(tmp_path):
    image().save_pretrained(tmp_path)
    card = tmp_path / "README.md"
    assert "Not stated" in card.read_text()
    image().save_pretrained(tmp_path, license="apache-2.0", data=["user/scans", "my own scans"], metrics={"f1": 0.5})
    _, head, body = card.read_text().split("---\n", 2)
    data = yaml.safe_load(head)
    assert data["library_name"] == "ndlightnet" and data["license"] == "apache-2.0"
    assert data["pipeline_tag"] == "image-classification" and "arxiv:2405.21022" in data["tags"]
    assert data["datasets"] == ["user/scans"] and data["metrics"] == ["f1"]
    assert "my own scans" in body and "| f1 | 0.5 |" in body
    card.write_text("mine")
    image().save_pretrained(tmp_path)
    assert card.read_text() == "mine"
    hub = pytest.importorskip("huggingface_hub")
    assert hub.ModelCard(f"---\n{head}---\n{body}").data.library_name == "ndlightnet"


def test_push_to_hub(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    calls = {}

    class Api:
        def __init__(self, token=None) -> None:
            calls["token"] = token

        def create_repo(self, **options):
            calls["create"] = options
            return SimpleNamespace(repo_id=options["repo_id"])

        def upload_folder(self, *, folder_path, **options) -> str:
            calls["upload"] = options
            calls["files"] = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
            return "https://huggingface.co/user/x/commit/1"

    monkeypatch.setattr(hub, "HfApi", Api)
    url = image().push_to_hub("user/x", private=True, token="T", license="mit", revision="v1")
    assert url.endswith("/commit/1") and calls["token"] == "T"
    assert calls["create"] == {"repo_id": "user/x", "private": True, "exist_ok": True}
    assert calls["upload"]["revision"] == "v1" and calls["upload"]["repo_id"] == "user/x"
    assert calls["files"].keys() == {"config.json", "model.safetensors", "README.md"}
    assert b'from_pretrained("user/x")' in calls["files"]["README.md"]


def test_a_repository_is_downloaded(tmp_path, monkeypatch):
    hub = pytest.importorskip("huggingface_hub")
    image().save_pretrained(tmp_path)
    calls = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: calls.append((name, options)) or tmp_path)
    NDLightNet.from_pretrained("user/x", revision="v1", token="T", local_files_only=True)
    ((name, options),) = calls
    assert name == "user/x" and options["revision"] == "v1" and options["token"] == "T" and options["local_files_only"]
    assert options["allow_patterns"] == ["config.json", "model.safetensors"]


def test_a_failed_save_keeps_what_was_there(tmp_path, monkeypatch):
    image().save_pretrained(tmp_path)
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir()}

    def fails(weights, path, metadata) -> None:
        Path(path).write_bytes(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(safetensors, "save_file", fails)
    with pytest.raises(OSError, match="No space"):
        image().save_pretrained(tmp_path)
    assert {p.name: p.read_bytes() for p in tmp_path.iterdir()} == before


def test_a_missing_package_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors", None)
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    with pytest.raises(ImportError, match="safetensors is needed here: pip install safetensors"):
        image().save_pretrained(tmp_path)

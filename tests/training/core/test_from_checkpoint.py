"""The network of a training, from its checkpoint alone, with the weights that it averaged."""

import pytest
import torch

from ndlightnet import NDLightNet, NDLightUNet, mixers
from tests.training.conftest import last


@pytest.mark.slow
@pytest.mark.parametrize("averaged", [True, False])
def test_the_network_of_a_training(recognise, write_stripes, averaged, tmp_path):
    words = ["--trainer.max_epochs=2", *["--trainer.callbacks=ndlightnet.training.AveragedWeights"] * averaged]
    mixer = ["TNL", {"class_path": "ndlightnet.nn.mixers.LAVO", "init_args": {"window": 3}}]
    places = {"root": write_stripes(tmp_path / "data", 4, 1), "out": tmp_path / "out", "data": {"batch_size": 4}}
    recognise("fit", *words, **places, net={"depth": 2, "mixer": mixer}).well()
    path = last(tmp_path / "out")
    saved = torch.load(path, weights_only=True)
    net = NDLightNet.from_checkpoint(path)
    assert not net.training and net.num_classes == 3
    assert [type(block.mixer) for block in net.blocks] == [mixers.TNL, mixers.LAVO]
    assert net.config["mixer"][1]["LAVO"]["window"] == 3
    for key, x in net.state_dict().items():
        assert torch.equal(x, saved["state_dict"][f"net.{key}"])
    assert ("current_model_state" in saved) == averaged
    if averaged:
        assert not torch.equal(net.head.weight, saved["current_model_state"]["net.head.weight"])
    with pytest.warns(UserWarning, match="num_classes=5, saved with 3"):
        assert NDLightNet.from_checkpoint(path, num_classes=5).head.out_features == 5
    with pytest.raises(ValueError, match=r"last.ckpt: holds a NDLightNet, expected a NDLightUNet"):
        NDLightUNet.from_checkpoint(path)
    net.save_pretrained(tmp_path / "hub")
    x = torch.randn(1, 3, 8, 8)
    assert torch.equal(NDLightNet.from_pretrained(tmp_path / "hub")(x), net(x))


def test_what_is_no_checkpoint(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"x\.ckpt: no such checkpoint"):
        NDLightNet.from_checkpoint(tmp_path / "x.ckpt")
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "last.ckpt").write_text("")
    for name, line in (("run", "run: a folder"), ("run/x.ckpt", r"x\.ckpt: no such checkpoint")):
        with pytest.raises(FileNotFoundError, match=rf"{line}, expected .*run/last\.ckpt"):
            NDLightNet.from_checkpoint(tmp_path / name)
    for content in ({"a": 1}, {"state_dict": 3}, [1]):
        torch.save(content, tmp_path / "x.ckpt")
        with pytest.raises(ValueError, match=r"x\.ckpt: not a checkpoint of `ndlightnet"):
            NDLightNet.from_checkpoint(tmp_path / "x.ckpt")
    torch.save({"state_dict": {"loss.weight": torch.zeros(1)}}, tmp_path / "x.ckpt")
    with pytest.raises(ValueError, match="holds no weights of a network"):
        NDLightNet.from_checkpoint(tmp_path / "x.ckpt")

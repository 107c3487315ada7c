"""The config of a bundle, as `plan` or a person writes it: MONAI builds the network of it."""

import json

import pytest
import torch
from monai.bundle import ConfigParser

from ndlightnet.training import SegmentationTask, VolumeData
from ndlightnet.training.segmentation import bundle as bundles

PLAN = """
trainer: {{accelerator: cpu, default_root_dir: {out}}}
model:
  net:
    class_path: ndlightnet.NDLightUNet
    init_args: {{dims: 3, in_channels: 1, out_channels: 2, widths: [4, 8], convs: [1, 1],
                depths: [1, 2]{mixer}}}
data:
  class_path: ndlightnet.training.VolumeData
  init_args: {{root: none, patch: [8, 8, 8]}}
"""


@pytest.mark.parametrize(
    "mixer",
    [
        None,
        "GLA",
        "ndlightnet.nn.mixers.published_mixer",
        "{class_path: ndlightnet.nn.mixers.GLA, init_args: {scan: axes}}",
        "[GLA, ndlightnet.nn.mixers.S5, {class_path: ndlightnet.nn.mixers.Identity}]",
    ],
)
def test_monai_builds_the_same_network(mixer, tmp_path):
    """The default is a class. People write a name, a dotted name of a class or a function, a class with arguments,
    or a list of these."""
    mixer = "" if mixer is None else f", mixer: {mixer}"
    (tmp_path / "plan.yaml").write_text(PLAN.format(out=tmp_path, mixer=mixer))
    files = {"config": "plan.yaml", "ckpt_path": "best.ckpt", "out": "name"}
    arguments = [f"--{name}={tmp_path / file}" for name, file in files.items()]
    cli = bundles.BundleCLI(SegmentationTask, VolumeData, args=arguments, run=False)
    names = {"labels": ["background", "x"], "modalities": ["CT"]}
    torch.save({"state_dict": cli.model.state_dict(), "names": names}, tmp_path / "best.ckpt")
    definition, weights = bundles._network(cli, [str(tmp_path / "best.ckpt")])
    net = ConfigParser({"net": json.loads(json.dumps(definition))}).get_parsed_content("net")
    net.eval().load_state_dict(weights)
    assert net.config == cli.model.net.config
    x = torch.randn(1, 1, 8, 8, 8)
    assert torch.equal(net(x), cli.model.net.eval()(x))


def test_a_wrong_option_is_one_line(capsys):
    with pytest.raises(SystemExit, match="2"):
        bundles.bundle(["--model.net=ndlightnet.NDLightUNet", "--outt=bundles/name"])
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: ") and "--outt" in line

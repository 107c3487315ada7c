"""What the tests of generation share: a tiny config, an autoencoder, weights of Inception v3."""

from pathlib import Path

import pytest
import torch
from torch import nn

TINY = """
seed_everything: 0
trainer:
  accelerator: cpu
  max_epochs: 2
  log_every_n_steps: 1
  enable_progress_bar: false
  callbacks:
    - class_path: ndlightnet.training.AveragedWeights
      init_args: {decay: 0.9, warmup: true}
model:
  sampling_steps: 3
  samples: 6
  net:
    class_path: ndlightnet.NDLightDiT
    init_args: {dims: 2, in_chans: 1, num_classes: 2, embed_dim: 16, depth: 1, tpe_states: 4}
data:
  class_path: ndlightnet.training.ImageData
  init_args: {root: nowhere, batch_size: 8}
"""


def save_autoencoder(folder: Path, latent_channels: int = 2) -> Path:
    from diffusers import AutoencoderKL

    torch.manual_seed(0)
    blocks = {"down_block_types": ["DownEncoderBlock2D"] * 2, "up_block_types": ["UpDecoderBlock2D"] * 2}
    blocks |= {"block_out_channels": [4] * 2, "norm_num_groups": 4, "scaling_factor": 0.5, "shift_factor": 0.25}
    net = AutoencoderKL(in_channels=1, out_channels=1, latent_channels=latent_channels, sample_size=8, **blocks)
    net.save_pretrained(folder)
    return folder


@pytest.fixture
def autoencoder(tmp_path) -> Path:
    return save_autoencoder(tmp_path / "vae")


@pytest.fixture(scope="session")
def inception_weights(tmp_path_factory):
    """A file of random weights of Inception v3, whose logits differ from image to image."""
    module = pytest.importorskip("torch_fidelity.feature_extractor_inceptionv3")
    network = module.FeatureExtractorInceptionV3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_state_dict_from_url", lambda *_, **__: {})
        patch.setattr(network, "load_state_dict", lambda *_: None)
        torch.manual_seed(0)
        net = network("random", ["logits"])
    for name, weight in net.state_dict().items():
        if name.endswith("conv.weight"):
            nn.init.kaiming_normal_(weight, nonlinearity="relu")
    net.fc.weight.mul_(200)
    path = tmp_path_factory.mktemp("inception") / "weights.pth"
    torch.save(net.state_dict(), path)
    return path

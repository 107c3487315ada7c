"""Training with a CUDA graph of its forward and one of its backward; on a CPU they are called instead of replayed."""

from types import SimpleNamespace

import pytest
import torch
import yaml
from torch import nn

from ndlightnet.training import TextData, TextTask, run
from ndlightnet.training.core import captured_call
from ndlightnet.training.core.captured_call import CapturedCall
from ndlightnet.training.core.costs import Meter


@pytest.fixture(autouse=True)
def called_instead(request, monkeypatch):
    def capture(call, warm_up, device, before=None):
        for _ in range(3):
            warm_up()
        call()
        return SimpleNamespace(replay=torch.enable_grad()(call)), None

    if request.node.get_closest_marker("gpu") is None:
        monkeypatch.setattr(captured_call, "capture", capture)


on_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="expected a GPU")]
devices = pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=on_gpu)])


class Net(nn.Module):
    """Two outputs, one that needs no gradient; a frozen layer and one that is not called."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.unused = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(2, 2)
        self.frozen = nn.Linear(3, 3).requires_grad_(False)

    def forward(self, x):
        hidden = self.first(self.frozen(x)).tanh()
        return [self.second(hidden), {"hidden": hidden, "sizes": x.sum(1)}]


def loss_of(outputs, x):
    y, named = outputs
    assert not named["sizes"].requires_grad and torch.equal(named["sizes"], x.sum(1))
    return y.square().mean() + named["hidden"].mean()


def gradients(net, call, batches):
    for x in batches:
        loss = loss_of(call(x), x)
        loss.backward()
        yield [loss.detach(), *(None if p.grad is None else p.grad.clone() for p in net.parameters())]


@devices
def test_gradients_are_those_of_the_module(device):
    net, batches = Net().to(device), torch.randn(3, 5, 3, device=device)
    replays = CapturedCall(net, net, [torch.zeros(5, 3, device=device)])
    assert all(p.grad is None for p in net.parameters())
    net.unused.weight.grad = torch.ones(2, 2, device=device)  # of an earlier batch that was not replayed
    ours = list(gradients(net, replays, batches))  # each overwrites those of the batch before
    for mine, x in zip(ours, batches, strict=True):
        net.zero_grad()
        (expected,) = gradients(net, net, [x])
        assert [a is None for a in mine] == [b is None for b in expected]
        torch.testing.assert_close([a for a in mine if a is not None], [b for b in expected if b is not None])


@devices
def test_random_numbers_and_the_dtype_of_autocast(device):
    """Each replay draws anew; the backward is not under autocast, as without a graph."""
    net, kinds = nn.Sequential(nn.Linear(64, 64), nn.Dropout(0.5)).to(device), []
    net[0].weight.register_hook(lambda _: kinds.append(torch.is_autocast_enabled(device)))

    def call(x):
        with torch.autocast(device, torch.bfloat16, cache_enabled=False):
            return net(x)

    replays, x = CapturedCall(net, call, [torch.zeros(8, 64, device=device)]), torch.ones(8, 64, device=device)
    first, second = replays(x).clone(), replays(x).clone()
    assert first.dtype == torch.bfloat16 and not torch.equal(first == 0, second == 0)
    replays(x).sum().backward()
    assert net[0].weight.grad.dtype == torch.float32 and kinds and not any(kinds)


@devices
def test_gradients_lie_as_their_parameters_do(device):
    """And begin where kernels read several numbers at once."""
    net = nn.Sequential(nn.Conv2d(3, 5, 3), nn.Conv2d(5, 4, 3)).to(device, memory_format=torch.channels_last)
    replays = CapturedCall(net, net, [torch.zeros(2, 3, 8, 8, device=device)])
    replays(torch.ones(2, 3, 8, 8, device=device)).sum().backward()
    for p in net.parameters():
        assert p.grad.stride() == p.stride() and p.grad.data_ptr() % 16 == 0
    assert net[0].weight.grad.abs().min() > 0


@devices
@pytest.mark.parametrize("norm", [0.1, 100.0])
def test_clipping(device, norm):
    """Of parameters of two dtypes."""
    net, x = Net().to(device), torch.randn(5, 3, device=device)
    net.second.double()

    def call(x):
        hidden = net.first(x)
        return [net.second(hidden.double()), {"hidden": hidden, "sizes": x.sum(1)}]

    replays = CapturedCall(net, call, [torch.zeros(5, 3, device=device)])
    loss_of(replays(x), x).backward()
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    expected = [g.clone() for g in grads]
    replays.clip(norm)
    copies = [nn.Parameter(torch.zeros_like(g)) for g in expected]
    for p, g in zip(copies, expected, strict=True):
        p.grad = g
    before = nn.utils.clip_grad_norm_(copies, norm)
    assert (before > norm) == (norm < 1) and len(grads) == 4
    torch.testing.assert_close(grads, expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="expected a GPU")
def test_memory_of_activations():
    """They are what the same call takes without a graph, above its inputs, outputs and gradients."""
    layers = [layer for _ in range(4) for layer in (nn.Linear(512, 512), nn.GELU())]
    net, x = nn.Sequential(*layers).cuda(), torch.randn(2**15, 512, device="cuda")
    replays, meter = CapturedCall(net, net, [x]), Meter(x.device)
    y = net(x)
    dout = torch.zeros_like(y)
    y.backward(dout)
    expected = meter.read()[1] - torch.cuda.memory_allocated()
    # what both keep: of 4 layers the input of GELU, of 3 its output; besides a gradient, of a layer or of a weight
    assert expected > 7 * x.nbytes and abs(replays.activations - expected) < x.nbytes / 2


class Uneven(TextTask):
    """Its second batch is smaller, its fourth has no loss."""

    def training_step(self, batch, number):
        return super().training_step(batch[:4] if number == 1 else batch, number) if number < 3 else None


class Replayed(Uneven):
    def on_fit_start(self):
        super().on_fit_start()
        self._capture(self.example_inputs())
        self.which = []

    def on_before_optimizer_step(self, optimizer):
        self.which.append(self.replayed)

    def on_fit_end(self):
        assert self.which == [True, False, True, False] * 2
        super().on_fit_end()
        assert self.captured is None


CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, gradient_clip_val: 0.3, precision: bf16-mixed, log_every_n_steps: 1,
          enable_progress_bar: false, enable_model_summary: false}
model:
  cuda_graph: true
  net: {class_path: ndlightnet.NDLightNet, init_args: {dims: 1, vocab_size: 256, causal: true, embed_dim: 16, depth: 1}}
data:
  class_path: ndlightnet.training.TextData
  init_args: {length: 16, windows: 32, batch_size: 8, lengths: [32], test_tokens: 64, workers: 0}
"""


def test_a_training_of_which_some_batches_are_smaller(tmp_path, capsys):
    (tmp_path / "text").write_bytes(bytes(range(256)) * 8)
    weights = []
    for task in (Uneven, Replayed):
        config = yaml.safe_load(CONFIG)
        config["trainer"]["default_root_dir"] = str(tmp_path / task.__name__)
        config["data"]["init_args"]["root"] = str(tmp_path / "text")
        file = tmp_path / "config.yaml"
        file.write_text(yaml.safe_dump(config))
        assert run(task, TextData, file, arguments=["fit", "--config", str(file)]) == 0
        saved = torch.load(tmp_path / task.__name__ / "checkpoints" / "last.ckpt", weights_only=True)
        weights.append(saved["state_dict"])
    assert "a batch of [(4, 17)] runs without the graph, which is of [(8, 17)]" in capsys.readouterr().err
    torch.testing.assert_close(*weights)

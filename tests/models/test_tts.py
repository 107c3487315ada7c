"""Text to speech: the search of durations, samples with padding, synthesis against the network, losses, alignments."""

from itertools import combinations

import pytest
import torch

from ndlightnet.models import AutoregressiveTTS, ParallelTTS
from ndlightnet.models.tts import letters_of_frames, search_durations
from ndlightnet.nn import mixers

SMALL = {"embed_dim": 16, "depth": 1, "decoder_depth": 2, "tpe_states": 4}
MASK = torch.arange(6) < torch.tensor([[6], [4]])
FRAMES = torch.arange(19) < torch.tensor([[19], [13]])
each_network = pytest.mark.parametrize("make", [AutoregressiveTTS, ParallelTTS])


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(11, (2, 6)), torch.randn(2, 19, 5).double()


@pytest.mark.parametrize("letters, frames", [(1, 1), (1, 5), (4, 4), (3, 7), (4, 9)])
def test_the_search_is_the_best_of_all_divisions(letters, frames):
    means, spectra = torch.randn(letters, 2), torch.randn(frames, 2)

    def cost(cuts: tuple[int, ...]) -> float:
        edges = (0, *cuts, frames)
        return sum(float((spectra[edges[n] : edges[n + 1]] - means[n]).square().sum()) for n in range(letters))

    best = min(combinations(range(1, frames), letters - 1), key=cost)
    expected = torch.tensor((0, *best, frames)).diff()
    assert search_durations(means[None], spectra[None], None, None)[0].tolist() == expected.tolist()


def test_the_search_does_not_see_padding():
    means, spectra = torch.randn(2, 6, 5), torch.randn(2, 19, 5)
    durations = search_durations(means, spectra, MASK, FRAMES)
    assert durations.sum(1).tolist() == [19, 13] and durations[1, 4:].tolist() == [0, 0]
    assert torch.equal(durations[1:, :4], search_durations(means[1:, :4], spectra[1:, :13], None, None))
    assert letters_of_frames(torch.tensor([[2, 0, 1]]), 5).tolist() == [[0, 0, 2, 2, 2]]
    with pytest.raises(ValueError, match="sample 1 has 3 frames, expected one or more of each of its 4 letters"):
        search_durations(means, spectra, MASK, FRAMES & (torch.arange(19) < torch.tensor([[19], [3]])))


@each_network
@pytest.mark.parametrize("mixer", ["LightNetAttention", "SoftmaxAttention", "LAVO"])
def test_a_sample_of_a_batch_is_what_it_is_alone(make, mixer, close):
    text, spectra = inputs()
    net = make(11, 5, mixer=mixer, **SMALL).double().eval()
    batch, alone = net(text, spectra, MASK, FRAMES), net(text[1:, :4], spectra[1:, :13])
    close(batch.spectra[1:, :13], alone.spectra, 1e-9)
    losses, single = net.losses(batch, spectra, MASK, FRAMES), []
    for words, frames, row in ((6, 19, 0), (4, 13, 1)):
        sample = text[row : row + 1, :words], spectra[row : row + 1, :frames]
        full = torch.ones(1, words, dtype=torch.bool), torch.ones(1, frames, dtype=torch.bool)
        single.append(net.losses(net(*sample), sample[1], *full))
    counts = {"stop_loss": (5, 4), "duration_loss": (6, 4)}  # steps, letters; the others are of frames
    for name, loss in losses.items():
        first, second = counts.get(name, (19, 13))
        mean = (first * single[0][name] + second * single[1][name]) / (first + second)
        assert loss.item() == pytest.approx(mean.item(), rel=1e-6), name
    y, lengths = net.synthesize(text, 40, MASK)
    z, length = net.synthesize(text[1:, :4], 40)
    assert lengths[1] == length[0] and lengths.max() == y.shape[1] <= 40
    close(y[1:, : int(length)], z, 1e-9)


@pytest.mark.parametrize("mixer", ["LightNetAttention", "LinearAttention", "GLA", "SoftmaxAttention"])
def test_steps_are_those_of_all_at_once(mixer, close):
    """The network reads its own frames as if they were recorded."""
    text = torch.randint(11, (2, 6))
    net = AutoregressiveTTS(11, 5, frames_per_step=3, decoder_mixer=mixer, **SMALL).double().eval()
    with torch.no_grad():
        net.head.bias[-1] = -100.0  # it never ends
    y, lengths = net.synthesize(text, 20)
    assert y.shape == (2, 20, 5) and lengths.tolist() == [20, 20]
    close(net(text, y).spectra, y, 1e-9)


def test_gradients_of_a_deep_network_are_numbers():
    """A first token of zeros made them overflow: each norm of zeros multiplies by 1,000."""
    net = AutoregressiveTTS(11, 5, **SMALL | {"decoder_depth": 8})
    net(torch.randint(11, (2, 6)), torch.randn(2, 19, 5)).spectra.sum().backward()
    assert max(float(p.grad.abs().max()) for p in net.parameters() if p.grad is not None) < 1e4


def test_a_synthesis_ends_where_the_network_says():
    net = AutoregressiveTTS(11, 5, **SMALL).eval()
    with torch.no_grad():
        net.head.bias[-1] = 100.0
    y, lengths = net.synthesize(torch.randint(11, (2, 6)), 50)
    assert y.shape == (2, 4, 5) and lengths.tolist() == [4, 4]
    with pytest.raises(ValueError, match="most=0"):
        net.synthesize(torch.randint(11, (2, 6)), 0)


def test_the_last_step_is_the_end():
    """Of 19 frames in steps of 4 the fifth, of 13 the fourth."""
    net, spectra = AutoregressiveTTS(11, 5, **SMALL), torch.randn(2, 19, 5)
    stop = torch.full((2, 5), -9.0)
    stop[0, 4] = stop[1, 3] = 9.0
    predicted = net(torch.randint(11, (2, 6)), spectra, MASK, FRAMES)._replace(stop=stop)
    assert net.losses(predicted, spectra, MASK, FRAMES)["stop_loss"] < 1e-3
    late = predicted._replace(stop=stop.roll(1, 1))
    assert net.losses(late, spectra, MASK, FRAMES)["stop_loss"] > 3


def test_losses_of_durations_and_means():
    net, text, spectra = ParallelTTS(11, 5, **SMALL), torch.randint(11, (2, 6)), torch.randn(2, 19, 5)
    predicted = net(text, spectra, MASK, FRAMES)
    durations = torch.tensor([[4, 3, 3, 3, 3, 3], [5, 2, 3, 3, 0, 0]])
    exact = predicted._replace(durations=durations, log_durations=(1.0 + durations).log())
    letters = letters_of_frames(durations, 19)
    means = torch.stack([means[letter] for means, letter in zip(predicted.means, letters, strict=True)])
    losses = net.losses(exact, spectra, MASK, FRAMES)
    assert losses["duration_loss"] < 1e-12
    expected = ((means - spectra).square().mean(-1) / 2)[FRAMES].mean()
    assert losses["mean_loss"].item() == pytest.approx(expected.item(), rel=1e-5)
    wrong = exact._replace(log_durations=exact.log_durations + 0.5 * MASK)
    assert net.losses(wrong, spectra, MASK, FRAMES)["duration_loss"].item() == pytest.approx(0.25, rel=1e-5)
    net.losses(predicted, spectra, MASK, FRAMES)["duration_loss"].backward()
    assert all(p.grad is None for p in net.encoder.parameters()) and net.duration[0].weight.grad.any()


def test_durations_of_a_synthesis():
    """Rounded, one or more, cut off at the most frames."""
    net = ParallelTTS(11, 5, **SMALL).eval()
    with torch.no_grad():
        net.duration[2].weight.zero_()
        net.duration[2].bias.fill_(4.4).log_()  # 3.4 frames a letter
    text = torch.randint(11, (2, 6))
    assert net.synthesize(text, 100, MASK)[1].tolist() == [18, 12]
    y, lengths = net.synthesize(text, 16, MASK)
    assert lengths.tolist() == [16, 12] and y.shape[1] == 16
    with torch.no_grad():
        net.duration[2].bias.fill_(-5.0)
    assert net.synthesize(text, 100, MASK)[1].tolist() == [6, 4]


@each_network
def test_an_alignment_has_shares_of_letters(make, close):
    text, spectra = inputs()
    net = make(11, 5, **SMALL).double().eval()
    shares = net.alignment(text, spectra, MASK, FRAMES)
    assert shares.shape == (2, 19 if make is ParallelTTS else 5, 6) and (shares >= 0).all()
    read = shares.sum(-1)
    close(read, torch.ones_like(read), 1e-9)
    assert not shares[1, :3, 4:].any()


def test_a_step_depends_on_letters_as_far_as_changes_of_them_show(close):
    """The squared length of a gradient is, in the mean over combinations of the frames, that of the whole Jacobian."""
    torch.manual_seed(0)
    text, spectra = inputs()
    net = AutoregressiveTTS(11, 5, **SMALL).double().eval()
    context = net.encode(text[:1]).detach()
    jacobian = torch.autograd.functional.jacobian(
        lambda x: net._decoded(spectra[:1], x, None).spectra[0, 8:12], context
    )
    lengths = jacobian.square().sum((0, 1, 2, 4)).sqrt()  # of the third step, by letters
    draws = net.alignment(text[:1].expand(400, -1), spectra[:1].expand(400, -1, -1))[:, 2]  # each of its own weights
    expected = lengths / lengths.sum()
    assert (draws.mean(0) - expected).abs().max() < 0.1 * expected.max()


@each_network
@pytest.mark.parametrize(
    "spectra, message",
    [
        (torch.randn(2, 19, 4), r"spectra \(2, 19, 4\) torch.float32: expected floats \(2, frames, bands=5\)"),
        (torch.randn(1, 19, 5), r"spectra \(1, 19, 5\)"),
        (torch.randn(2, 0, 5), r"spectra \(2, 0, 5\) torch.float32: expected .*, one frame or more"),
        (torch.randn(2, 5), r"spectra \(2, 5\)"),
        (torch.ones(2, 19, 5, dtype=torch.int64), "torch.int64: expected floats"),
    ],
)
def test_wrong_spectra(make, spectra, message):
    with pytest.raises(ValueError, match=message):
        make(11, 5, **SMALL)(torch.randint(11, (2, 6)), spectra)


def test_wrong_arguments():
    with pytest.raises(ValueError, match="bands=0"):
        ParallelTTS(11, 0)
    with pytest.raises(ValueError, match="frames_per_step=0"):
        AutoregressiveTTS(11, 5, 0)
    with pytest.raises(ValueError, match="decoder_mixer=None: expected one beside a list"):
        ParallelTTS(11, 5, mixer=[mixers.LightNetAttention], depth=1)

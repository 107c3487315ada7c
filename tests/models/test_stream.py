"""Streams: a causal network frame by frame is the network on the whole clip."""

import io
import itertools
from functools import partial

import pytest
import torch
from torch.utils._pytree import tree_leaves

from ndlightnet import Identity, LightNetAttention, NDLightNet
from ndlightnet.models.stream import Stream
from ndlightnet.nn import mixers

attention = partial(LightNetAttention, heads=2)
tiny = partial(NDLightNet, in_chans=2, num_classes=5, embed_dim=16, depth=2, tpe_states=4, causal=True)


def clip(*size, batch=2):
    return torch.randn(batch, 2, *size, dtype=torch.float64)


def video(mixer=attention, patch_size=(2, 2, 2), **options):
    return tiny(3, patch_size=patch_size, mixer=mixer, **options).double().eval()


def text(**options):
    options = {"embed_dim": 16, "depth": 2, "tpe_states": 4, "mixer": attention} | options
    return NDLightNet(1, vocab_size=50, causal=True, **options).double().eval()


# size of the clip, patch, options
NETWORKS = {
    "signal": ((11,), 1, {}),
    "signal in patches": ((11,), 4, {"mixer": partial(attention, window=2)}),
    "picture by rows": ((7, 5), (2, 3), {}),
    "picture, window": ((7, 5), (1, 2), {"mixer": partial(attention, window=3)}),
    "video": ((6, 4, 3), (1, 2, 2), {}),
    "video in patches": ((9, 4, 5), (4, 2, 2), {}),
    "video, window": ((9, 4, 3), (2, 2, 2), {"mixer": partial(attention, window=2)}),
    "video, single frames": ((6, 4, 3), (1, 2, 2), {"mixer": partial(attention, window=1)}),
    "video that fades": ((6, 4, 3), (2, 2, 3), {"mixer": partial(attention, forget=0.3)}),
    "text mixer": ((23,), 1, {"mixer": partial(mixers.text_mixer, window=5), "embed_dim": 128, "depth": 3}),
    "no mixer": ((6, 4, 3), (2, 2, 3), {"mixer": Identity}),
    "no position": ((6, 4), 2, {"mixer": partial(attention, lrpe=None), "tpe": False}),
    "the paper's one way": ((6, 4), 2, {"tpe": "published"}),
}
networks = pytest.mark.parametrize("name", NETWORKS)


def network(name):
    size, patch, options = NETWORKS[name]
    model = tiny(len(size), patch_size=patch, **{"mixer": attention, **options}).double().eval()
    return model, clip(*size), model.embed.patch[0]


def pieces(x, sizes):
    """Frames in pieces of these sizes, again and again."""
    sizes, at = itertools.cycle(sizes), 0
    while at < x.shape[2]:
        n = next(sizes)
        yield x[:, :, at : at + n]
        at += n


@pytest.mark.slow
@networks
@pytest.mark.parametrize("sizes", [(1,), (2, 3, 1), (5, 0, 1), (100,)], ids=str)
def test_chunks_of_any_size_are_the_whole_clip(close, name, sizes):
    """So later frames change nothing. After each piece the prediction is that of the patches that are full; `finish`
    fills the last one with zeros, as the network does."""
    (model, x, patch), frames, features = network(name), 0, []
    stream = model.stream(2)
    with torch.no_grad():
        expected = model.forward_features(x)
        for piece in pieces(x, sizes):
            frames += piece.shape[2]
            features.append(stream.features(piece))
            if full := frames // patch:
                close(stream.prediction(), model.forward_head(expected[:, :full]), 1e-10)
        close(torch.cat(features, 1), expected[:, : frames // patch], 1e-10)
        close(stream.finish(), model(x), 1e-10)
        fresh = model.stream(2)(x)
    assert torch.equal(stream(x), fresh) and not stream(x[:, :, :1]).requires_grad


@pytest.mark.slow
@pytest.mark.parametrize("mixer", [attention, partial(attention, window=2, forget=0.1), Identity])
def test_streams_start_pause_finish_and_reset_when_they_like(close, mixer):
    """Each is what its own frames make of it, whatever the others do. Frames that are given to a
    stream that is held do not count."""
    model, x = video(mixer), clip(40, 4, 3, batch=3)
    stream = model.stream(3)
    first, since = [0, 0, 0], [0, 0, 0]  # frame at which a stream began, frames since then
    plan = "1 100,3 110,2 011,1 111,4 101,finish 010,1 110,3 011,reset 100,2 111,5 100,"
    plan += "finish 101,1 111,3 111"  # how many frames, or what, and to which streams

    def expected(row, last):
        clip = x[row : row + 1, :, first[row] : first[row] + last]
        return model(clip).detach()[0] if last else model.head(torch.zeros(16).double()).detach()

    for what, flags in map(str.split, plan.split(",")):
        active = [flag == "1" for flag in flags]
        if what.isdigit():
            n = int(what)
            frames = clip(n, 4, 3, batch=3) * torch.nan
            for row in (row for row in range(3) if active[row]):
                at = first[row] + since[row]
                frames[row], since[row] = x[row, :, at : at + n], since[row] + n
            prediction = stream(frames, torch.tensor(active) if n == 3 else active)
        elif what == "finish":
            prediction = stream.finish(active)
        else:
            stream.reset(active)
            prediction = stream.prediction()
        for row in range(3):
            if active[row] and not what.isdigit():
                last = since[row] if what == "finish" else 0
                close(prediction[row], expected(row, last), 1e-10)
                first[row], since[row] = first[row] + since[row], 0
            else:
                close(prediction[row], expected(row, since[row] // 2 * 2), 1e-10)
    assert min(first) > 0 and stream.waiting == [n % 2 for n in since]


def saved(state):
    file = io.BytesIO()
    torch.save(state, file)
    return file


local = partial(mixers.WithLocal, local="both", radius=2)


@pytest.mark.parametrize(
    "mixer",
    [
        attention,
        partial(attention, window=3, forget=0.1),
        Identity,
        *(partial(local, mixer=name) for name in ("Identity", "LightNetAttention", "DeltaNet", "WindowAttention")),
        [attention, mixers.Mamba],
    ],
)
def test_a_saved_stream_goes_on_as_if_nothing_had_happened(mixer):
    """In the middle of a patch, with streams at different places."""
    model, x = video(mixer), clip(9, 4, 3)
    stream = model.stream(2)
    stream(x[:, :, :1], [True, False])
    stream(x[:, :, 1:5])
    state = stream.state_dict()
    file = saved(state)
    file.seek(0)
    loaded = model.stream(2)
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert loaded.waiting == stream.waiting == [1, 0]
    for now in (slice(5, 6), slice(6, 9)):
        assert torch.equal(loaded(x[:, :, now]), stream(x[:, :, now]))
    assert torch.equal(loaded.finish(), stream.finish())
    assert saved(state).getvalue() == file.getvalue()  # the frames that follow do not change it


def test_a_fresh_stream_can_be_saved(close):
    model, x = video(), clip(4, 4, 3)
    loaded = model.stream(2)
    loaded.load_state_dict(model.stream(2).state_dict())
    close(loaded(x), model(x).detach(), 1e-10)


@pytest.mark.parametrize("options", [{}, {"window": 3}], ids=str)
@pytest.mark.parametrize("chunk", [2, 12])
def test_what_is_remembered_does_not_grow(options, chunk):
    """Neither with time nor with the size of the chunks; from the first frames on."""
    model = video(partial(attention, **options))
    stream, sizes = model.stream(1), set()
    for x in clip(36, 8, 8, batch=1).split(chunk, 2):
        stream(x)
        sizes.add(len(saved(stream.state_dict()).getvalue()))
    alone = model.stream(1)
    alone(clip(2, 8, 8, batch=1))
    assert sizes == {len(saved(alone.state_dict()).getvalue())}


def test_a_text_word_by_word(close):
    """A prompt, single words, and some at once."""
    model, words = text(), torch.randint(50, (2, 30))
    stream, expected = model.stream(2), model(words).detach()
    logits = [stream(piece) for piece in words.split([7, 1, 1, 1, 5, 1, 14], 1)]
    close(torch.cat(logits, 1), expected, 1e-10)
    assert stream(words[:, :0]).shape == (2, 0, 50)
    # one text waits, the other goes on; their logits are those of its own words
    stream.reset([True, False])
    y = stream(words[:, :4], [True, False])
    close(y, expected[:1, :4], 1e-10)
    close(stream(words.roll(-4, 1)[:, :3], [True, False]), expected[:1, 4:7], 1e-10)


def test_a_text_is_classified_as_it_comes(close):
    model, words = text(num_classes=3), torch.randint(50, (2, 9))
    stream = model.stream(2)
    for piece in words.split([4, 1, 4], 1):
        y = stream(piece)
    close(y, model(words).detach(), 1e-10)
    close(stream.finish(), y, 0)


def test_gradients_pass_through_advance(close_grads):
    """`advance` itself is differentiable: truncated backpropagation is a choice of the caller."""
    model, x = video(), clip(8, 4, 3)
    state, features = model.init_state(2), []
    for piece in pieces(x, (3, 5)):
        y, state = model.advance(piece, state)
        features.append(y)
    expected = model.forward_features(x)
    weights = [p for name, p in model.named_parameters() if "head" not in name]
    close_grads(torch.cat(features, 1), expected, weights, 1e-6)  # MD-TPE's weights are float32


def test_streams_in_low_precision_are_close():
    """Bfloat16 autocast as in test_backbone.py; the sum of the features stays float32."""
    model, x = video().float(), clip(8, 4, 3).float()
    stream = model.stream(2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for piece in pieces(x, (1, 3)):
            y = stream(piece)
    assert stream.state.total.dtype == torch.float32
    assert all(x.dtype == torch.float32 for x in tree_leaves(stream.state.layers))
    expected = model(x)
    assert (y - expected).abs().max() < 30 * 2**-9 * expected.abs().max()


def test_nobody_active():
    model, x = video(), clip(3, 4, 3)
    stream = model.stream(2)
    y, none = stream(x), [False, False]
    assert torch.equal(stream(x, none), y) and torch.equal(stream.finish(none), y)
    stream.reset(none)
    assert torch.equal(stream.prediction(), y)
    assert stream.features(x, none).shape[0] == 0
    assert text().stream(2)(torch.zeros(2, 3, dtype=torch.long), none).shape[0] == 0


def test_errors_show_the_values():
    model, x = video(), clip(3, 4, 3)
    with pytest.raises(ValueError, match="batch_size=0"):
        model.stream(0)
    stream = model.stream(2)
    stream(x)
    for call in (stream, stream.features):
        with pytest.raises(ValueError, match=r"3 samples.* 2"):
            call(clip(3, 4, 3, batch=3))
        with pytest.raises(ValueError, match=r"3 flags.* 2"):
            call(x, [True, False, True])
        with pytest.raises(ValueError, match=r"in_chans=2"):
            call(x[:, :1])
        with pytest.raises(ValueError, match=r"\(4, 5\).*\(4, 3\)"):
            call(clip(3, 4, 5))
    with pytest.raises(ValueError, match=r"3 samples.* 2"):
        model.advance(clip(3, 4, 3, batch=3), model.init_state(2))
    stream(x[:, :, :1], [True, False])
    assert stream.waiting == [0, 1]
    with pytest.raises(ValueError, match=r"\[0, 1\].*\[0, 1\].*apart"):
        stream.features(x)
    assert isinstance(stream, Stream)
    for wrong in (model.stream(1), video(depth=1).stream(2)):
        wrong(x[: wrong.batch_size])
        with pytest.raises(ValueError, match=r"layers and \d streams: expected 2 and 2"):
            stream.load_state_dict(wrong.state_dict())


@pytest.mark.parametrize("active", [[True, True], [True, False]])
def test_a_reset_forgets_the_frames_that_wait_for_their_patch(close, active):
    """Patches are of two frames: after three frames one waits, and a reset stream begins without it."""
    model, x = video(), clip(5, 4, 4)
    stream = model.stream(2)
    stream(x[:, :, :3])
    stream.reset(active)
    prediction = stream(x[:, :, 3:], active)
    close(prediction[0], model(x[:1, :, 3:])[0].detach(), 1e-10)

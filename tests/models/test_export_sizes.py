"""Traced at one size and run at others: what the table of tests/doors has no row for."""

import io
from functools import partial
from importlib.util import find_spec

import pytest
import torch
from torch.export import Dim, ExportedProgram, export

from ndlightnet import MultiheadAttention, NDLightNet, NDLightUNet, mixers
from ndlightnet.nn.mixers.base import build_mixer
from ndlightnet.nn.mixers.recurrent import Recurrent

cells = partial(NDLightNet, in_chans=2, num_classes=5, patch_size=4, embed_dim=16, depth=1, tpe_states=8)
unet = partial(NDLightUNet, in_channels=2, out_channels=3, widths=(8, 16), depths=(0, 1))
# the network, the size it is traced at, and others: axes of fewer and of more than 64 tokens on
# either side, of sizes that patches and strides divide or not
local = partial(mixers.WithLocal, mixer=mixers.SoftmaxAttention, local="both")
NETS = {
    "local": (partial(cells, 2, mixer=local), (30, 41), [(8, 8), (30, 100), (57, 100), (40, 99)]),
    "unet1": (partial(unet, 1), (50,), [(8,), (63,), (130,), (1001,)]),
    "unet4": (partial(unet, 4), (5, 6, 7, 9), [(4, 4, 4, 4), (70, 4, 5, 6), (5, 66, 4, 7), (4, 6, 5, 67)]),
}
BEYOND = 2e-5  # roundings of 6e-8 that a few hundred operations grow; outputs are of order 1


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["unet1", *(pytest.param(name, marks=pytest.mark.exhaustive) for name in ("local", "unet4"))]
)
@torch.no_grad()
def test_export_is_the_network_at_any_size(name):
    make, space, others = NETS[name]
    model, x = make().eval(), torch.randn(2, 2, *space)
    shapes = {axis: Dim.DYNAMIC for axis in range(x.ndim) if axis != 1}
    run = export(model, (x,), dynamic_shapes=(shapes,)).module()
    for batch, space in zip((1, 3, 2, 1), others, strict=True):
        x = torch.randn(batch, 2, *space)
        actual, expected = run(x), model(x)
        assert actual.shape == expected.shape
        assert 0.05 < expected.abs().max() < 20
        assert (actual - expected).abs().max() < BEYOND, (batch, space)


EXHAUSTIVE = [pytest.param(size, marks=pytest.mark.exhaustive) for size in (Dim.AUTO, Dim.DYNAMIC(min=8, max=4096))]


@pytest.mark.slow
@pytest.mark.parametrize("size", [4 * Dim("n", max=1024), *EXHAUSTIVE])
def test_export_takes_what_the_docstring_says(size):
    model, x = cells(1).eval(), torch.randn(2, 2, 88)
    run = export(model, (x,), dynamic_shapes=({0: Dim.AUTO, 2: size},)).module()
    for n in (8, 256, 260, 800):
        x = torch.randn(3, 2, n)
        assert (run(x) - model(x)).abs().max() < BEYOND


class _Padded(torch.nn.Module):
    """MultiheadAttention with padding: from other tokens, or causal among the same ones."""

    def __init__(self, causal: bool) -> None:
        super().__init__()
        self.attention, self.causal = MultiheadAttention(16, 4, batch_first=True), causal

    def forward(self, x: torch.Tensor, source: torch.Tensor, padding: torch.Tensor) -> torch.Tensor:
        options = {}
        if self.causal:
            x, mask = source, source.new_full((source.shape[1],) * 2, -torch.inf).triu(1)
            options = {"attn_mask": mask, "is_causal": True}
        return self.attention(x, source, source, padding, need_weights=False, **options)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "causal"),
    [(torch.bool, False), (torch.float32, False), pytest.param(torch.bool, True, marks=pytest.mark.exhaustive)],
)
@torch.no_grad()
def test_padding_of_any_batch_and_length(kind, causal):
    """The mask is an input of the file, like the tokens: another batch has other padding."""

    def draw(batch: int, length: int, target: int) -> tuple[torch.Tensor, ...]:
        padding = torch.arange(length) >= torch.randint(1, length, (batch, 1))
        if kind.is_floating_point:  # a bias of the other keys, too
            padding = torch.randn(batch, length).masked_fill(padding, -torch.inf)
        return torch.randn(batch, target, 16), torch.randn(batch, length, 16), padding

    layer, inputs, sizes = _Padded(causal).eval(), draw(2, 20, 11), {0: Dim.DYNAMIC}
    both = {**sizes, 1: Dim.DYNAMIC}
    shapes = (sizes if causal else both, both, both)
    program = export(layer, inputs, dynamic_shapes=shapes)
    runs = {"export": program.module()}
    if find_spec("onnxscript") and find_spec("onnxruntime"):
        runs["onnx"] = _onnx(program)
    for batch, length, target in ((1, 7, 9), (3, 64, 2), (2, 65, 130), (1, 130, 65)):
        x, source, padding = draw(batch, length, 11 if causal else target)
        expected = layer(x, source, padding)
        hidden = padding if kind == torch.bool else padding == -torch.inf
        junk = torch.where(hidden[..., None], 9.0, source)
        for name, run in runs.items():
            assert (run(x, source, padding) - expected).abs().max() < BEYOND, (name, length)
            if not causal:  # whose queries are those tokens
                assert (run(x, junk, padding) - expected).abs().max() < BEYOND, (name, length)


def _onnx(program: ExportedProgram):
    """Return the call of a program in onnxruntime."""
    import onnxruntime

    file = io.BytesIO()
    torch.onnx.export(program, verbose=False, optimize=False).save(file)
    session = onnxruntime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    names = [x.name for x in session.get_inputs()]
    return lambda *xs: torch.from_numpy(
        session.run(None, dict(zip(names, map(torch.Tensor.numpy, xs), strict=True)))[0]
    )


# chunks that depend on the length; functions that need more arguments
BY_LENGTH = {"S4", "text_mixer", "WithLocal"}


class _Layer(torch.nn.Module):
    """A mixer in one of its forms."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        dims = 1 if causal else 2
        self.mixer = build_mixer(getattr(mixers, name), 32, dims=dims, layer=0, causal=causal)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, causal=self.causal)


def _runs_causally(name: str) -> bool:
    kind = getattr(mixers, name)
    return kind.causal_form and not issubclass(kind, Recurrent)


ONE_FORM = [(name, _runs_causally(name)) for name in sorted({*mixers.__all__} - BY_LENGTH)]
WITH_WINDOWS = [(name, False) for name in ("LAVO", "LongShortAttention", "WindowAttention")]


@pytest.mark.exhaustive
@pytest.mark.parametrize("name, causal", ONE_FORM + WITH_WINDOWS)
def test_mixers_at_any_length(name, causal):
    """All but S4, whose chunks depend on the length.

    Recurrent ones in their global form, of whose orders the causal form is one, others causally, if
    they can: their global form sums over all tokens; those with windows also in the global form.
    """
    layer = _Layer(name, causal).eval()
    traced, *others = [(9,), (5,), (70,), (200,)] if causal else [(9, 11), (5, 8), (70, 64)]
    sizes = ({axis: Dim.DYNAMIC for axis in range(1 + len(traced))},)
    run = export(layer, (torch.randn(2, *traced, 32),), dynamic_shapes=sizes).module()
    for batch, shape in zip((2, 1, 3), others, strict=False):
        x = torch.randn(batch, *shape, 32)
        assert (run(x) - layer(x)).abs().max() < BEYOND

"""Networks traced at one size and run at others: torch.export, onnxruntime, AOTInductor."""

import io
import shutil
from functools import partial

import pytest
import torch
from torch.export import Dim, export

from ndlightnet import NDLightNet, NDLightUNet, mixers
from ndlightnet.nn.mixers.base import build_mixer

net = partial(NDLightNet, num_classes=5, embed_dim=16, depth=1, tpe_states=8)
cells = partial(net, in_chans=2)
unet = partial(NDLightUNet, in_channels=2, out_channels=3, widths=(8, 16), depths=(0, 1))
# name: the network, the size it is traced at, and five others: axes of fewer and of more than 64
# tokens on either side, of sizes that patches and strides divide or not
NETS = {
    "text": (partial(net, 1, vocab_size=50), (40,), [(8,), (64,), (65,), (200,), (4300,)]),
    "series": (partial(cells, 1, patch_size=4), (90,), [(30,), (256,), (257,), (801,), (4000,)]),
    "image": (
        partial(cells, 2, patch_size=4), (30, 41),
        [(8, 8), (30, 300), (257, 100), (260, 512), (40, 999)],
    ),
    "local": (
        partial(cells, 2, patch_size=4, mixer=partial(
            mixers.WithLocal, mixer=mixers.SoftmaxAttention, local="both")), (30, 41),
        [(8, 8), (30, 100), (57, 100), (60, 52), (40, 99)],
    ),
    "video": (
        partial(cells, 3, patch_size=2), (9, 8, 10),
        [(4, 5, 6), (150, 4, 8), (3, 130, 9), (5, 6, 161), (131, 7, 133)],
    ),
    "unet1": (partial(unet, 1), (50,), [(8,), (63,), (130,), (517,), (1001,)]),
    "unet2": (
        partial(unet, 2), (22, 27), [(8, 8), (33, 300), (257, 100), (150, 141), (40, 401)],
    ),
    "unet3": (
        partial(unet, 3), (9, 10, 11),
        [(8, 8, 8), (140, 9, 12), (9, 150, 10), (7, 15, 160), (21, 22, 23)],
    ),
    "unet4": (
        partial(unet, 4), (5, 6, 7, 9),
        [(4, 4, 4, 4), (70, 4, 5, 6), (5, 66, 4, 7), (4, 6, 5, 67), (9, 8, 10, 11)],
    ),
}  # fmt: skip
BEYOND = 2e-5  # roundings of 6e-8 that a few hundred operations grow; outputs are of order 1


def sample(name: str, batch: int, space: tuple[int, ...]) -> torch.Tensor:
    if name == "text":
        return torch.randint(50, (batch, *space))
    return torch.randn(batch, 2, *space)


def dynamic(name: str, space: tuple[int, ...]) -> dict[int, Dim]:
    first = 1 if name == "text" else 2
    return {0: Dim.DYNAMIC} | {first + axis: Dim.DYNAMIC for axis in range(len(space))}


def traced(name: str):
    """A network, what it is traced with, and its dynamic sizes."""
    make, space, _ = NETS[name]
    return make().eval(), (sample(name, 2, space),), (dynamic(name, space),)


@torch.no_grad()
def agree(name: str, model, run) -> None:
    """`run` is the network at sizes that it was not traced at, and for other batches."""
    for batch, space in zip((1, 3, 2, 1, 1), NETS[name][2], strict=True):
        x = sample(name, batch, space)
        actual, expected = run(x), model(x)
        assert actual.shape == expected.shape
        assert 0.05 < expected.abs().max() < 20
        assert (actual - expected).abs().max() < BEYOND, (batch, space)


def names(quick=(), slow=(), exhaustive=()):
    """Networks, by how long they take."""
    params = [pytest.param(name, marks=pytest.mark.slow) for name in slow]
    params += [pytest.param(name, marks=pytest.mark.exhaustive) for name in exhaustive]
    return pytest.mark.parametrize("name", [*quick, *params])


@pytest.mark.slow
@names(
    slow=["image"],
    exhaustive=["video", "unet2", "unet3", "unet4"],
    quick=["text", "series", "local", "unet1"],
)
def test_export_is_the_network_at_any_size(name):
    model, inputs, shapes = traced(name)
    agree(name, model, export(model, inputs, dynamic_shapes=shapes).module())


@pytest.mark.slow
@pytest.mark.parametrize("size", [Dim.AUTO, Dim.DYNAMIC(min=8, max=4096), 4 * Dim("n", max=1024)])
def test_export_takes_what_the_docstring_says(size):
    model, x = NETS["series"][0]().eval(), torch.randn(2, 2, 88)
    run = export(model, (x,), dynamic_shapes=({0: Dim.AUTO, 2: size},)).module()
    for n in (8, 256, 260, 800):
        x = torch.randn(3, 2, n)
        assert (run(x) - model(x)).abs().max() < BEYOND


# each of the other networks takes minutes
@pytest.mark.slow
@names(slow=["text"], exhaustive=["image", "series", "unet3"])
def test_onnx_is_the_network_at_any_size(name):
    pytest.importorskip("onnxscript")
    runtime = pytest.importorskip("onnxruntime")
    model, inputs, shapes = traced(name)
    program = torch.onnx.export(model, inputs, dynamo=True, dynamic_shapes=shapes, verbose=False)
    file = io.BytesIO()
    program.save(file)
    session = runtime.InferenceSession(file.getvalue(), providers=["CPUExecutionProvider"])
    (given,) = session.get_inputs()
    agree(name, model, lambda x: torch.from_numpy(session.run(None, {given.name: x.numpy()})[0]))


@pytest.mark.exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="AOTInductor needs a C++ compiler")
@pytest.mark.parametrize("name", ["text", "image", "unet1"])
def test_aot_inductor_is_the_network_at_any_size(name, tmp_path):
    model, inputs, shapes = traced(name)
    with torch.no_grad():
        program = export(model, inputs, dynamic_shapes=shapes)
    path = str(tmp_path / "net.pt2")
    torch._inductor.aoti_compile_and_package(program, package_path=path)
    agree(name, model, torch._inductor.aoti_load_package(path))


# tiles and chunks that depend on the length; functions that need more arguments
BY_LENGTH = {"S4", "LAVO", "WindowAttention", "text_mixer", "WithLocal"}


class _Layer(torch.nn.Module):
    """A mixer in one of its forms."""

    def __init__(self, name: str, causal: bool) -> None:
        super().__init__()
        dims = 1 if causal else 2
        self.mixer = build_mixer(getattr(mixers, name), 32, dims=dims, layer=0, causal=causal)
        self.causal = causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixer(x, causal=self.causal)


@pytest.mark.exhaustive
@pytest.mark.parametrize("causal", [False, True], ids=["global", "causal"])
@pytest.mark.parametrize("name", sorted({*mixers.__all__} - BY_LENGTH))
def test_mixers_at_any_length(name, causal):
    """All but S4, LAVO and window attention, whose chunks and tiles depend on the length."""
    layer = _Layer(name, causal).eval()
    traced, *others = [(9,), (5,), (70,), (200,)] if causal else [(9, 11), (5, 8), (70, 64)]
    sizes = ({axis: Dim.DYNAMIC for axis in range(1 + len(traced))},)
    run = export(layer, (torch.randn(2, *traced, 32),), dynamic_shapes=sizes).module()
    for batch, shape in zip((2, 1, 3), others, strict=False):
        x = torch.randn(batch, *shape, 32)
        assert (run(x) - layer(x)).abs().max() < BEYOND

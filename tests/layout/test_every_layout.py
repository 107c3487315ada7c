"""For every layout, operator(layout) is the operator on each whole sample: values and gradients."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from ndlightnet.layout import Grid, Layout
from ndlightnet.nn.block import DropPath
from ndlightnet.nn.convolutional import ConvBlock, NormSiLU
from ndlightnet.nn.mixers import GLA, LightNetAttention
from ndlightnet.ops import Position, attention_layer, axis_causal_attention, axis_scan, global_attention
from ndlightnet.ops.local_mixing import dense, local_mixing, star
from ndlightnet.parallel import Slab, SlabPack
from ndlightnet.parallel import slab as slabs

from .arrangements import BOXES, GRIDS, PACKS, PACKS_OF_SLABS, SLABS, Arrangement
from .slab_threads import on_threads

HEADS, DIM = 2, 8
Weights = dict[str, Tensor]


class Operation(NamedTuple):
    """run(layout, tokens, mask, weights) maps tokens (batch, length, ...) by name to tokens. inputs: their sizes
    behind those of the grid; those of `hidden` are NaN where the mask hides them. weights: sizes of parameters for a
    number of axes."""

    run: Callable[[Layout, dict[str, Tensor], Tensor | None, Weights], Tensor]
    inputs: dict[str, tuple[int, ...]]
    hidden: tuple[str, ...]
    weights: Callable[[int], dict[str, tuple[int, ...]]]


ATTENTION = {"q": (HEADS, DIM), "k": (HEADS, DIM), "v": (HEADS, 3)}


def position(layout: Layout, weights: Weights, kind: str | None) -> Any:
    return Position(weights["theta"], layout, kind) if kind else None


def attend(
    kind: str | None, scale: float, layout: Layout, x: dict[str, Tensor], mask: Tensor | None, weights: Weights
) -> Tensor:
    where = position(layout, weights, kind)
    return global_attention(x["q"], scale * x["k"], x["v"], mask=mask, position=where, layout=layout, impl="torch")


def attend_causally(
    kind: str | None, window: int | None, forget: Any, layout: Layout, x: dict[str, Tensor], mask: Any, weights: Weights
) -> Tensor:
    where, options = position(layout, weights, kind), {"window": window, "forget": forget, "impl": "torch"}
    return axis_causal_attention(x["q"], x["k"], x["v"], layout, mask=mask, position=where, **options)[0]


def scan(both: bool, layout: Layout, x: dict[str, Tensor], mask: Tensor | None, weights: Weights) -> Tensor:
    decay = -weights["decay"].exp()
    reverse = (weights["back"], 2 * decay) if both else None
    return axis_scan(x["x"], weights["coef"], decay, reverse, mask, layout=layout, residual=both, impl="torch")


def mix(offsets: Any, layout: Layout, x: dict[str, Tensor], mask: Tensor | None, weights: Weights) -> Tensor:
    taps = offsets(layout.ndim)
    return local_mixing(x["x"], weights["taps"][: len(taps)], taps, layout=layout, mask=mask, impl="torch")


def pool(layout: Layout, x: dict[str, Tensor], mask: Tensor | None, weights: Weights) -> Tensor:
    """The mean of each sample, at each of its tokens."""
    values = layout.spread_samples(layout.pool(x["x"], mask))
    return values.expand(*x["x"].shape[:2], values.shape[-1])


def angles(ndim: int) -> dict[str, tuple[int, ...]]:
    return {"theta": (HEADS, DIM)}


def half_angles(ndim: int) -> dict[str, tuple[int, ...]]:
    return {"theta": (HEADS, DIM // 2)}


def scans(ndim: int) -> dict[str, tuple[int, ...]]:
    return {"coef": (ndim, DIM + 1, 3), "back": (ndim, DIM + 1, 3), "decay": (ndim, 3)}


def taps(ndim: int) -> dict[str, tuple[int, ...]]:
    return {"taps": (5**ndim, DIM)}


def ahead(ndim: int) -> Any:
    """Taps that read the next two steps of the first axis."""
    return tuple((-step, *[0] * (ndim - 1)) for step in range(3))


def nothing(ndim: int) -> dict[str, tuple[int, ...]]:
    return {}


MERGED = {
    "global, cosine": Operation(partial(attend, "cosine", 3), ATTENTION, ("k", "v"), angles),
    "global, rotary": Operation(partial(attend, "rotary", 3), ATTENTION, ("k", "v"), half_angles),
    "global, no position": Operation(partial(attend, None, 3), ATTENTION, ("k", "v"), nothing),
    "global, logits beyond exp": Operation(partial(attend, None, 500), ATTENTION, ("k", "v"), nothing),
    "pool": Operation(pool, {"x": (DIM,)}, ("x",), nothing),
}
OPERATIONS = MERGED | {
    **{
        f"causal, {kind}, window={window}, forget={forget}": Operation(
            partial(attend_causally, kind, window, torch.tensor(forget) if isinstance(forget, tuple) else forget),
            ATTENTION,
            ("k", "v"),
            angles if kind else nothing,
        )
        for kind, window, forget in (
            ("cosine", None, 0.0),
            ("cosine", None, (0.3, 0.0)),
            ("cosine", 3, 0.0),
            ("cosine", 2, (0.0, 0.2)),
            (None, 1, 0.0),
            (None, None, 0.5),
            (None, 20, 0.1),
        )
    },
    "scan": Operation(partial(scan, False), {"x": (DIM + 1,)}, ("x",), scans),
    "scan, both ways": Operation(partial(scan, True), {"x": (DIM + 1,)}, (), scans),
    "mixing, star": Operation(partial(mix, partial(star, radius=1)), {"x": (DIM,)}, ("x",), taps),
    "mixing, box of 2": Operation(partial(mix, partial(dense, radius=2)), {"x": (DIM,)}, ("x",), taps),
    "mixing, ahead": Operation(partial(mix, ahead), {"x": (DIM,)}, ("x",), taps),
    "mixing, causal": Operation(partial(mix, partial(star, radius=1, causal=True)), {"x": (DIM,)}, ("x",), taps),
}


def apply(operation: Operation, arrangement: Arrangement, samples: Any, masks: Any, weights: Weights) -> list[Tensor]:
    """Return the result of each sample. samples: of each input; masks: None or one of each sample."""

    def run(layout: Layout, rank: int) -> Tensor:
        x = {name: arrangement.rows(each, rank) for name, each in samples.items()}
        return operation.run(layout, x, masks and arrangement.rows(masks, rank), weights)

    return arrangement.joined(arrangement.run(run))


def alone(operation: Operation, shapes: Any, samples: Any, masks: Any, weights: Weights) -> list[Tensor]:
    """Return the same of each sample by itself."""
    results = []
    for i, shape in enumerate(shapes):
        single = Arrangement("", (shape,))
        x = {name: each[i : i + 1] for name, each in samples.items()}
        results += apply(operation, single, x, masks and masks[i : i + 1], weights)
    return results


def draw(operation: Operation, shapes: Any) -> tuple[dict[str, list[Tensor]], Weights]:
    """Draw the inputs of samples, and weights."""
    inputs = {name: [torch.randn(*s, *n).double() for s in shapes] for name, n in operation.inputs.items()}
    return inputs, {name: torch.randn(size).double() for name, size in operation.weights(len(shapes[0])).items()}


def check(operation: Operation, arrangement: Arrangement, masked: bool) -> None:
    """Compare the values at tokens that are not hidden, and all gradients. Masks hide a corner of the first sample,
    where whole boxes and slabs lie, and single tokens."""
    shapes = arrangement.shapes
    masks = [torch.rand(shape) > 0.3 if masked else torch.ones(shape, dtype=torch.bool) for shape in shapes]
    if masked:
        masks[0][tuple(slice(n // 2) for n in shapes[0])] = False
    samples, weights = draw(operation, shapes)
    for name in operation.hidden if masked else ():
        for x, mask in zip(samples[name], masks, strict=True):
            x[~mask] = torch.nan
    leaves = [x.requires_grad_() for x in (*chain(*samples.values()), *weights.values())]
    hiding = masks if masked else None
    actual = apply(operation, arrangement, samples, hiding, weights)
    expected = alone(operation, shapes, samples, hiding, weights)
    ours, theirs = (torch.cat([y[mask] for y, mask in zip(ys, masks, strict=True)]) for ys in (actual, expected))
    assert theirs.isfinite().all()
    torch.testing.assert_close(ours, theirs)
    scale = torch.randn_like(theirs)
    both = [torch.autograd.grad((y * scale).sum(), leaves, allow_unused=True) for y in (ours, theirs)]
    for ours, theirs in zip(*both, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            assert theirs.isfinite().all()
            torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("arrangement", [*GRIDS, *PACKS, *SLABS, *PACKS_OF_SLABS], ids=lambda one: one.name)
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operator_is_that_of_each_whole_sample(name, arrangement, masked):
    check(OPERATIONS[name], arrangement, masked)


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("arrangement", BOXES, ids=lambda one: one.name)
@pytest.mark.parametrize("name", MERGED)
def test_what_is_about_a_sample_reads_all_its_boxes(name, arrangement, masked):
    check(OPERATIONS[name], arrangement, masked)


@pytest.mark.parametrize("name", ["scan", "scan, both ways", "mixing, star", "mixing, box of 2", "mixing, causal"])
def test_what_is_about_lines_and_neighbours_stays_in_a_box(name):
    operation, layout = OPERATIONS[name], BOXES[1].layout(None)
    x = torch.randn(8, layout.length, *operation.inputs["x"], dtype=torch.float64)
    weights = {key: torch.randn(size, dtype=torch.float64) for key, size in operation.weights(2).items()}
    mask = torch.rand(8, layout.length) > 0.3
    boxes, rows = (operation.run(one, {"x": x}, mask, weights) for one in (layout, Grid(layout.shape)))
    assert torch.equal(boxes, rows)


def test_causal_forms_take_no_boxes():
    x = torch.randn(8, 6, HEADS, DIM)
    with pytest.raises(ValueError, match="its rows are boxes of samples, expected whole samples in a causal form"):
        axis_causal_attention(x, x, x, BOXES[1].layout(None))


@pytest.mark.parametrize("arrangement", [*GRIDS, *PACKS, *SLABS, *PACKS_OF_SLABS], ids=lambda one: one.name)
@pytest.mark.parametrize("name", OPERATIONS)
def test_what_is_not_finite_stays_where_it_is_seen(name, arrangement):
    """NaN in the last frame of each sample but the first, or but the last, does not reach that one and, in causal
    forms, no earlier frame."""
    operation = OPERATIONS[name]
    samples, weights = draw(operation, arrangement.shapes)
    expected = apply(operation, arrangement, samples, None, weights)
    for clean in (0, len(expected) - 1):
        bad = {key: [x.clone() for x in each] for key, each in samples.items()}
        for x in chain(*(each[:clean] + each[clean + 1 :] for each in bad.values())):
            x[-1:] = torch.nan
        actual = apply(operation, arrangement, bad, None, weights)
        torch.testing.assert_close(actual[clean], expected[clean])
        for ours, theirs in zip(actual, expected, strict=True):
            if "causal" in name:
                torch.testing.assert_close(ours[:-1], theirs[:-1])


@pytest.mark.parametrize("arrangement", [*GRIDS, *PACKS, *SLABS, *PACKS_OF_SLABS, *BOXES], ids=lambda one: one.name)
def test_stochastic_depth_drops_whole_samples(arrangement):
    layer = DropPath(0.5).train()
    samples = [torch.ones(*shape, 2) for shape in arrangement.shapes]
    dropped = set()
    for _ in range(8):
        rows = arrangement.run(lambda layout, rank: layer(arrangement.rows(samples, rank), layout))
        means = [x.mean().item() for x in arrangement.joined(rows) if x.numel()]
        assert set(means) <= {0.0, 2.0}
        dropped.add(tuple(means))
    assert len(dropped) > 1


def convolve(layer: Any, layout: Any, x: dict[str, Tensor], mask: None, weights: Weights) -> Tensor:
    cells = layer(layout.unflatten(x["x"]).movedim(-1, 1), layout=layout)
    return layout.flatten(cells.movedim(1, -1))


@pytest.mark.parametrize("arrangement", [*GRIDS[:3], *SLABS], ids=lambda one: one.name)
@pytest.mark.parametrize("kind", ["norm", "block"])
def test_convolutions_and_norms_see_the_whole(kind, arrangement):
    """With the gradient of the input; and what runs without a gradient."""
    dims = len(arrangement.shapes[0])
    layer = (NormSiLU(DIM) if kind == "norm" else ConvBlock(dims, DIM, DIM)).double()
    operation = Operation(partial(convolve, layer), {"x": (DIM,)}, (), nothing)
    check(operation, arrangement, False)
    samples, _ = draw(operation, arrangement.shapes)
    with torch.no_grad():
        actual = apply(operation, arrangement, samples, None, {})
        expected = alone(operation, arrangement.shapes, samples, None, {})
    torch.testing.assert_close(torch.stack(actual), torch.stack(expected))


STATE = HEADS * (2 * DIM + 2 * DIM * 3)  # numbers of a sample's State with angles
SENT = {  # by the first of two slabs of 3 and 2 planes of 4 cells: collectives, numbers for each sample
    "global, cosine": (1, STATE),
    "pool": (1, DIM),
    "causal, cosine, window=None, forget=0.0": (1, STATE),
    "causal, cosine, window=3, forget=0.0": (1, 2 * STATE),
    "causal, None, window=1, forget=0.0": (0, 0),
    "scan": (2, 3 * 4 * (DIM // 2) + 2 * 4 * (DIM // 2 + 1)),
    "mixing, star": (1, 4 * DIM),
    "mixing, box of 2": (1, 2 * 4 * DIM),
}


@pytest.mark.parametrize("name", SENT)
def test_what_slabs_send(name):
    arrangement, operation = SLABS[1], OPERATIONS[name]
    samples, weights = draw(operation, arrangement.shapes)
    sent = []

    def run(layout: Any, rank: int) -> None:
        x = {key: arrangement.rows(each, rank) for key, each in samples.items()}
        operation.run(layout, x, None, weights)
        sent.append((rank, layout.exchange.calls, layout.exchange.numbers / len(arrangement.shapes)))

    arrangement.run(run)
    assert sorted(sent)[0][1:] == SENT[name]
    assert len({calls for _, calls, _ in sent}) == 1


@pytest.mark.parametrize("masked", [False, True], ids=["all", "masked"])
@pytest.mark.parametrize("arrangement", [*SLABS, *PACKS_OF_SLABS], ids=lambda one: one.name)
def test_lines_may_be_exchanged_sample_by_sample(arrangement, masked, monkeypatch):
    monkeypatch.setattr(slabs, "PART", 1)
    check(OPERATIONS["scan, both ways"], arrangement, masked)


def test_slabs_add_a_scan_to_16_bit_tokens_in_the_dtype_of_the_result():
    """As the whole does: both round the scan itself, by itself, and nothing else."""
    arrangement = SLABS[0]
    samples = {"x": [torch.randn(*shape, DIM).bfloat16() for shape in arrangement.shapes]}
    weights = {"coef": torch.randn(1, DIM, 3), "decay": torch.randn(1, 3)}

    def run(layout: Layout, x: dict[str, Tensor], mask: None, weights: Weights) -> Tensor:
        options: Any = {"residual": True, "dtype": torch.float32, "impl": "torch"}
        return axis_scan(x["x"], weights["coef"], -weights["decay"].exp(), layout=layout, **options)

    operation = Operation(run, {"x": (DIM,)}, (), scans)
    actual = torch.stack(apply(operation, arrangement, samples, None, weights))
    expected = torch.stack(alone(operation, arrangement.shapes, samples, None, weights))
    # the scans are equal but for float32's sums, which may be rounded to a neighbour among 16-bit numbers
    assert actual.dtype == torch.float32 and (actual != expected).float().mean() < 0.1


def test_a_pack_of_slabs_is_refused_by_its_name_and_has_means_without_tokens():
    def run(exchange: Any) -> None:
        pack = SlabPack(Slab(shape, axis=0, sizes=shape[:1], exchange=exchange) for shape in ((2, 3), (4, 0)))
        with pytest.raises(ValueError, match=r"within shard_grid or predict_large.*: GLA takes whole samples"):
            GLA(8)(torch.randn(6, 8), layout=pack)
        means = pack.pool(torch.ones(1, 6, 2))
        assert means.tolist() == [[1, 1], [0, 0]]

    on_threads(1, run)


@pytest.mark.parametrize("joined", [False, True], ids=["layer", "operator"])
def test_an_exchange_is_awaited_when_its_result_is_needed(joined):
    """Local mixing begun before an attention sends its planes before the attention's States."""
    order: list[str] = []

    class Noted(Slab):
        def halo(self, *inputs: Any) -> Any:
            x, received = super().halo(*inputs)
            order.append("begin")
            return x, lambda: order.append("wait") or received()

        def _begin_gather(self, x: Tensor) -> Any:
            received = super()._begin_gather(x)
            order.append("send")
            return lambda: order.append("read") or received()

    mixer = LightNetAttention(8, heads=2, dims=2).double()

    def run(exchange: Any) -> None:
        layout, x = Noted((2, 3), axis=0, sizes=(2,), exchange=exchange), torch.randn(1, 6, 8, dtype=torch.float64)
        if not joined:  # as on a CPU
            mixer(x, layout=layout)
            return
        (_, up), norm, maps = mixer.gate, mixer.norm, (mixer.q_proj, mixer.k_proj, mixer.v_proj, mixer.gate[0])
        weights = norm.weight, norm.bias, norm.eps, up.weight, mixer.o_proj.weight
        taps = mixer.local_values.taps(layout, False)
        attention_layer(torch.cat([m(x) for m in maps], -1), 2, *weights, *taps, layout=layout)

    on_threads(1, run)
    assert order == ["begin", "send", "wait", "read"]

"""The benchmark: floors, cells that fail, files that agree, the figure. On a CPU, tiny."""

import csv
import json

import pytest
import torch
from torch.nn.functional import silu

import bench as bench_command
from ndlightnet.models import NDLightDiT
from ndlightnet.nn import mixers
from ndlightnet.ops import Position, global_attention
from ndlightnet_evidence import plots
from ndlightnet_evidence.bench import attention, output, peers, rows, stream, timing
from ndlightnet_evidence.bench import mixers as layers
from ndlightnet_evidence.bench.decode import decode
from ndlightnet_evidence.bench.frames import frames, packs
from ndlightnet_evidence.bench.generation import generation
from ndlightnet_evidence.bench.local import local
from ndlightnet_evidence.bench.norm import norm
from ndlightnet_evidence.bench.pretraining import Sample, pretraining
from ndlightnet_evidence.bench.rows import Bench, Case, Cell, Contender
from ndlightnet_evidence.bench.step import step
from ndlightnet_evidence.bench.tpe import tpe

CPU = torch.device("cpu")
CASE = Case("global", 2, 24, 3, 5)


@pytest.fixture
def bench():
    """A machine that copies 1 GB a second, without time for what compiles or tunes."""
    return Bench(CPU, "torch", quick=True, minutes=0, group="test", rates={"cpu": 1e9})


def of(bench, who, **where):
    return [c for c in bench.cells if c.who == who and all(getattr(c, name) == value for name, value in where.items())]


@pytest.mark.parametrize("direction, tensors", [("fwd", 4), ("fwd+bwd", 11)])
def test_the_floor_of_attention_is_its_tensors_once(bench, direction, tensors):
    times = attention.compare(bench, CASE, direction, [attention.ours(bench)])
    (floor,), (cell,) = of(bench, "floor"), of(bench, "ours")
    assert floor.ms == pytest.approx(tensors * (2 * 24 * 3 * 5) * 4 / 1e9 * 1e3)
    assert cell.ms == times["ours"] > 0
    assert cell.over_floor == pytest.approx(cell.ms / floor.ms)


def test_a_failing_peer_is_an_empty_cell_with_its_reason(bench, monkeypatch):
    monkeypatch.setattr(peers, "find_spec", lambda name: None)
    bench.minutes = 1

    def broken(q, k, v):
        raise RuntimeError("no such kernel\nand a long story")

    contenders = [Contender("broken", broken), attention.FLA_LINEAR, attention.ours(bench)]
    times = attention.compare(bench, CASE, "fwd", contenders)
    assert [times["broken"], times["fla linear"]] == [None, None] and times["ours"] > 0
    (cell,) = of(bench, "broken")
    assert (cell.ms, cell.over_floor, cell.mode) == (None, None, "")
    assert cell.note == "RuntimeError: no such kernel"
    assert output.remarks(bench.cells) == [
        "broken: RuntimeError: no such kernel",
        "fla linear: flash-linear-attention is not installed",
    ]
    assert output.table(bench.cells).splitlines()[2].count(" - ") == 2


def test_late_peers_are_left_out_and_ours_are_not(bench):
    attention.compare(bench, CASE, "fwd", [attention.ours(bench), attention.FLA_LINEAR])
    assert of(bench, "ours")[0].ms and of(bench, "fla linear")[0].ms is None
    assert "--minutes" in of(bench, "fla linear")[0].note


def test_backward_reaches_every_input():
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    grads = timing.backward_call(lambda x, y: x * y, (x, y))()
    torch.testing.assert_close(grads[0] / y, grads[1] / x)
    assert timing.forward_call(lambda x: 2 * x, [x])().grad_fn is None


def test_each_set_of_inputs_gets_its_turn():
    seen = []
    timed = timing.time_calls([lambda i=i: seen.append(i) for i in range(3)], CPU, laps=5)
    assert seen == [0, 1, 2, 0, 1, 2] and timed.ms is not None and timed.mode == "eager"


@pytest.mark.parametrize("kind", [None, "rotary", "cosine"])
def test_the_reference_that_peers_compile_is_ours(kind):
    q, k, v = (torch.randn(2, 24, 3, 6) for _ in range(3))
    slots = 3 if kind == "rotary" else 6
    lrpe = Position(torch.rand(3, slots), (2, 3, 4), kind) if kind else None
    expected = global_attention(q, k, v, position=lrpe, impl="torch")
    torch.testing.assert_close(peers.reference(q, k, v, lrpe), expected)


def test_the_chunks_that_peers_compile_are_causal():
    q, k, v = (torch.randn(1, 9, 2, 4) for _ in range(3))
    first = silu(q[:, 0]).sum(-1, True) * v[:, 0]  # it sees itself alone
    torch.testing.assert_close(peers.causal_chunks(q, k, v)[:, 0], first)


@pytest.mark.parametrize(
    "length, shape",
    [(1024, (4, 16, 16)), (4096, (16, 16, 16)), (16384, (16, 32, 32)), (65536, (16, 64, 64)), (262144, (64, 64, 64))],
)
def test_lengths_as_grids(length, shape):
    assert attention.cube(length) == shape


def test_all_groups_have_their_rows(bench, monkeypatch):
    """Everything of ours runs in every group."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    attention.attention(bench, shapes=[(1, 64)], heads=2, dim=8)
    names = {(c.row, c.direction) for c in of(bench, "ours")}
    assert {("global", "fwd"), ("causal", "fwd+bwd"), ("global, cosine", "fwd")} < names
    assert ("global, rotary, learnt angles", "fwd+bwd") in names
    attention.dims(bench, shapes=[(2, 64, 1, 6)])
    attention.natten(bench, grid=(2, 3, 2), heads=1, dim=8)
    attention.figure(bench, lengths=[64], heads=1, dim=8)
    tpe(bench, grid=(2, 3, 4), dim=4, states=(4,))
    local(bench, shapes=(("star", 1, (2, 3), 4), ("dense", 1, (2,) * 4, 4)))
    norm(bench, shapes=((2, 3, (4, 5)),))
    pretraining(bench, (Sample("tiny", (1, 4, 8, 8), (1, 2, 2), 2, 32, 1),), tokens=64)
    assert {"tiny, boxes of 2, 75% dropped", "tiny, boxes of 2, 90% dropped"} <= {c.row for c in of(bench, "ours")}
    decode(bench, batch=2, heads=1, dim=8)
    step(bench, grid=(2, 2, 2), dim=64, depth=1)
    frames(bench, grid=(3, 2, 2), heads=1, dim=8)
    packs(bench, large=[(2, 2, 2), (1, 4, 2)], small=[(2, 2, 1)] * 3, heads=2, dim=64)
    assert {c.row for c in of(bench, "dense")} == {
        "2 large volumes",
        "3 small volumes",
        "network, forward and backward",
    }
    assert [c for c in of(bench, "ours") if c.ms is None] == []
    assert [c for c in bench.cells if c.who in ("compile", "fla linear") and c.ms] == []
    share = bench.facts["mixing and position, share of the step"]
    parts = [c.ms for c in of(bench, "ours") if c.row in ("its attention", "its MD-TPE", "its local mixing")]
    assert share == pytest.approx(sum(parts) / of(bench, "ours", row="training step")[0].ms)
    (floor,) = of(bench, "floor", row="MD-TPE, 4 states, one way", direction="fwd+bwd")
    assert floor.ms == pytest.approx(5 * (2 * 3 * 4) * 4 * 2 / 1e9 * 1e3)
    (floor,) = of(bench, "floor", row="step")
    state = 2 * 1 * 8 * (1 + 1 + 8) * 4  # batch, heads, dim, (max, sum, memory), bytes
    assert floor.ms == pytest.approx((2 * state + 4 * 2 * 8 * 2) / 1e9 * 1e3)


def test_rows_of_generation_are_the_networks_they_name(monkeypatch):
    """Each is timed in training and in sampling, which takes twice the batch, half of it without a
    class; no product in it is one of zeros."""
    bench, seen = Bench(CPU, "torch", quick=True), {}
    forward = NDLightDiT.forward

    def spy(self, x, t, y):
        out = forward(self, x, t, y)
        row = len(bench.cells) // 2  # each is timed in training, then in sampling
        seen.setdefault(row, {})[self.training] = (self, len(x), y, out)
        return out

    monkeypatch.setattr(NDLightDiT, "forward", spy)
    generation(bench, first=2, dim=64, depth=1)
    assert [c for c in bench.cells if c.ms is None] == []
    names = list(dict.fromkeys(c.who for c in bench.cells))
    nets = {names[row]: calls[False][0] for row, calls in seen.items()}
    kinds = {who: type(net.blocks[0].mixer).__name__ for who, net in nets.items()}
    assert kinds == {
        "ours": "LightNetAttention",
        "without MD-TPE": "LightNetAttention",
        "without local": "LightNetAttention",
        "softmax": "SoftmaxAttention",
        "softmax + local": "WithLocal",
        "identity + local": "WithLocal",
    }
    assert [who for who, net in nets.items() if net.tpe is None] == ["without MD-TPE"]
    assert nets["ours"].blocks[0].mixer.local_values is not None
    assert nets["without local"].blocks[0].mixer.local_values is None
    assert type(nets["identity + local"].blocks[0].mixer.mixer).__name__ == "Identity"
    assert type(nets["softmax + local"].blocks[0].mixer.mixer).__name__ == "SoftmaxAttention"
    for calls in seen.values():
        assert calls[True][1] == 2 and calls[False][1] == 4
        assert (calls[False][2] == 10).tolist() == [True, True, False, False]
        assert all(call[3].any() for call in calls.values())


def test_the_command_without_a_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rows, "copy_rate", lambda *_: 1e10)
    assert bench_command.main(["attention", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "no CUDA device: attention left out" in printed and "| global | 1 x 1024 " in printed
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["versions"]["torch"] and content["copy_bytes_per_second"]["cpu"] > 0
    with open(tmp_path / "bench.csv") as file:
        lines = list(csv.DictReader(file))
    assert ",".join(lines[0]) == ("group,row,batch,length,heads,dim,pass,who,ms,over_floor,mode,note")
    cells = [{k: str(v) for k, v in cell.items()} for cell in content["cells"]]
    assert cells == lines
    assert {(r["pass"], r["who"]) for r in lines} == {
        (p, w) for p in ("fwd", "fwd+bwd") for w in ("floor", "ours", "sdpa")
    }


def test_an_unknown_group_is_named(capsys):
    with pytest.raises(SystemExit):
        bench_command.main(["mixer"])
    assert "mixer: expected some of attention" in capsys.readouterr().err


def test_operators_beside_theirs(bench):
    """Every rule, forward and backward, on a CPU in our torch form alone."""
    layers.operators(bench, shapes=[(1, 70)], heads=2, dim=8)
    cells = of(bench, "ours")
    assert {c.row for c in cells} == {row for row, _, _ in layers.RULES}
    assert all(c.ms for c in cells) and {c.direction for c in cells} == {"fwd", "fwd+bwd"}
    assert not any(c.ms for c in of(bench, "fla"))
    (floor,) = of(bench, "floor", row="KDA", direction="fwd")
    tokens = 70 * 2  # q, k, v, y and decays of 8 channels, one beta, float32
    assert floor.ms == pytest.approx(tokens * (5 * 8 + 1) * 4 / 1e9 * 1e3)


def test_mixers_of_the_catalogue_over_grids(bench, tmp_path, monkeypatch):
    bench.quick = False
    monkeypatch.setattr(Bench, "laps", 1)
    saved = []
    bench.save = lambda bench: saved.append({r["grid"] for r in bench.records})
    layers.mixers(bench, lengths=[9], grids=[(2, 3)], dim=16)
    assert saved == [{"9"}, {"9", "2x3"}]  # as it goes
    of_grid = {g: [r for r in bench.records if r["grid"] == g] for g in ("9", "2x3")}
    names = set(mixers.__all__)
    assert all({r["mixer"] for r in part} == names for part in of_grid.values())
    scans = {r["scan"] for r in of_grid["2x3"] if r["mixer"] == "Mamba"}
    assert scans == {"raster", "both", "axes"} and len(of_grid["9"]) == len(names)
    for r in bench.records:
        assert r["forward_ms"] and r["both_ms"] and r["tokens"] in (9, 6) and r["implementation"]
        m = getattr(mixers, r["mixer"])(16)
        assert r["parameters"] == sum(p.numel() for p in m.parameters())
        assert r["state_size"] == m.state_size
    layers.write(bench.records, tmp_path)
    with open(tmp_path / "mixers.csv") as file:
        lines = list(csv.DictReader(file))
    assert len(lines) == len(bench.records) and lines[0]["mixer"] == bench.records[0]["mixer"]
    assert (tmp_path / "mixers.png").read_bytes().startswith(b"\x89PNG")
    assert len(layers.table(bench.records).splitlines()) == 2 + len(lines)


def test_the_memory_of_a_stream_is_drawn(bench, tmp_path):
    stream.stream(bench, size=32, dim=64, depth=1, frames=50, at_once=2)
    assert all(c.ms for c in of(bench, "ours")) and len(of(bench, "ours")) == 6
    marks = [fact for fact in bench.facts if fact.startswith(stream.FACT)]
    assert len(marks) >= 2 * 25 and any(", window 16" in mark for mark in marks)
    stream.draw(bench.facts, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 5_000


def test_the_figure_is_a_picture(tmp_path):
    cells = [
        Cell("figure", "global", 1, n, 12, 64, direction, who, ms, None, "graph", "")
        for n, ms in ((4096, 0.1), (16384, None), (65536, 2.0))
        for direction in ("fwd", "fwd+bwd")
        for who in output.LINES
    ]
    output.draw(cells, tmp_path / "new" / "scans.png")
    picture = (tmp_path / "new" / "scans.png").read_bytes()
    assert picture.startswith(b"\x89PNG") and len(picture) > 10_000
    assert [plots.short(n) for n in (512, 4096, 1 << 20)] == ["512", "4k", "1M"]

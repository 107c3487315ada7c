"""The benchmark: floors, cells that fail, files that agree, the figures. On a CPU, tiny."""

import csv
import json
import time

import pytest
import torch

import bench as command
from ndlightnet.nn import mixers
from ndlightnet.nn.mixers.base import StreamingMixer
from ndlightnet.ops import Position, axis_scan, global_attention
from ndlightnet_evidence.bench import (
    attention_rows,
    length_rows,
    network_rows,
    operator_rows,
    output,
    rival_kernels,
    rows,
    size_rows,
    timing,
)
from ndlightnet_evidence.bench.rows import Bench, Case, Contender

CPU = torch.device("cpu")
CASE = Case("global", 2, 24, 3, 5)


@pytest.fixture
def bench():
    """A machine that copies 1 GB a second, without time for what compiles or tunes."""
    return Bench(CPU, "torch", quick=True, minutes=0, group="test", rates={"cpu": 1e9})


def of(bench, who, **fields):
    fields["who"] = who
    return [cell for cell in bench.cells if fields.items() <= cell.items()]


def test_a_failing_peer_is_an_empty_cell_with_its_reason(bench, monkeypatch):
    monkeypatch.setattr(rival_kernels, "find_spec", lambda name: None)
    bench.minutes = 1

    def broken(q, k, v):
        raise RuntimeError("no such kernel\nand a long story")

    contenders = [Contender("broken", broken), attention_rows.FLA_LINEAR, attention_rows.ours(bench)]
    times = attention_rows.compare(bench, CASE, "fwd", contenders)
    assert [times["broken"], times["fla linear"]] == [None, None] and times["ours"] > 0
    (cell,) = of(bench, "broken")
    assert (cell["ms"], cell["over_floor"], cell["mode"]) == (None, None, "")
    assert output.remarks(bench.cells) == [
        "broken: RuntimeError: no such kernel",
        "fla linear: flash-linear-attention is not installed",
    ]
    assert output.table(bench.cells).splitlines()[2].count(" - ") == 2
    bench.minutes = 0  # late peers are left out, ours are not
    attention_rows.compare(bench, CASE, "fwd", [attention_rows.ours(bench), attention_rows.FLA_LINEAR])
    assert of(bench, "ours")[-1]["ms"] and "--minutes" in of(bench, "fla linear")[-1]["note"]


def test_softmax_is_the_fastest_of_the_kernels_that_torch_has(bench, monkeypatch):
    """Its cell names the kernel; one that fails or is slower has none."""
    sdp, times = torch.backends.cuda, {"cuDNN": 3.0, "FlashAttention": 2.0, "broken": None}

    def run(*_):
        return sdp.cudnn_sdp_enabled(), sdp.flash_sdp_enabled(), sdp.math_sdp_enabled()

    flags = {name: within(run)() for name, within in rival_kernels.backends(True).items()}
    assert flags == {"cuDNN": (True, False, False), "FlashAttention": (False, True, False)}
    timings = [timing.Timing(ms, "graph" if ms else "", "" if ms else "no kernel") for ms in times.values()]
    monkeypatch.setattr(rows, "time_calls", lambda *_: timings.pop(0))
    bench.minutes = 99
    assert attention_rows.compare(bench, CASE, "fwd", [Contender("sdpa", dict.fromkeys(times, run))]) == {"sdpa": 2.0}
    (cell,) = of(bench, "sdpa")
    assert (cell["ms"], cell["note"]) == (2.0, "FlashAttention") and not timings
    assert "(FlashAttention)" in output.table(bench.cells)


def test_calls_take_turns_and_backward_reaches_every_input():
    x, y = (torch.randn(3, requires_grad=True) for _ in range(2))
    grads = timing.backward_call(lambda x, y: x * y, (x, y))()
    torch.testing.assert_close(grads[0] / y, grads[1] / x)
    assert timing.forward_call(lambda x: 2 * x, [x])().grad_fn is None
    order = []
    timed = timing.time_calls([lambda i=i: order.append(i) for i in range(3)], CPU, laps=5)
    assert order[:6] == [0, 1, 2, 0, 1, 2] and timed.ms is not None and timed.mode == "eager"


@pytest.mark.parametrize("kind", [None, "rotary", "cosine"])
def test_what_peers_compile_is_our_attention(kind):
    q, k, v = (torch.randn(2, 24, 3, 6) for _ in range(3))
    slots = 3 if kind == "rotary" else 6
    position = Position(torch.rand(3, slots), (2, 3, 4), kind) if kind else None
    expected = global_attention(q, k, v, position=position, impl="torch")
    torch.testing.assert_close(rival_kernels.reference(q, k, v, position), expected)


def test_lengths_as_grids():
    shapes = [(4, 16, 16), (16, 16, 16), (16, 32, 32), (16, 64, 64), (64, 64, 64)]
    assert [attention_rows.cube(length) for length in (1024, 4096, 16384, 65536, 262144)] == shapes


@pytest.mark.slow
def test_all_groups_have_their_rows_and_floors(bench, monkeypatch, tmp_path):
    """Everything of ours runs in every group; a floor is what has to be moved at 1 GB/s."""
    monkeypatch.setattr(torch.nn.Module, "compile", lambda self, **_: None)
    attention_rows.attention(bench, shapes=[(1, 64)], heads=2, dim=8)
    attention_rows.figure(bench, lengths=[64, 128], heads=1, dim=8)
    output.draw(bench.cells, tmp_path / "new" / "scans.png")
    assert (tmp_path / "new" / "scans.png").stat().st_size > 10_000
    operator_rows.tpe(bench, grid=(2, 3, 4), dim=4, states=(4,))
    assert [c for c in bench.cells if c["who"] in ("compile", "fla linear", "fla two scans") and c["ms"]] == []
    bench.minutes = 99
    options = set()

    def recorded(call):
        def record(*inputs, **keywords):
            options.add(frozenset(name for name in keywords if name != "impl" and keywords[name] is not None))
            return call(*inputs, **keywords)

        return record

    for name in ("global_attention", "axis_causal_attention"):
        monkeypatch.setattr(attention_rows, name, recorded(getattr(attention_rows, name)))
    attention_rows.frames(bench, grid=(3, 2, 2), heads=1, dim=8)
    attention_rows.packs(bench, "large", [(2, 2, 2), (1, 4, 2)], heads=2, dim=64)
    attention_rows.packs(bench, "small", [(2, 2, 1)] * 3, heads=2, dim=64)
    expected = ([], ["position"], ["window"], ["layout"], ["layout", "position"])
    assert options == {frozenset(names) for names in expected}  # each row times what it says
    operator_rows.local(bench, shapes=(("star", 1, (2, 3), 4), ("dense", 1, (2,) * 4, 4)))
    operator_rows.norm(bench, shape=(2, 3, 4, 5))
    drawn = [operator_rows._inputs(bench, (2, 3, 4), (3,), (3,), residual=more) for more in (False, True)]
    assert [[x.shape for x in xs] for xs in drawn] == [[(2, 3, 4), (3,), (3,)], [(2, 3, 4), (3,), (3,), (2, 3, 4)]]
    operator_rows.decode(bench, batch=2, heads=1, dim=8)
    network_rows.stream(bench, size=32, dim=64, depth=1, frames=100, at_once=1)
    network_rows.draw_stream(bench.facts, tmp_path / "stream.png")
    assert (tmp_path / "stream.png").stat().st_size > 5_000
    marks = {f"{network_rows.FACT} {n}, {name}" for n in range(2, 101, 2) for name in ("all frames", "window 16")}
    assert {fact for fact in bench.facts if fact.startswith(network_rows.FACT)} == marks
    network_rows.step(bench, grid=(2, 2, 2), dim=64, depth=1)
    network_rows.text(bench, {"tiny": (64, 1, 4096)}, 2048, 300)
    network_rows.generation(bench, side=16, batch=2, dim=64, depth=1)
    assert [c for c in of(bench, "ours") if c["ms"] is None] == []
    timed = {(c["row"], c["pass"], c["who"]) for c in bench.cells if c["ms"]}
    networks = {"ours", "without MD-TPE", "without local", "softmax", "identity + local"}
    assert {who for row, _, who in timed if row == "generation, 16 x 16"} == networks
    assert {row for row, _, who in timed if who == "dense"} == {"2 large volumes", "3 small volumes"}
    assert timed > {
        ("global, rotary, learnt angles", "fwd+bwd", "ours"),
        ("causal", "fwd+bwd", "ours"),
        ("global, cosine", "fwd", "ours"),
        ("axis-causal 3 x 2 x 2, window 16", "fwd", "ours"),
        ("3 small volumes, cosine", "fwd+bwd", "ours"),
        ("star, 2 axes", "fwd", "torch convolution"),
        ("norm, SiLU", "fwd+bwd", "torch"),
        ("step, cosine", "fwd", "ours"),
        ("one frame of a stream", "fwd", "ours"),
        ("training step", "fwd+bwd", "softmax"),
        ("training step, blocks compiled", "fwd+bwd", "ours"),
    }
    for row, direction, numbers, size in (
        ("global", "fwd", 4 * 64 * 2 * 8, 4),  # q, k, v, o
        ("global", "fwd+bwd", 11 * 64 * 2 * 8, 4),
        ("MD-TPE, 4 states, one way", "fwd+bwd", 5 * (2 * 3 * 4) * 4, 2),
        ("step", "fwd", 2 * 2 * 8 * (1 + 1 + 8) + 2 * 2 * 8, 4),  # a State read and written; q, k, v, o in bf16
        ("norm, residual, SiLU", "fwd+bwd", 8 * 2 * 3 * 20, 2),
    ):
        floor = of(bench, "floor", row=row, **{"pass": direction})[0]
        assert floor["ms"] == pytest.approx(numbers * size / 1e9 * 1e3), row
    cell = of(bench, "ours", row="global")[0]
    assert cell["over_floor"] == pytest.approx(cell["ms"] / of(bench, "floor", row="global")[0]["ms"])


def test_a_sweep_marks_the_steps_between_neighbours():
    """Of the time a token, up and down, within a row and pass; not beside a size without a time."""
    times = {"a": [2.0, 4.0, 5.0, 20.0, 13.0], "b": [1.0, 1.0, None, 9.0]}
    cells = [
        {"row": row, "pass": "fwd", "size": size, "batch": 1, "length": 10, "who": who, "ms": ms, "over_floor": 2.0}
        for row, values in times.items()
        for size, ms in enumerate(values)
        for who in ("floor", "ours")
    ]
    lines = [line.split("|") for line in output.neighbours(cells).splitlines()[2:]]
    marked = [(line[1].strip(), int(line[3])) for line in lines if "<--" in line[-2]]
    assert marked == [("a", 1), ("a", 3), ("a", 4)] and len(lines) == 9
    assert [line[6].strip() for line in lines] == ["", "2", "1.25", "4", "0.65", "", "1", "", ""]


def test_a_sweep_rounds_products_and_not_results(bench):
    bench.impl, bench.quick = "torch", True
    (point,) = [p for p in size_rows.lines(bench, True) if p.row == "MD-TPE, fp32, products in bf16"]
    x, *way = torch.randn(1, 16, 3), torch.randn(1, 3, 2), -torch.rand(1, 2)
    y = point.run(x, *way, *way)
    assert y.dtype == torch.float32
    assert torch.equal(y, axis_scan(x, *way, way, products=torch.bfloat16))


@pytest.mark.slow
def test_a_sweep_times_every_row(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(rows, "copy_rate", lambda *_: 1e10)
    monkeypatch.setattr(size_rows, "TOKENS", 64)
    threads = torch.get_num_threads()
    words = ["sweep", "--quick", "--device", "cpu", "--out", str(tmp_path), "--figure", str(tmp_path / "sweep.png")]
    assert command.main(words) == 0 and torch.get_num_threads() == threads
    timed = {(c["row"], c["pass"]) for c in json.loads((tmp_path / "bench.json").read_text())["cells"] if c["ms"]}
    names = ("MD-TPE, fp32", "global, length", "causal, length", "pack, length", "window", "tokens a frame")
    names += ("causal without a State, length", "local, radius", "3-D convolution, side")
    names += tuple(f"{kind}, length" for kind in ("GLA", "DeltaNet", "Mamba", "RWKV4"))
    expected = {(name, direction) for name in names for direction in ("fwd", "fwd+bwd")}
    assert timed == expected | {("stream, tokens a call", "fwd")}
    assert "| local, radius " in capsys.readouterr().out and (tmp_path / "sweep.png").stat().st_size > 5_000


def tiny(monkeypatch):
    monkeypatch.setattr(length_rows, "TOKENS", {"cpu": 64})
    monkeypatch.setattr(length_rows, "LENGTHS", [16, 32, 64, 128])
    monkeypatch.setattr(length_rows, "SIZES", {"cpu": (16, 2)})


@pytest.mark.slow
def test_lengths_draw_layers_and_states_that_do_not_grow(tmp_path, monkeypatch, capsys):
    tiny(monkeypatch)
    assert command.main(["lengths", "--device", "cpu", "--out", str(tmp_path)]) == 0
    cells = json.loads((tmp_path / "bench.json").read_text())["cells"]
    streaming = {name for name in mixers.__all__ if issubclass(getattr(mixers, name), StreamingMixer)} - {"Identity"}
    causal = {f"{name}, causal" for name in streaming | {"SoftmaxAttention"}}
    windows = {f"{kind}, window {w}" for kind in ("LAVO", "WindowAttention") for w in (16, 32, 64, 128)}
    layers = causal | windows | {"LightNetAttention, global", "SoftmaxAttention, global"}
    for direction, names in (("fwd+bwd", layers), ("fwd", causal)):
        timed = {(c["row"], c["length"]) for c in cells if c["pass"] == direction and c["ms"]}
        assert timed == {(name, n) for name in names for n in (16, 32, 64)}
    assert all(c["batch"] * c["length"] == 64 for c in cells if c["pass"] == "fwd+bwd")
    sizes = {name: [c["mb"] for c in cells if (c["row"], c["pass"]) == (name, "fwd")] for name in causal}
    assert sizes.pop("SoftmaxAttention, causal") == [2 * n * 16 * 4 / 1e6 for n in (16, 32, 64)]
    assert all(len(set(each)) == 1 and each[0] > 0 for each in sizes.values())
    assert "| state of a sequence, MB " in capsys.readouterr().out and (tmp_path / "lengths.png").stat().st_size > 5_000


def test_what_is_too_slow_or_large_is_left_out_with_a_mark(bench, monkeypatch):
    """At the length where it happens and at longer ones; an error is none of these."""
    tiny(monkeypatch)
    bench.quick = False
    results = {"LAVO": [0.1, 0.4, 0.1], "GLA": [0.1, torch.OutOfMemoryError("too large")], "S5": [KeyError("x")]}

    def timed(call, *_):
        result = results[call].pop(0)
        if isinstance(result, Exception):
            raise result
        return timing.Timing(1e3 * result, "graph")

    monkeypatch.setattr(rows, "time_calls", timed)
    for name in results:
        row = length_rows.Row(name, getattr(mixers, name), False)
        length_rows._over_lengths(bench, row, "fwd+bwd", lambda row, *_: row.name, time.monotonic() + 9)
    late = length_rows.Row("TNL", mixers.TNL, False)
    length_rows._over_lengths(bench, late, "fwd+bwd", lambda row, *_: row.name, time.monotonic() - 1)
    assert [(c["row"], c["length"], c["ms"], c["mode"], c["note"].partition(":")[0]) for c in bench.cells] == [
        ("LAVO", 16, 100, "graph", ""),
        ("LAVO", 32, 400, "graph", ""),
        ("LAVO", 64, None, "left out", "slow"),
        ("GLA", 16, 100, "graph", ""),
        ("GLA", 32, None, "left out", "out of memory"),
        ("S5", 16, None, "", "KeyError"),
        ("TNL", 16, None, "left out", "late"),
    ]
    marks = {line.split("|")[2].strip(): line for line in length_rows.table(bench.cells).splitlines()}
    assert "slow" in marks["LAVO"] and "out of memory" in marks["GLA"] and "late" in marks["TNL"]


@pytest.mark.parametrize("kind", [mixers.SoftmaxAttention, mixers.LightNetAttention, mixers.WindowAttention])
def test_a_step_of_decoding_is_the_last_token_of_the_causal_form(bench, monkeypatch, kind):
    """After 32 tokens and the last one once more; the cache of softmax holds the last one already."""
    tiny(monkeypatch)
    row = length_rows.Row("x", kind, True)
    torch.manual_seed(0)
    (call,) = length_rows._step(row, bench, 32, {}, "", lambda call: call)
    torch.manual_seed(0)
    net, x = row.build(bench).eval(), torch.randn(1, 32, 16)
    softmax = kind is mixers.SoftmaxAttention
    expected = net(x if softmax else torch.cat([x, x[:, -1:]], 1), causal=True)[:, -1:]
    y = call() if softmax else call()[0]
    torch.testing.assert_close(y, expected.expand(length_rows.SEQUENCES, -1, -1))


def test_a_training_pass_reaches_all_weights(bench, monkeypatch):
    tiny(monkeypatch)
    row = length_rows.Row("x", mixers.LAVO, False, 4)
    (call,) = length_rows._layer(row, bench, 16, {}, "", lambda call: call)
    shapes = [(4, 16, 16), *(tuple(w.shape) for w in row.build(bench).parameters())]
    grads = call()
    assert [tuple(g.shape) for g in grads] == shapes and all(g.any() for g in grads)


@pytest.mark.slow
def test_the_command_without_a_card(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(rows, "copy_rate", lambda *_: 1e10)
    assert command.main(["attention", "cpu", "--quick", "--out", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    assert "no CUDA device: attention left out" in printed and "| global | 1 x 1024 " in printed
    content = json.loads((tmp_path / "bench.json").read_text())
    assert content["versions"]["torch"] and content["copy_bytes_per_second"]["cpu"] > 0
    with open(tmp_path / "bench.csv") as file:
        lines = list(csv.DictReader(file))
    assert ",".join(lines[0]) == "group,row,batch,length,heads,dim,size,pass,who,ms,over_floor,mode,note"
    assert [{k: str(v) for k, v in cell.items()} for cell in content["cells"]] == lines
    expected = {(direction, who) for direction in ("fwd", "fwd+bwd") for who in ("floor", "ours", "sdpa")}
    assert {(line["pass"], line["who"]) for line in lines} == expected
    with pytest.raises(SystemExit):
        command.main(["mixer"])
    assert "mixer: expected some of attention" in capsys.readouterr().err

"""Speech of texts: distortion, alignment, samples, fit, test and predict, bad files."""

import csv
import json
import math
import wave
from itertools import product

import numpy as np
import pytest
import torch
from PIL import Image

from ndlightnet.data.errors import DataError
from ndlightnet.data.made.babble import make_babble
from ndlightnet.models import AutoregressiveTTS, ParallelTTS
from ndlightnet.training.speech.speech_data import MadeBabble, SpeechData, collate_spoken, letters_of, read_lines
from ndlightnet.training.speech.tts_task import (
    CEPSTRA,
    LONGEST,
    TTSTask,
    alignment_scores,
    distortions,
    warped_distance,
)
from tests.training.conftest import fit_and_test, last, launcher, set_up

CONFIG = """
seed_everything: 0
trainer: {accelerator: cpu, max_epochs: 2, log_every_n_steps: 1, enable_progress_bar: false}
model:
  lr: 1.0e-2
  net:
    class_path: ndlightnet.models.NETWORK
    init_args: {bands: 20, embed_dim: 16, depth: 1, decoder_depth: 1, tpe_states: 4}
data:
  class_path: ndlightnet.training.SpeechData
  init_args: {root: nowhere, batch_size: 4, rate: 8000, window: 256, step: 100, bands: 20, test: 3}
"""
SMALL = {"rate": 8000, "window": 256, "step": 100, "bands": 20, "test": 3}
speak = launcher(TTSTask, SpeechData, CONFIG.replace("NETWORK", "ParallelTTS"))
speak_by_steps = launcher(TTSTask, SpeechData, CONFIG.replace("NETWORK", "AutoregressiveTTS"))


@pytest.fixture(scope="module")
def babble(tmp_path_factory):
    return make_babble(tmp_path_factory.mktemp("babble") / "data", 15, progress=False)


def task_of(net=ParallelTTS) -> TTSTask:
    return TTSTask(net(256, 20, embed_dim=8, depth=1, decoder_depth=1))


# ------------------------------------------------------------------------------------ measures
def slow_warp(a: np.ndarray, b: np.ndarray) -> float:
    """The mean along the path of the least sum, of all paths."""

    def paths(i: int, j: int):
        if (i, j) == (0, 0):
            yield [(0, 0)]
        for before in ((i - 1, j - 1), (i - 1, j), (i, j - 1)):
            if min(before) >= 0:
                yield from ([*path, (i, j)] for path in paths(*before))

    sums = [[float(np.linalg.norm(a[i] - b[j])) for i, j in path] for path in paths(len(a) - 1, len(b) - 1)]
    best = min(sums, key=sum)
    return sum(best) / len(best)


@pytest.mark.parametrize("n, m", [*product((1, 2, 4), (1, 3, 5))])
def test_warping_takes_the_best_of_all_paths(n, m):
    rng = np.random.default_rng(0)
    a, b = rng.normal(size=(n, 3)), rng.normal(size=(m, 3))
    assert warped_distance(a, b) == pytest.approx(slow_warp(a, b))


def test_distortions():
    spectrum = torch.randn(30, 20, dtype=torch.float64)
    slower = spectrum.repeat_interleave(torch.arange(30) % 3 + 1, 0)
    assert distortions(slower, spectrum) == {"mcd": 0.0, "msd": 0.0}
    louder = distortions(spectrum + 0.5, spectrum)  # the first cepstrum is the loudness
    assert louder["mcd"] == pytest.approx(0, abs=1e-5) and louder["msd"] == pytest.approx(0.5, abs=1e-6)
    one = torch.zeros(1, 20, dtype=torch.float64)
    wave_of = torch.cos(math.pi * 3 * (torch.arange(20, dtype=torch.float64) + 0.5) / 20)[
        None
    ]  # the third cepstrum is 1
    decibels = 20 / math.log(10) * float(wave_of.square().mean().sqrt())
    assert distortions(wave_of, one)["mcd"] == pytest.approx(decibels)
    beyond = torch.cos(math.pi * (CEPSTRA + 1) * (torch.arange(20, dtype=torch.float64) + 0.5) / 20)[None]
    assert distortions(beyond, one)["mcd"] == pytest.approx(0, abs=1e-5)


def test_scores_of_alignments():
    straight = torch.eye(5).repeat_interleave(3, 0)
    assert alignment_scores(straight) == pytest.approx({"focus": 1.0, "order": 0.98}, abs=0.01)
    assert alignment_scores(straight.flip(1))["order"] == pytest.approx(-0.98, abs=0.01)
    assert alignment_scores(torch.full((15, 5), 0.2)) == pytest.approx({"focus": 0.2, "order": 0.0}, abs=1e-6)


# ------------------------------------------------------------------------------------- samples
def test_samples_and_batches(babble):
    data = SpeechData(str(babble), validation=0.25, **SMALL)
    set_up(task_of(), data)
    assert (len(data.train_set), len(data.val_set)) == (9, 3)
    frames = torch.cat([spectrum for _, spectrum, _ in data.train_set])
    assert frames.mean(0).abs().max() < 1e-4 and (frames.std(0) - 1).abs().max() < 1e-3
    tests = data.test_dataloader().dataset
    assert [number for *_, number in tests] == [12, 13, 14]
    letters, spectrum, _ = tests[0]
    assert bytes(letters[1:-1].tolist()).decode() == data.lines[12].text and letters[0] == letters[-1] == 0
    with wave.open(str(babble / "wavs" / "babble_0012.wav")) as file:
        assert spectrum.shape == (file.getnframes() // 2 // 100 + 1, 20)
    batch = collate_spoken(
        [(torch.tensor([0, 5, 0]), torch.ones(4, 2), 7), (torch.tensor([0, 0]), torch.ones(3, 2), 8)]
    )
    assert batch.mask.tolist() == [[True] * 3, [True, True, False]] and batch.numbers.tolist() == [7, 8]
    assert batch.frame_mask.tolist() == [[True] * 4, [True] * 3 + [False]] and not batch.spectra[1, 3:].any()
    assert letters_of(" A  b\n").tolist() == [0, *b"a b", 0]


TABLES = {
    "no text": ("a|\n", r"line 1: expected NAME\|text or NAME\|text\|text in words"),
    "no bar": ("a|one\n\nb two\n", "line 3: expected NAME"),
    "empty": ("\n", "has no lines"),
    "two of a name": ("a|one\nb|two\na|two\n", "names a more than once"),
}


@pytest.mark.parametrize("content, message", TABLES.values(), ids=TABLES)
def test_bad_tables(tmp_path, content, message):
    (tmp_path / "metadata.csv").write_text(content)
    with pytest.raises(DataError, match=f"metadata.csv.*{message}"):
        read_lines(tmp_path / "metadata.csv")


def test_tables(tmp_path):
    path = tmp_path / "metadata.csv"
    path.write_text("a|Dr. No|Doctor No\nb|Yes\n")
    assert [tuple(line) for line in read_lines(path)] == [("a", "Doctor No"), ("b", "Yes")]
    with pytest.raises(DataError, match=r"gone.csv: no such file"):
        read_lines(tmp_path / "gone.csv")


def test_wrong_data(babble, tmp_path):
    def setting_up(**options):
        set_up(task_of(), SpeechData(**{"root": str(babble), **SMALL, **options}))

    for options, message in (
        ({"test": 15}, "15 recordings, expected more than test=15"),
        ({"step": 129}, "^data.step: 129, expected at most half of window=256"),
        ({"rate": 0}, "^data.rate: 0, expected 1 or more"),
        ({"validation": 1.0}, "^data.validation: 1.0, expected a fraction below 1"),
        (
            {"window": 512, "step": 256, "rate": 500},
            r"babble_\d+.wav: \d frames, expected one or more for each of its ",
        ),
        ({"window": 40000}, r"letters, and half a window of 40000 samples"),
        ({"validation": 0.97}, "validation=0.97 leaves no recording to train on"),
        ({"bands": 10}, "expected a network with bands=10, got 20"),
    ):
        with pytest.raises(DataError, match=message):
            setting_up(**options)
    (tmp_path / "metadata.csv").write_text("a|one\nb|two\n")
    (tmp_path / "c.wav").touch()
    with pytest.raises(DataError, match=r"has no file of a in metadata.csv, expected one, of any folder below"):
        setting_up(root=str(tmp_path), test=1, validation=0)
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "a.wav").touch()
    with pytest.raises(DataError, match=r"has .*x/a.wav and .*y/a.wav of a in metadata.csv"):
        setting_up(root=str(tmp_path), test=1, validation=0)
    with pytest.raises(DataError, match=r"^data.clips: 3, expected more than test=3"):
        MadeBabble(str(tmp_path), clips=3, **SMALL)


# ------------------------------------------------------------------------- fit, test, predict
@pytest.mark.slow
@pytest.mark.parametrize("name", ["speak", "speak_by_steps"])
def test_a_training(request, name, babble, tmp_path):
    command, out = request.getfixturevalue(name), tmp_path / "run"
    done = fit_and_test(command, root=babble, out=out)
    results, rows = json.loads((out / "metrics.json").read_text()), [*csv.DictReader((out / "test.csv").open())]
    assert results["recordings"] == len(rows) == 3 and "\nmel cepstral distortion " in done.out
    for measure in ("mcd", "msd", "length", "spectrum_error"):
        assert np.mean([float(row[measure]) for row in rows]) == pytest.approx(results[measure], abs=1e-5)
    assert {*results["mean_frame"]} == {"mcd", "msd"}
    if name == "speak_by_steps":  # durations that a search gives say nothing of what was learnt
        assert 0 < results["focus"] <= 1 and -1 <= results["order"] <= 1 and "alignment: focus" in done.out
    else:
        assert not {"focus", "order"} & {*results} and "alignment" not in done.out
    page = (out / "index.html").read_text()
    for row in rows:
        assert row["text"] in page
        for file in (f"test/{row['name']}.wav", f"test/recorded/{row['name']}.wav", f"test/{row['name']}.png"):
            assert (out / file).is_file() and f'src="{file}"' in page
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    (inputs / "a.txt").write_text("Ta ke.\n\nSO\n")
    (inputs / "b.txt").write_text(" \n")
    (inputs / "c.txt").write_bytes(b"\xff")
    done = command("predict", root=babble, out=out, input=inputs)
    assert "--ckpt_path: predict expects the checkpoint of a training" in done.errors[0]
    done = command("predict", root=babble, out=out, input=inputs, ckpt=last(out))
    assert done.status == 1 and len(done.errors) == 2
    assert "b.txt: is blank" in "".join(done.errors) and "c.txt: cannot be read" in "".join(done.errors)
    files = sorted(path.name for path in (out / "predictions").iterdir())
    assert files == ["a.txt_1.png", "a.txt_1.wav", "a.txt_2.png", "a.txt_2.wav"]
    with wave.open(str(out / "predictions" / "a.txt_1.wav")) as file:
        assert file.getframerate() == 8000 and file.getnframes() > 0
    assert min(Image.open(out / "predictions" / "a.txt_1.png").size) > 100


def test_a_test_needs_the_training(speak, babble, tmp_path):
    done = speak("test", root=babble, out=tmp_path / "run")
    assert "--ckpt_path: test expects the checkpoint of a training" in done.errors[0]


@pytest.mark.slow
def test_the_training_says_what_spectra_are_and_which_recordings_are_the_test(speak, babble, tmp_path):
    out = tmp_path / "run"
    fit_and_test(speak, root=babble, out=out)
    for option in ("--data.init_args.test=9", "--data.init_args.rate=16000"):
        done = speak("test", option, root=babble, out=out, ckpt=last(out)).well()
        assert "over 3 recordings" in done.out
        assert "note: data: rate, window, step, bands and test are the training's, [8000, 256, 100, 20, 3]" in done.err
        done = speak("fit", option, "--trainer.max_epochs=3", root=babble, out=out, ckpt=last(out))
        assert "but the checkpoint was trained with [8000, 256, 100, 20, 3]" in done.errors[0]


def test_an_answer_does_not_depend_on_the_batch(babble):
    """Of a network that never ends, a text alone and beside a longer one."""
    task, data = task_of(AutoregressiveTTS).double(), SpeechData(str(babble), **SMALL)
    set_up(task, data)
    with torch.no_grad():
        task.net.head.bias[-1] = -100.0
    short, long = letters_of("ta"), letters_of("ta ke so fi hu pa")
    pair = collate_spoken([(short, torch.zeros(1, 20), 0), (long, torch.zeros(1, 20), 1)])
    alone, both = task.eval()._spectra(collate_spoken([(short, torch.zeros(1, 20), 0)])), task._spectra(pair)
    assert len(alone[0]) == len(both[0]) == LONGEST * 4 and len(both[1]) == LONGEST * len(long)
    torch.testing.assert_close(alone[0], both[0])
    task.net.head.bias.data.fill_(torch.nan)
    with pytest.raises(DataError, match=r"^model.net: its spectra are not numbers"):
        task._spectra(pair)


def test_a_network_of_too_few_letters(babble):
    task = TTSTask(ParallelTTS(64, 20, embed_dim=8, depth=1, decoder_depth=1))
    with pytest.raises(DataError, match=r"^model.net.vocab_size: 64, expected 256 or more"):
        set_up(task, SpeechData(str(babble), **SMALL))


def test_networks_have_what_the_task_calls():
    for net in (ParallelTTS, AutoregressiveTTS):
        task = task_of(net)
        task.log = lambda *_, **__: None
        items = [(torch.randint(256, (n,)), torch.randn(3 * n, 20), n) for n in (5, 8)]
        assert task.training_step(collate_spoken(items), 0).isfinite()

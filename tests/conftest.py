"""What all tests share: seeds, a strict comparison, the oracles, Eq. 5 and 6 written densely."""

import importlib.util
import os
import resource
import signal
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import ModuleType

if "PYTEST_XDIST_WORKER" in os.environ:  # a process per core: threads would wait for each other
    os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import pytest
import torch
from torch import Tensor

from .interpreter import patch_language_once

if not torch.cuda.is_available():  # kernels are then interpreted; Triton asks at its import
    os.environ.setdefault("TRITON_INTERPRET", "1")
    if importlib.util.find_spec("triton") is not None:
        patch_language_once()

SHARED = Path(__file__).parents[2] / "shared"
ORACLES = SHARED / "oracles"
os.environ.setdefault("NDLIGHTNET_DATA", str(SHARED / "data"))  # what roots in configs begin at


# Tests that `pytest` leaves out, as deselected: `pytest -m MARK` and a path below run them, and so
# does .ci/run. Those of evidence show how good the library is, not that it is right.
APART = {"evidence": Path(__file__).parent / "evidence", "exhaustive": None}


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    asked = [Path(config.invocation_params.dir, argument.split("::")[0]).resolve() for argument in config.args]
    for mark, folder in APART.items():
        for item in items:
            if folder is not None and folder in item.path.parents:
                item.add_marker(mark)
        below = folder is not None and any(folder in (path, *path.parents) for path in asked)
        if mark not in config.option.markexpr and not below:
            apart = [item for item in items if item.get_closest_marker(mark)]
            config.hook.pytest_deselected(items=apart)
            items[:] = [item for item in items if not item.get_closest_marker(mark)]


@pytest.fixture(autouse=True)
def seed():
    torch.manual_seed(0)


@pytest.fixture
def full_disk():
    """No file may grow beyond 100 kB, as if the disk were full there."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    signal.signal(signal.SIGXFSZ, handler)


@pytest.fixture(scope="session")
def load_oracle() -> Callable[[str], ModuleType]:
    """load_oracle(name): verified float64 reference functions. They need the fixture `float64`."""

    @cache
    def load(name: str) -> ModuleType:
        path = ORACLES / f"{name}.py"
        if not path.exists():
            pytest.skip(f"the oracles are not here: {path}")
        spec = importlib.util.spec_from_file_location(name, path)
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        dtype, rng = torch.get_default_dtype(), torch.get_rng_state()
        try:
            spec.loader.exec_module(module)  # sets the default dtype and the seed
        finally:
            torch.set_default_dtype(dtype)
            torch.set_rng_state(rng)
        return module

    return load


@pytest.fixture(scope="session")
def oracle(load_oracle: Callable[[str], ModuleType]) -> ModuleType:
    """Those of LightNet."""
    return load_oracle("verify_lightnet")


@pytest.fixture
def float64():
    """For tests that call the oracles: float64 by default, and the old default afterwards."""
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture(scope="session")
def close():
    """close(actual, expected, tol): shape, dtype, and max error relative to the largest value."""

    def check(actual: Tensor, expected: Tensor, tol: float) -> None:
        assert actual.shape == expected.shape
        assert actual.dtype == expected.dtype
        assert actual.isfinite().all() and expected.isfinite().all()
        if actual.numel():
            error = (actual - expected).abs().max().item()
            assert error <= tol * max(expected.abs().max().item(), 1e-30), f"error {error:.2e}"

    return check


@pytest.fixture(scope="session")
def close_grads():
    """close_grads(actual, expected, inputs, tol): gradients of the same random pull on both.

    Each may be a tuple of tensors. Errors are relative to the largest gradient of all inputs: that
    of k is a difference of terms of that size, and is exactly 0 for one token.
    """

    def check(actual, expected, inputs, tol: float, other=None) -> None:
        actual, expected = ((x,) if isinstance(x, Tensor) else tuple(x) for x in (actual, expected))
        pulls = [torch.randn_like(x) for x in expected]
        ours = torch.autograd.grad(actual, inputs, [p.to(a.dtype) for p, a in zip(pulls, actual, strict=True)])
        theirs = torch.autograd.grad(expected, inputs if other is None else other, pulls)
        scale = max(x.abs().max().item() for x in theirs)
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert a.shape == b.shape and a.isfinite().all()
            error = (a - b).abs().max().item()
            assert error <= tol * scale, f"gradient of input {i}: error {error / scale:.2e}"

    return check


@pytest.fixture(scope="session")
def dense():
    """Eq. 5 and 6 as a sum over all pairs of tokens, without chunks or States (maths.md 5.5a).

    y_t = sum_s sum_j SiLU(q)_tj exp(k_sj) / total_tj * cos(angle_tj - angle_sj) * v_s, where
    `total` sums exp(k) over the tokens that t sees. q, k, v (batch, length, heads, dim), float64.
    angles: (length, heads or 1, dim), or a pair of them for queries and for keys. q and k may have
    different lengths if not causal. see: how much of exp(k) counts, instead of causal: (target,
    source) or (target, source, heads).
    """

    def attention(q, k, v, *, mask=None, causal=False, angles=None, see=None):
        if see is None:
            see = torch.ones(q.shape[1], k.shape[1], dtype=q.dtype)
            see = see.tril() if causal else see
        see = see[..., None] if see.ndim == 2 else see
        scores = k[:, None] + see.log()[None, ..., None]  # (batch, target, source, heads, dim)
        if mask is not None:
            hidden = ~mask[..., None, None]
            scores, v = scores.masked_fill(hidden[:, None], -torch.inf), v.masked_fill(hidden, 0)
        nothing = (scores == -torch.inf).all(2, keepdim=True)
        share = scores.masked_fill(nothing, 0).softmax(2).masked_fill(nothing, 0)
        weights = (q * q.sigmoid())[:, :, None] * share
        if angles is not None:
            at, of = angles if isinstance(angles, tuple) else (angles, angles)
            weights = weights * (at[:, None] - of[None]).cos()
        return torch.einsum("btsh,bshe->bthe", weights.sum(-1), v)

    return attention


@pytest.fixture(scope="session")
def write_flac():
    """write_flac(path, samples): int16 samples (channels, n) as audio of 8 kHz."""
    soundfile = pytest.importorskip("soundfile")

    def write(path: Path, samples: np.ndarray) -> Path:
        soundfile.write(path, samples.T, 8000, "PCM_16", format="FLAC")
        return path

    return write


@pytest.fixture(scope="session")
def write_recordings(write_flac):
    """write_recordings(folder) -> the signals written: takes 0 to 6 of three digits, tones of 500,
    1,000 and 1,500 Hz, 300 to 1,200 samples long."""

    def write(folder: Path) -> list[np.ndarray]:
        rng = np.random.default_rng(0)
        index = [(digit, take) for take in range(7) for digit in range(3)]
        signals = []
        for digit, _ in index:
            turns = np.arange(rng.integers(300, 1200)) * 500 * (digit + 1) / 8000
            tone = 3000 * np.sin(2 * np.pi * turns) + rng.normal(0, 100, turns.shape)
            signals.append(tone.astype(np.int16))
        folder.mkdir(parents=True, exist_ok=True)
        write_flac(folder / "audio.flac", np.concatenate(signals)[None])
        offsets = np.cumsum([0, *map(len, signals)])
        digits, takes = (np.array(x, np.uint8) for x in zip(*index, strict=True))
        np.savez(folder / "index.npz", offsets=offsets, digit=digits, take=takes)
        return signals

    return write

"""The doors `hub` and `safetensors`: what is saved and loaded again is the same model."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from torch import nn

from ndlightnet.models.hub import Pretrained

from .door_models import Case, output


def _same(model: nn.Module, again: nn.Module, case: Case) -> None:
    """The same numbers under the same names, shared by the same parameters, and equal outputs."""
    saved, loaded = model.state_dict(), again.state_dict()
    assert list(saved) == list(loaded)
    assert all(torch.equal(saved[key], loaded[key]) for key in saved)
    assert len(list(model.parameters())) == len(list(again.parameters()))  # tied ones count once
    with torch.no_grad():
        for at in (0, 1):
            inputs = case.inputs(at)
            assert torch.equal(output(model.eval(), *inputs), output(again.eval(), *inputs))


def hub(case: Case, tmp_path: Path) -> None:
    """`config` through JSON, save_pretrained and from_pretrained, push_to_hub to a stub."""
    model = case.make()
    assert isinstance(model, Pretrained)
    again = type(model)(**json.loads(json.dumps(model.config, allow_nan=False)))
    assert again.config == model.config
    again.load_state_dict(model.state_dict())
    _same(model, again, case)
    model.save_pretrained(tmp_path / "saved", license="apache-2.0")
    loaded = type(model).from_pretrained(tmp_path / "saved")
    assert loaded.config == model.config
    _same(model, loaded, case)

    pushed: dict[str, bytes] = {}

    def upload_folder(**options: Any) -> str:
        pushed.update({p.name: p.read_bytes() for p in Path(options["folder_path"]).iterdir()})
        return "commit"

    repository = SimpleNamespace(repo_id="user/model")
    api = SimpleNamespace(create_repo=lambda **options: repository, upload_folder=upload_folder)
    with mock.patch("huggingface_hub.HfApi", lambda token: api):
        assert model.push_to_hub("user/model", license="apache-2.0") == "commit"
    for name in ("config.json", "model.safetensors"):
        assert pushed[name] == (tmp_path / "saved" / name).read_bytes()
    assert b"library_name: ndlightnet" in pushed["README.md"]


def safetensors(case: Case, tmp_path: Path) -> None:
    """safetensors' own save_model and load_model, tied weights included."""
    from safetensors.torch import load_model, save_model

    model, again = case.make(), case.make()
    save_model(model, str(tmp_path / "model.safetensors"))
    assert load_model(again, str(tmp_path / "model.safetensors"), strict=True) == (set(), [])
    _same(model, again, case)

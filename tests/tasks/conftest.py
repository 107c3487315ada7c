"""The scripts of tasks/ as modules, a fixture each: they are no package."""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import pytest

TASKS = Path(__file__).parents[2] / "tasks"


def load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, TASKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(TASKS))  # scripts find each other there
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.pop(0)
    return module


@pytest.fixture(scope="session")
def associative() -> ModuleType:
    return load("associative")


@pytest.fixture(scope="session")
def compare() -> ModuleType:
    return load("compare")


@pytest.fixture(scope="session")
def family() -> ModuleType:
    return load("family")


@pytest.fixture(scope="session")
def recall() -> ModuleType:
    return load("recall")


@pytest.fixture(scope="session")
def cubes() -> ModuleType:
    return load("cubes")

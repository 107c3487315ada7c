"""When the tests of evidence run.

What they test shows how good the library is, not that it is right: `pytest` leaves them out, as
deselected; `pytest -m evidence` and `pytest tests/evidence` run them, and so does .ci/run.
"""

from pathlib import Path

import pytest

HERE = Path(__file__).parent


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    mine = [item for item in items if HERE in item.path.parents]
    for item in mine:
        item.add_marker("evidence")
    asked = "evidence" in config.option.markexpr
    for argument in config.args:
        path = Path(config.invocation_params.dir, argument.split("::")[0]).resolve()
        asked = asked or path == HERE or HERE in path.parents
    if not asked:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]

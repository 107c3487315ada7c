import time

import pytest

from ndlightnet.data.threads import in_threads


def test_results_are_in_order(capsys):
    def slow_first(n):
        time.sleep(0.05 * (n == 0))
        return n * n

    assert in_threads(slow_first, range(9), "squares") == [n * n for n in range(9)]
    assert "squares" in capsys.readouterr().out
    assert in_threads(slow_first, [], "none", progress=False) == []
    assert capsys.readouterr().out == ""


def test_the_first_error_cancels_the_rest():
    done = []

    def fails(n):
        if n == 0:
            raise OSError("no such file")
        time.sleep(0.01)
        done.append(n)

    with pytest.raises(OSError, match="no such file"):
        in_threads(fails, range(1000), "files", workers=2)
    assert len(done) < 100

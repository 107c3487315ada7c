"""FrameCache: what was put comes back, in every process, within the limit."""

import pytest
import torch

from ndlightnet.data.video.frame_cache import FrameCache


def tensors(count):
    torch.manual_seed(0)
    return [torch.randint(256, (n + 1, 2, 3, 3), dtype=torch.uint8) for n in range(count)]


def test_what_was_put_comes_back():
    cache, values = FrameCache(5, 10_000), tensors(5)
    assert all(cache.get(number) is None for number in range(5))
    for number in (3, 0, 4):
        cache.put(number, values[number])
    for number in (0, 3, 4):
        assert torch.equal(cache.get(number), values[number])
    assert cache.get(1) is None
    early = cache.get(4)
    cache.put(1, values[1])  # the file grows
    assert torch.equal(cache.get(1), values[1]) and torch.equal(early, values[4])
    cache.put(1, values[0])  # already held
    assert torch.equal(cache.get(1), values[1])


def test_it_stays_within_its_limit():
    values = tensors(4)  # 18, 36, 54 and 72 bytes
    cache = FrameCache(4, 100)
    for number, value in enumerate(values):
        cache.put(number, value)
    assert [cache.get(number) is not None for number in range(4)] == [True, True, False, False]
    assert cache.path.stat().st_size == 54
    assert cache.fits(46) and not cache.fits(47)


def test_a_full_disk_holds_no_more(monkeypatch):
    cache, values = FrameCache(2, 10_000), tensors(2)
    cache.put(0, values[0])
    with monkeypatch.context() as patch:
        patch.setattr(type(cache.path), "open", lambda *_: (_ for _ in ()).throw(OSError(28, "full")))
        cache.put(1, values[1])
    assert cache.get(1) is None and torch.equal(cache.get(0), values[0])
    cache.put(1, values[1])  # it does not try again
    assert cache.get(1) is None


def _fill(cache, values, numbers):
    for number in numbers:
        cache.put(number, values[number])


@pytest.mark.parametrize("method", ["fork", pytest.param("spawn", marks=pytest.mark.exhaustive)])
def test_processes_share_it(method):
    if method not in torch.multiprocessing.get_all_start_methods():
        pytest.skip(f"no {method} here")
    context = torch.multiprocessing.get_context(method)
    cache, values = FrameCache(20, 10**6), tensors(20)
    halves = [context.Process(target=_fill, args=(cache, values, range(at, 20, 2))) for at in (0, 1)]
    for process in halves:
        process.start()
    for process in halves:
        process.join()
    assert [process.exitcode for process in halves] == [0, 0]
    assert all(torch.equal(cache.get(n), values[n]) for n in range(20))
    assert cache.path.exists()  # a process that ends does not take the file along


def test_the_file_goes_with_the_cache():
    cache = FrameCache(1, 100)
    path = cache.path
    assert path.exists()
    del cache
    assert not path.exists()

import threading
import time

import pytest

from lightning_memkit.data.loading.ahead import ahead


def settled(seen, number):
    """What was drawn once the thread rests."""
    ends = time.monotonic() + 10
    while len(seen) < number and time.monotonic() < ends:
        time.sleep(0.01)
    time.sleep(0.1)
    return list(seen)


def counted(seen, number=10):
    for item in range(number):
        seen.append(item)
        yield item


@pytest.mark.parametrize("number", [1, 3])
def test_items_come_in_their_order_and_so_many_lie_ready(number):
    seen = []
    items = ahead(counted(seen), number)
    assert next(items) == 0
    assert settled(seen, number + 1) == list(range(number + 1))
    assert list(items) == list(range(1, 10))


def test_an_error_comes_where_its_item_would_have_come():
    def fails():
        yield 1
        raise ValueError("broken")

    items = ahead(fails(), 4)
    assert next(items) == 1
    with pytest.raises(ValueError, match="broken"):
        next(items)


def test_a_source_that_hangs_does_not_hang_who_gives_up_on_it(monkeypatch):
    goes_on = threading.Event()

    def hangs():
        yield 1
        goes_on.wait()

    monkeypatch.setattr("lightning_memkit.data.loading.ahead._ENDS_SECONDS", 0.1)
    items = ahead(hangs(), 2, name="hangs")
    assert next(items) == 1
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "hangs"]
    items.close()
    assert thread.is_alive()
    goes_on.set()
    thread.join()


def test_the_thread_ends_with_the_iterator():
    before, seen = threading.active_count(), []
    items = ahead(counted(seen, 1000), 2)
    next(items)
    items.close()
    assert threading.active_count() == before
    assert len(seen) < 1000

"""Feeds: shapes, variety, seeds, and what must end when they are closed."""

from __future__ import annotations

import multiprocessing
import time

import pytest

torch = pytest.importorskip("torch")

from joulemark.errors import Unsupported  # noqa: E402
from joulemark.workloads import inputs  # noqa: E402
from joulemark.workloads.inputs import Arrange, DeviceFeed, HostFeed, LoaderFeed  # noqa: E402

AS_DRAWN = Arrange()


def make(batch_size, generator, device):
    return (
        torch.randn(batch_size, 3, 4, 4, generator=generator, device=device),
        torch.randint(0, 10, (batch_size,), generator=generator, device=device),
    )


def feed_of(source, seed=7, batch_size=5, arrange=AS_DRAWN):
    return inputs.feed_for(source, make, batch_size, seed, "cpu", arrange)


@pytest.fixture(params=["device", "loader"])
def source(request):
    return request.param


def test_batches_have_the_right_shapes_and_differ(source):
    feed = feed_of(source)
    first, second = feed(), feed()
    feed.close()
    for images, labels in (first, second):
        assert images.shape == (5, 3, 4, 4)
        assert labels.shape == (5,)
        assert images.count_nonzero() == images.numel()
    assert not torch.equal(first[0], second[0])


def test_a_seed_gives_the_same_data_again(source):
    def draw(seed):
        feed = feed_of(source, seed)
        batches = [feed()[0].clone() for _ in range(3)]
        feed.close()
        return torch.stack(batches)

    assert torch.equal(draw(7), draw(7))
    assert not torch.equal(draw(7), draw(8))


def test_samples_of_one_batch_differ():
    feed = feed_of("loader")
    images, _ = feed()
    feed.close()
    assert len({float(one.sum()) for one in images}) == 5


@pytest.mark.parametrize(("batch_size", "sets"), [(1, 8), (40, 6), (1000, 2)])
def test_resident_batches_are_as_many_as_memory_allows(monkeypatch, batch_size, sets):
    monkeypatch.setattr(inputs, "_ROTATED_BYTES", 48_000)
    feed = DeviceFeed(make, batch_size, torch.Generator().manual_seed(0), "cpu", AS_DRAWN)
    assert len(feed.sets) == sets
    addresses = [feed()[0].data_ptr() for _ in range(2 * sets)]
    assert len(set(addresses)) == sets
    assert addresses[:sets] == addresses[sets:]


def test_a_graph_reads_one_resident_batch():
    feed = DeviceFeed(make, 2, torch.Generator(), "cpu", AS_DRAWN, rotate=False)
    static = feed()
    before = static[0].clone()
    feed.fill(static)
    assert torch.equal(static[0], before)
    assert feed()[0].data_ptr() == static[0].data_ptr()


def test_a_loader_fills_the_tensors_of_a_graph():
    feed = LoaderFeed(make, 3, 1, "cpu", AS_DRAWN, workers=0)
    static = tuple(one.clone() for one in feed())
    before, address = static[0].clone(), static[0].data_ptr()
    feed.fill(static)
    assert not torch.equal(static[0], before)
    assert static[0].data_ptr() == address


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_copies_convert_format_and_layout(layout, dtype):
    host = make(2, torch.Generator().manual_seed(0), "cpu")
    images = torch.empty(2, 3, 4, 4, dtype=dtype, memory_format=layout)
    labels = torch.empty(2, dtype=torch.int64)
    inputs.copy_into((images, labels), host)
    torch.testing.assert_close(images, host[0].to(dtype))
    assert torch.equal(labels, host[1])
    assert images.is_contiguous(memory_format=layout)


def test_arranging_leaves_integers_alone():
    images, labels = Arrange(torch.float16, channels_last=True)(make(2, torch.Generator(), "cpu"))
    assert images.dtype == torch.float16
    assert images.is_contiguous(memory_format=torch.channels_last)
    assert labels.dtype == torch.int64


def test_a_closed_loader_leaves_no_worker():
    before = set(multiprocessing.active_children())
    feed = feed_of("loader")
    feed()
    workers = set(multiprocessing.active_children()) - before
    assert len(workers) == inputs.LOADER_WORKERS
    feed.close()
    deadline = time.monotonic() + 10
    while any(one.is_alive() for one in workers) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(one.is_alive() for one in workers)
    feed.close()


def test_a_failing_sample_reports_its_own_error():
    def broken(batch_size, generator, device):
        raise ValueError("no such file")

    feed = LoaderFeed(broken, 2, 0, "cpu", AS_DRAWN, workers=1)
    with pytest.raises(ValueError, match="no such file"):
        feed()
    feed.close()


def test_a_cpu_has_no_copy_from_its_own_memory():
    with pytest.raises(Unsupported, match="no copy"):
        HostFeed(make, 2, torch.Generator(), "cpu", AS_DRAWN, pinned=True)

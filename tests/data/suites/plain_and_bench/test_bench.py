import pytest


@pytest.mark.benchmark(group="models")
@pytest.mark.parametrize("batch", [1, 8])
def test_infer(bench, batch):
    bench.pedantic(lambda: sum(range(1000 * batch)), rounds=3)

def test_infer(bench):
    bench.pedantic(lambda: sum(range(1000)), rounds=3)

import module_that_is_not_installed  # a model's optional dependency


def test_x(bench):
    bench(lambda: None)

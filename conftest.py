"""The suite's fixtures; pytest's settings stand in tox.ini."""

pytest_plugins = [
    "fixtures.gpu", "fixtures.power", "fixtures.profiler", "fixtures.counters", "fixtures.thermal", "pytester",
]  # fmt: skip

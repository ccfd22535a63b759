"""The benchmarks: speed as ratios to a floor of the same run. They are not part of the tests."""

"""Speed, as ratios to a floor of the same run; never part of the tests."""

"""The options of benchmarks, and the plans that are made from them."""

"""The options of benchmarks, and from them their plans."""

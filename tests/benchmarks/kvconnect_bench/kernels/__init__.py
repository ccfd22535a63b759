"""Measures copies of blocks against what the machine can do: ``kvconnect bench kernels``."""

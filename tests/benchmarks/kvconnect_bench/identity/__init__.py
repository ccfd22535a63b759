"""Measures the cost of knowing what computed a block; each part is a module, see `plan`."""

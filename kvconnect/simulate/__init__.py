"""Predicts the effect of a cache on a workload: a block manager without tensors, and a trace."""

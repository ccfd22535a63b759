"""What a cache would do for a workload: the block manager without tensors, driven by a trace."""

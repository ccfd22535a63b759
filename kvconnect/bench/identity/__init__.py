"""What it costs to know what computed a block; each part is a module, see `parts`."""

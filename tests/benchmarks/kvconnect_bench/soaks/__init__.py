"""Runs random faults for as long as wanted: ``kvconnect check --soak``. Begin with `soak`."""

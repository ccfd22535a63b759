"""``kvconnect check --soak``: random faults for as long as wanted. Begin with `soak`."""

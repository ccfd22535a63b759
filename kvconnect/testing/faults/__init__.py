"""The backends, file systems, networks and clocks that misbehave on demand."""

"""Tools that tell whether a backend keeps its promises, shipped for everybody's backends."""

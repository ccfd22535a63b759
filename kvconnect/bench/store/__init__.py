"""``kvconnect bench store``: how fast a store is, against a floor of the same run."""

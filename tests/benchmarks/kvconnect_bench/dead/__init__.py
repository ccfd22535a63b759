"""``kvconnect bench dead``: what a store that dies costs the requests."""

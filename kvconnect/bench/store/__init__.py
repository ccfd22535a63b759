"""Measures a store against a floor of the same run: ``kvconnect bench store``."""

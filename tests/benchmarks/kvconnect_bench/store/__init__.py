"""The floors of stores, and LMCache and boto3 as peers, for ``kvconnect bench store``."""

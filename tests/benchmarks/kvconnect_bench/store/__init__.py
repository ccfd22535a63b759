"""Beside ``kvconnect bench store``: the floors of stores, and LMCache's and boto3's way."""

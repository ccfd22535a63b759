"""The connector API: saves blocks of the KV cache to external stores, and loads them back."""

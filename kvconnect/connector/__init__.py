"""The connector API: how blocks of the KV cache reach external stores, and come back."""

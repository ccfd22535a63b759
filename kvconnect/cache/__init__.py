"""The block manager: which block of KV memory holds which tokens."""

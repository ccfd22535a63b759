"""Counts every token of a prompt under one outcome: reused, new, or lost for one reason.

Imports the vocabulary only. Begin with `outcome`, then `account` (one prompt); `key_memory` has
the bounded memories of the blocks of all prompts.
"""

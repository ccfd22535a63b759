"""Chooses the next token: drafts that may be verified, penalties on logits, and the choice.

Imports the vocabulary only. Begin with `sampler`.
"""

"""Which token comes next: drafts that may be verified, penalties on logits, and the choice.

Imports the vocabulary only. Begin with `sampler`.
"""

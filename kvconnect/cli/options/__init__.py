"""Options that several commands have, or that are many: what they are, and what comes of them.

Begin with `engine_options`.
"""

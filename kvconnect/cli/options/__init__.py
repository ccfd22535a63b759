"""The options that several commands share, or that are many, and the objects made of them.

Begin with `engine_options`.
"""

"""The child processes that work on a subject's store, and that can be killed."""

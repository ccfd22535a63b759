"""The command line: a module per command, each thin over the Python API."""

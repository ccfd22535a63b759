"""A module per subcommand, each thin over the Python API; `kvconnect.cli.main` lists them."""

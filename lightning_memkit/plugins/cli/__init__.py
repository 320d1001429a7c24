"""The command line, built on Lightning's own."""

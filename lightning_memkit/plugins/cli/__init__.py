"""The command line over Lightning's own."""

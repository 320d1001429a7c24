"""Steps that several ranks take together."""

"""Where documents come from, and their tokens, made once and kept on disk."""

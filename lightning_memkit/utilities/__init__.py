"""Shared helpers: errors, patching, forks, progress, random states, cached answers."""

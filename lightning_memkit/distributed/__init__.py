"""Coordinate ranks so that a failed step of one rank fails on all ranks; without Lightning."""

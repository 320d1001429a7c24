"""Weighs each micro-batch in its batch by the divisors of its own loss."""

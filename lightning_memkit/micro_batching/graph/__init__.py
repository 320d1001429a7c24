"""What a loss divides by, read off the autograd graph behind it."""

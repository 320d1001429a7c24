"""Predict the cost of a training step before anything is allocated, by steps on fake tensors."""

"""Batches in micro-batches within a budget: training by the engine, evaluation, and what is predicted before."""

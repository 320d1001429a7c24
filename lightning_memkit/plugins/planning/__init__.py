"""Predictions and plans of a LightningModule's training."""

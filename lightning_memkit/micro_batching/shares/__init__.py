"""What each micro-batch weighs in its batch, by what its own loss has shown."""

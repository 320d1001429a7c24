"""Find the fastest configuration that fits a budget. Plain torch; adapted by `plugins.planning`."""

"""What fits a budget and is fastest: choices, the search, the plan. Plain torch; `plugins.planning` adapts it."""

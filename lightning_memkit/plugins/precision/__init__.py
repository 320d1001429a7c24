"""Pure bfloat16 over the user's own optimizer."""

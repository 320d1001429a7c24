"""Pure bfloat16 training with the user's own optimizer."""

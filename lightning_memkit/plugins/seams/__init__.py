"""The private names of Lightning's loops, and what the engine asks of them."""

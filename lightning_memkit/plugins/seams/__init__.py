"""All code that uses private names of Lightning's loops, on behalf of the engine."""

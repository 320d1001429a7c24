"""Memory in bytes: units, meters, the anatomy of a step; plain torch."""

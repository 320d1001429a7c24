"""MemoryReport: where every byte went; the callback, its live line, files and advice."""

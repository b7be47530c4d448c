"""Sessions on workers, seen from those who drive them: connections, entries, replies."""

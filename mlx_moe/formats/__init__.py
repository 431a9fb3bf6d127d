"""Where bytes are and how they become weights."""

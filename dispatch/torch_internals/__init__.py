"""Private torch APIs, a file a subsystem; nothing happens at import."""

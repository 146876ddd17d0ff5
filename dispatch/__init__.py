"""What happens to an aten op: the class table, the rule tables, tracing and lowering."""

"""What an aten op is: classes, rule tables, the types that kernels read, errors."""

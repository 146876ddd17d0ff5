"""The engine for aten ops: op classes, rule tables, the types that kernels read, errors."""

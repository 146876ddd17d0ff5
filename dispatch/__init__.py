"""The behaviour of aten ops on each type: op classes, rule tables, sizes, graphs, and a folder for each type."""

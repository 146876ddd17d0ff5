"""What a program reads beside its arguments: where that is, and whether it is what it was when a graph was recorded."""

"""Reports on a bucketed program: counters, and a figure of them."""

"""What a user reads of a bucketed program: counters, and a figure of them."""

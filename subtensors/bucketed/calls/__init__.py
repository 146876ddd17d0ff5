"""The inputs and outputs of a call of a bucketed program: its arguments, and results cut to their true sizes."""

"""What goes into a call of a bucketed program, and what comes out: arguments, and results cut to their true sizes."""

"""The state that a program reads besides its arguments: its locations, and checks that it is not stale."""

"""The state that a program reads beside its arguments: its locations, and checks that it is not stale."""

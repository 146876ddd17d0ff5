"""The optimizers: each a declaration of state, and what one step does to one tensor."""

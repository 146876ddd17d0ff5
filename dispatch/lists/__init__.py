"""What a torch call on a list becomes: the same call over each element, in as few calls as there can be."""

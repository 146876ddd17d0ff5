"""The losses of a linear layer over many classes: cross entropy with a part of the logits in memory at a time."""

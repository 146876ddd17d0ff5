"""The demo: a small GPT trained on the Python standard library, with plain PyTorch and with subtensors."""

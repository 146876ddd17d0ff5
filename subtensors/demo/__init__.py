"""The demo: a byte-level GPT trained on the Python standard library, with plain PyTorch and with subtensors."""

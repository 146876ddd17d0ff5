"""`StaticAddressTensor` and `Arena`: fixed addresses, and memory that can be released."""

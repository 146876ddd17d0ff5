"""`StaticAddressTensor` and `Arena`: addresses that hold, memory that can be lent away."""

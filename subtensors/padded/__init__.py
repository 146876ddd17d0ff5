"""`PaddedTensor`: a tensor whose true size varies, and what its calls become."""

"""Inputs of an operator by name, and the operator as a function of them: for its own tests and those of its kernels."""

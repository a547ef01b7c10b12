"""Solvers of linear models on two products, one file each."""

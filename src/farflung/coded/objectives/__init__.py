"""Losses and penalties of linear models, one file each."""

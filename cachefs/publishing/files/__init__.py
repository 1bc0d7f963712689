"""Finds out which file each sample of a dataset is: from lists in the dataset, from rules, or from its reads."""

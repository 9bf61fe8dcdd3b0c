"""The data sets that ship in the package."""

"""The routes, one file for each part of the interface."""

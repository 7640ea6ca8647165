"""The float64 reference that tests hold the package to. The package imports none of it."""

"""The passes that find the sites of a graph, its other matrix products, and, of a trace, their backwards."""

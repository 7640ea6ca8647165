"""What the package changes of Inductor's code generation: tiles, fusion, its kernel class."""

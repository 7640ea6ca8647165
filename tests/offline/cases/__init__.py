"""Models whose CUDA code the offline tests read, by subject. A case is a function that, called without arguments,
returns a compiled model and its inputs on the device "cuda"; no two modules have one of the same name."""

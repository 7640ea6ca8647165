"""What is decided about each site: recipe, support, whether it pays, kernels, extra inputs."""

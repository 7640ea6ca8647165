"""The choice of the kernel that multiplies: one `Problem` for every product of low-precision operands, a file for each
family of kernels, and `select`, which asks them in turn. Reports, early builds, passes, lowerings and ops ask it, so all
answer the same. The kernels' sources are in templates/."""

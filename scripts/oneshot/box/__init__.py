"""The machine: what it is, whether it is fit and stays so, and its processes."""

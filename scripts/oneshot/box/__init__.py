"""What the machine is, whether it is fit and stays so, and its processes."""

"""Training: the step, its optimizer and loss, checkpoints, metrics, and the run around them."""

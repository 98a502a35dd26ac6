"""Generation: a prompt is read once, and then one token at a time is added."""

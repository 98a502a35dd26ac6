"""What a model can do with its context: tasks, answers, scores and reports."""

"""Quality audits of sparse attention: recall, gradient error, starved keys."""

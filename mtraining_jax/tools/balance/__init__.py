"""Load balance and tuned mass fractions of data-parallel replicas."""

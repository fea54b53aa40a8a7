"""Code that only makes CPUs fast. It implements no equation of a paper, and changes results only by rounding."""

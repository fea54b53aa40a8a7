"""Code that only makes CPUs fast. No equation of a paper is here, and no result depends on it but by rounding."""

"""The cases and the equation of every attention, one file each; see ``attention_cases``."""

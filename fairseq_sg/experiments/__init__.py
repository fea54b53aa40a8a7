"""Experiments as recipes: published tables and our own, trained, evaluated and reported by one command.

``python -m fairseq_sg.experiments`` is the command, ``recipes/*.yaml`` are the recipes. docs/reproducing.md explains
both.
"""

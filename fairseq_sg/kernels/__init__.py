"""The implementations of the operators: ``fairseq-sg kernels``, also ``python -m fairseq_sg.kernels``."""

"""nn.Modules, one mechanism a file; they need torch alone, not fairseq."""

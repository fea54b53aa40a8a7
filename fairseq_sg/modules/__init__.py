"""nn.Modules, one mechanism a file; they need torch and numpy alone, not fairseq."""

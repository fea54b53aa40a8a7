"""Makes the datasets of the papers: `python -m data_prep DATASET --out FOLDER`; also `list` and `verify FOLDER`.

One dataset is one module, which says where its pairs come from and how they are split: `scan` (with `scan_grammar` and
`scan_splits`), `cogs`, `pcfg` (with `pcfg_functions` and `pcfg_sample`) and `cfq` (with `cfq_files`). `common` has what
datasets share, `official` finds or downloads published files, `text` reads them strictly, and `prepare` writes the raw
text, the fairseq binaries (`binarize`) and `dataset.json` into a folder that appears whole or not at all (`folder`).

Neither torch nor fairseq is imported before the text is binarized, so that `--raw-only` works without them.
"""

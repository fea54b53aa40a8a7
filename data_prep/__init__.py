"""Makes the datasets of the papers: ``python -m data_prep DATASET --out FOLDER``; also ``list``,
``verify``, ``reorder``.

One dataset is one module named after it, which says where its examples come from and how they are split; modules that
begin with its name hold its parts (``scan_grammar`` the grammar of ``scan``). ``common`` has the contract of a dataset,
``corpus`` and ``lm`` what a dataset makes: pairs of sentences, or running text. ``official`` finds or downloads
published files, ``archive`` reads members of archives, ``text`` reads lines strictly, and ``prepare`` writes the raw
text, the fairseq binaries (``binarize``) and ``dataset.json`` into a folder that appears atomically (``folder``).

Neither torch nor fairseq is imported before the text is binarized, so that ``--raw-only`` works without them.
"""

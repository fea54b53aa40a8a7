"""Makes the datasets of the papers: ``python -m data_prep DATASET --out FOLDER``; also ``list``,
``verify``, ``reorder``.

Each dataset is one file, or one folder with its language, its draws and its splits. They rest on

    dataset                 the contract of a dataset, and its options
    corpus, text_corpus     the products of a dataset: pairs of sentences, or running text;
    arrays                  or arrays
    binarize                writes fairseq's binaries
    folder                  prepares a folder atomically, with its ``dataset.json``
    sources, files.sha256   finds or downloads published files, and reads archives
    fields, mat             functions on grids; reads .mat files
    draws                   hold-outs and random draws
    text, subwords          reads lines strictly; SentencePiece

torch and fairseq are imported only to binarize, so ``--raw-only`` works without them.
"""

"""Makes the datasets of the papers: ``python -m data_prep DATASET --out FOLDER``; also ``list``,
``verify``, ``reorder``.

Each dataset is one module named after it, with its source and its splits. Modules whose names begin with that of a
dataset belong to it (``scan.grammar`` is the grammar of ``scan``). The other modules:

    common      the contract of a dataset
    corpus, lm  the products of a dataset: pairs of sentences, or running text
    official    finds or downloads published files
    archive     reads members of archives
    text        reads lines strictly
    prepare     writes raw text, fairseq binaries (``binarize``) and ``dataset.json`` into a folder
    folder      makes that folder appear atomically

torch and fairseq are imported only to binarize, so ``--raw-only`` works without them.
"""

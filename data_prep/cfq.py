"""CFQ: questions about films and the SPARQL queries that answer them (Keysers et al. 2020).

    Did M0 direct M1             ->  SELECT count ( * ) WHERE { M0 film.director.film M1 }
    Was M0 a female film editor  ->  SELECT count ( * ) WHERE { M0 a film.editor . M0 people.person.gender m_02zsn }
    Did M0 's star influence M1  ->  SELECT count ( * ) WHERE { ?x0 film.actor.film/ns:film.performance.film M0 .
                                     ?x0 influence.influence_node.influenced M1 }

Records are used with their questionPatternModEntities and sparqlPatternModEntities, tokenized as in the reference
(transformer_generalization, Csordás et al. 2021):

    questions   Every ASCII punctuation mark is a word, so M0's is M0 ' s.
    queries     Words are separated by white space, and ``count(*)`` is four words. A word loses one leading ``ns:``;
                then a leading ``m.`` becomes ``m_``.

Source and target share one dictionary.

Splits, by the official index files:

    mcd1, mcd2, mcd3            maximum compound divergence: 95,743 to train, 11,968 ``dev``, 11,968 ``gen``
    query_complexity_split      training queries are short, those of ``dev`` and ``gen`` long ("output length")
    question_complexity_split, question_pattern_split, query_pattern_split
                                likewise by the complexity or the pattern of question or query
    random_split                ``train``, ``valid`` and ``test`` are drawn alike

``dev`` has the distribution of ``gen``, not of training, except with random_split. By default the training set is
complete. The authors recommend tuning on a part of it: ``--holdout 0.1`` takes a tenth as ``valid``.

Source: cfq1.1.tar.gz of github.com/google-research/google-research/tree/master/cfq, CC BY 4.0: ``--archive FILE``, or
``--raw-dir FOLDER`` for the unpacked folder ``cfq``. Its size and hash are not known here. The hashes of the input
are recorded, and the sizes of the subsets are checked. The code was tested on small invented files of the same form,
never on the archive itself.
"""

from __future__ import annotations

import argparse
import re
import string
from pathlib import Path

from data_prep.cfq_files import PARTS, find_dataset, read_archive, read_folder
from data_prep.corpus import Corpus, count_words
from data_prep.dataset import DataError, Dataset, Json, UsageError, check_sizes, seed_number, share
from data_prep.draws import hold_out
from data_prep.text import sha256

# Published sizes of trainIdxs, devIdxs and testIdxs.
SIZES = {
    "mcd1": (95_743, 11_968, 11_968),
    "mcd2": (95_743, 11_968, 11_968),
    "mcd3": (95_743, 11_968, 11_968),
    "query_complexity_split": (100_654, 9_512, 9_512),
    "query_pattern_split": (94_600, 12_489, 12_589),
    "question_complexity_split": (98_999, 10_339, 10_340),
    "question_pattern_split": (95_654, 12_115, 11_909),
    "random_split": (95_744, 11_967, 11_967),
}
TOGETHER = 181  # words, published
DEFAULT_SEED = 1
PUNCTUATION = re.compile(f"([{re.escape(string.punctuation)}])")


class Cfq(Dataset):
    """``python -m data_prep cfq``."""

    name = "cfq"
    title = "CFQ"
    source = "cfq1.1.tar.gz of google-research"
    licence = "CC BY 4.0"
    size = "some 260 MB"
    arch = "sg_transformer_cfq"
    splits = tuple(SIZES)

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--split", required=True, choices=self.splits, metavar="SPLIT", help=", ".join(self.splits))
        source = parser.add_mutually_exclusive_group(required=True)
        source.add_argument("--archive", type=Path, metavar="FILE", help="the official cfq1.1.tar.gz")
        source.add_argument("--raw-dir", type=Path, metavar="FOLDER", help="the folder cfq unpacked from it")
        parser.add_argument(
            "--holdout",
            type=share,
            metavar="F",
            help="share of the training questions that becomes valid (default: 0, no valid; not with "
            "random_split, which has its own)",
        )
        parser.add_argument(
            "--seed", type=seed_number, metavar="N", help=f"seed of --holdout (default: {DEFAULT_SEED})"
        )

    def request(self, args: argparse.Namespace) -> Json:
        holdout = args.holdout or 0.0
        if args.split == "random_split":
            if args.holdout is not None:
                raise UsageError("--holdout does not go with random_split, which has its own validation set")
            holdout = None
        if args.seed is not None and not holdout:
            raise UsageError("--seed has no effect: nothing is held out")
        seed = DEFAULT_SEED if args.seed is None else args.seed
        return {
            "split": args.split,
            "holdout": holdout,
            "seed": seed if holdout else None,
            "source_sha256": [sha256(path) for path in source_files(args)],
        }

    def build(self, args: argparse.Namespace, request: Json) -> Corpus:
        read, source = (read_folder, args.raw_dir) if args.archive is None else (read_archive, args.archive)
        pairs, indices, files = read(source, args.split, (question_words, query_words))
        names = ("train", "valid", "test") if args.split == "random_split" else ("train", "dev", "gen")
        subsets = {name: [pairs[i] for i in indices[part]] for name, part in zip(names, PARTS, strict=True)}
        published = dict(zip(names, SIZES[args.split], strict=True))
        check_sizes(subsets, published)
        rule, membership = f"split by the index file {args.split}.json", "the published ones"
        words = count_words(subsets).together
        if words != TOGETHER:
            membership += f", but with {words} words in the common vocabulary instead of the published {TOGETHER}"
        if request["holdout"]:
            train, valid = hold_out(subsets["train"], request["holdout"], request["seed"])
            subsets = {"train": train, "valid": valid, "dev": subsets["dev"], "gen": subsets["gen"]}
            rule += f"; valid is {request['holdout']:g} of the questions that occur once in train"
        return Corpus(subsets, published, rule, membership, {"files": files}, None, joined=True, official=True)


def source_files(args: argparse.Namespace) -> list[Path]:
    """The archive, or the existing files of the folder that are read. Raises DataError if there are none."""
    if args.archive is None:
        dataset = find_dataset(args.raw_dir)
        return [path for path in (dataset, dataset.parent / "splits" / f"{args.split}.json") if path.is_file()]
    if not args.archive.is_file():
        raise DataError("--archive is not a file", args.archive)
    return [args.archive]


def question_words(question: str) -> str:
    """Splits a question into words between single spaces."""
    return " ".join(PUNCTUATION.sub(r" \1 ", question).split())


def query_words(query: str) -> str:
    """Splits a query into words between single spaces."""
    words = (word.removeprefix("ns:") for word in query.replace("count(*)", "count ( * )").split())
    return " ".join("m_" + word.removeprefix("m.") if word.startswith("m.") else word for word in words if word)
